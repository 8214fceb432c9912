"""The compiled step sends and holds what the paper says (section 7), counted in the executable."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax.hlo import auditor
from zero_jax.models import gpt
from zero_jax.plan import model_states, text_model

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
ADAMW = optax.adamw(1e-3)
LAYERS, WIDTH = 8, 64
KERNELS = LAYERS * 8 * WIDTH**2
PSI = KERNELS + LAYERS * 4 * WIDTH

# (all-gather, reduce-scatter, all-reduce) in elements per parameter, with k micro-batches. At stage
# 3 the last layer stays gathered between the passes. XLA for CPUs removes barriers, and moves both
# gathers of the first layer, which is not in the loop over layers, out of that over micro-batches.
GATHERED = lambda k: 2 * k - (k + 2 * (k - 1)) / LAYERS  # noqa: E731
ELEMENTS = [lambda _: (0, 0, 2), lambda _: (1, 1, 0), lambda k: (1, k, 0)]
ELEMENTS += [lambda k: (GATHERED(k), k, 0)]


def make():
    shapes = {"up": (WIDTH, 4 * WIDTH), "bias": (4 * WIDTH,), "down": (4 * WIDTH, WIDTH)}
    return {name: jnp.ones((LAYERS, *shape)) for name, shape in shapes.items()}


def loss(params, rows):
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"], None

    out = jax.lax.scan(layer, rows, params)[0]
    return zero_jax.Weighted(jnp.sum(jnp.square(out)), jnp.float32(len(rows)))


def audit(stage, k=1, tx=ADAMW, **settings):
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=stage, grad_accum_steps=k, **settings)
    params = zero.eval_shape(make)
    rows = jax.ShapeDtypeStruct((8 * k, WIDTH), jnp.float32)
    tx = zero.optimizer(tx)
    return auditor.audit(zero.train_step(loss, tx).lower(params, tx.init(params), rows).compile())


ROWS = [(0, 1, "block"), (1, 1, "none"), (1, 3, "block"), (2, 3, "dots"), (3, 1, "none")]
ROWS += [(3, 3, "block"), SLOW(0, 3, "block"), SLOW(2, 1, "block"), SLOW(3, 2, "dots")]


@pytest.mark.parametrize(("stage", "k", "remat"), ROWS)
def test_a_step_sends_and_holds_what_the_paper_says(stage, k, remat):
    report = audit(stage, k, remat=remat)
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    sent = [report.sent_elements.get(kind, 0) / PSI for kind in kinds]
    assert sent == pytest.approx(ELEMENTS[stage](k), abs=0.01)
    # Ψ is divisible by 8 leaf by leaf; beside it: Adam's counter, the guard, the batch.
    states = 12 * PSI // (8 if stage else 1)
    assert report.argument_bytes == states + 4 + 16 + k * WIDTH * 4
    # One all-reduce for loss and weight together, and one more for the norm, of two sums.
    small = [c for c in report.collectives if c.kind == "all-reduce" and c.elements < 9]
    assert sorted(c.elements for c in small) == [2, 2] or (stage == 0 and len(small) <= 2)
    assert all(c.runs == 1 for c in small)
    if stage < 2:
        # Sums of one micro-batch overlap with other layers, in the loop of all but two; of several
        # there is one sum after the last, outside of it.
        loops = [c for c in report.collectives if c.kind in kinds[1:] and c.in_loop]
        sums, inside = (c.elements * c.runs for c in loops), KERNELS * (LAYERS - 2) // LAYERS
        assert inside * (k == 1) <= sum(sums) <= 1.02 * inside * (k == 1)


@pytest.mark.slow
def test_clipping_by_the_global_norm_adds_no_collective():
    """optax's norm is one scalar a leaf; XLA sends them with ours, in one all-reduce."""
    plain = audit(3)
    clipped = audit(3, tx=optax.chain(optax.clip_by_global_norm(1.0), ADAMW))
    assert len(clipped.collectives) == len(plain.collectives)
    assert sum(clipped.sent_elements.values()) - sum(plain.sent_elements.values()) < 100


PAPER = [*(("7.5b", 64, stage, 1) for stage in range(3)), ("7.5b", 64, 3, 2), ("1t", 1024, 3, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "devices", "stage", "k"), PAPER)
def test_models_of_the_paper_send_and_hold_what_it_says(model, devices, stage, k):
    shapes, tx = text_model.TextModel(gpt.preset(model)), optax.adamw(1e-4)
    mesh = zero_jax.abstract_mesh(devices)
    zero = zero_jax.Zero(mesh, stage, "bf16", grad_accum_steps=k, remat="block")
    rows = jax.ShapeDtypeStruct((devices * k, shapes.config.seq + 1), jnp.int32)
    params, psi = zero.eval_shape(shapes.make), gpt.num_params(shapes.config)
    report = zero.plan(shapes.trained_loss, zero.optimizer(tx), params, rows, target="cpu").compiled
    # Layers of more than 64 MiB: the last one is gathered twice like any other.
    elements = 3 * k if stage == 3 else sum(ELEMENTS[stage](k))
    assert report.elements_per_param(psi) == pytest.approx(elements, rel=0.01)
    states = 12 * psi // (devices if stage else 1) + 20
    assert report.argument_bytes == states + k * rows.shape[1] * 4
    like = jax.eval_shape(shapes.make)
    assert model_states.estimate(like, zero.config, tx).at_rest == states
    scalars = [c for c in report.collectives if c.kind == "all-reduce" and c.elements <= 2]
    assert stage == 0 or len(scalars) == 2
