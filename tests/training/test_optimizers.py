"""Optimizers of a run, and results that are read one step late."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from training import optimizers, trainer
from training.config import Config, resolve
from zero_jax import Zero, abstract_mesh
from zero_jax.models import gpt
from zero_jax.models.optimizers import decayed
from zero_jax.plan.case import Case


def test_results_are_read_one_late():
    made = []
    results = trainer.one_late(made.append(n) or n for n in range(4))
    assert [(result, len(made)) for result in results] == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_decay_is_for_kernels_and_embeddings_and_nothing_else():
    shapes = nnx.state(nnx.eval_shape(lambda: gpt.GPT(gpt.preset("nano"), rngs=nnx.Rngs(0))))
    flags, sizes = jax.tree.leaves(decayed(shapes)), [x.size for x in jax.tree.leaves(shapes)]
    d, layers, rows = 128, 4, 256 + 128
    matrices = layers * 12 * d * d + rows * d
    assert sum(s for s, f in zip(sizes, flags, strict=True) if f) == matrices


def test_other_steps_than_before_are_said_with_both_rates():
    """Half way of the cosine from 1 to 0.1, and its end."""
    config = Config(lr=1.0, warmup=2, steps=10)
    said = optimizers.rescheduled(config, {"steps": 6, "lr": 1.0, "warmup": 2}, 6)
    assert "--steps 10" in said and "--steps 6" in said and "is 0.55 instead of 0.1" in said
    assert "--lr 0.182" in said, "at which the next step has the former rate"
    assert optimizers.rescheduled(config, {"steps": 6, "lr": 1.0, "warmup": 2}, 1) is None
    assert optimizers.rescheduled(config, {"steps": 10, "lr": 1.0, "warmup": 2}, 6) is None


@pytest.mark.parametrize("name", optimizers.RATES)
def test_every_optimizer_is_the_planned_one(name, monkeypatch):
    """The planned step has the same state and the same operations, at whatever rate."""
    config = resolve(Config(optimizer=name), optimizers.RATES)
    monkeypatch.setattr(optimizers, "rate", lambda config: optax.constant_schedule(config.lr))
    case = Case(gpt.preset("nano"), Zero(abstract_mesh(4)), name, rows=4)
    abstract = jax.eval_shape(case.make)

    def traced(tx):
        return str(jax.make_jaxpr(lambda p: tx.update(p, tx.init(p), p))(abstract))

    assert traced(case.tx) == traced(optimizers.make(config))


def test_clipping_bounds_the_step_and_0_switches_it_off():
    grads = {"kernel": jnp.full((2, 2), 100.0)}
    for clip, norm in ((2.0, 2.0), (0.0, 200.0)):
        config = Config(optimizer="sgd", lr=1.0, warmup=0, weight_decay=0.0, clip=clip)
        tx = optimizers.make(config)
        updates = jax.jit(lambda grads, tx=tx: tx.update(grads, tx.init(grads), grads)[0])(grads)
        assert float(optax.global_norm(updates)) == pytest.approx(norm, rel=1e-5)
