"""What XLA is told, and that it is told where JAX allows it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax import compiler, step, zero

GATHER = "xla_gpu_all_gather_combine_threshold_bytes"
SCATTER = "xla_gpu_reduce_scatter_combine_threshold_bytes"
REDUCE = "xla_gpu_all_reduce_combine_threshold_bytes"


def test_xla_merges_no_more_than_a_bucket():
    small = compiler.options(2**20, 64)
    assert small == {GATHER: 2**20, REDUCE: 2**20, SCATTER: 2**14}
    # Where XLA's own limit is the lower one, it stays.
    assert list(compiler.options(2**27, 64)) == [SCATTER]
    assert compiler.options(2**30, 2) == {}


def test_stage_3_gathers_a_layer_ahead():
    mesh = zero_jax.abstract_mesh(8)
    assert zero_jax.Zero(mesh, 2).compiler_options == {}
    known = zero_jax.Zero(mesh, 3).compiler_options
    assert len(known) == 2 and any("all_gather" in name for name in known)
    # XLA refuses what it does not know.
    jax.jit(lambda: 0).lower().compile(compiler_options=known)


def test_an_option_that_xla_does_not_know_is_named_and_left_out():
    compiler._first_known.cache_clear()
    known = ("xla_gpu_all_gather_combine_threshold_bytes", 1)
    assert compiler._first_known((("xla_gpu_none", True), known)) == dict([known])
    with pytest.warns(UserWarning, match="knows none of xla_gpu_none, xla_gpu_neither"):
        assert compiler._first_known((("xla_gpu_none", 1), ("xla_gpu_neither", 2))) == {}


@pytest.mark.parametrize("stage", [0, 3])
def test_options_are_given_where_jax_allows_them(monkeypatch, stage):
    """JAX refuses them in a jit within a jit, as in the step of one's own around `grad_fn`."""
    seen, jit = [], jax.jit

    def spy(fn, **how):
        seen.extend([how["compiler_options"]] if "compiler_options" in how else [])
        return jit(fn, **how)

    for module in (zero, step):
        monkeypatch.setattr(module, "on_gpu", lambda mesh: True)
    monkeypatch.setattr(compiler.jax, "jit", spy)
    ours = zero_jax.Zero(zero_jax.make_mesh(), stage, bucket_bytes=2**20)
    assert ours.compiler_options[REDUCE] == 2**20
    params = ours.init(lambda: {"w": jnp.ones((8, 8))})
    batch = jnp.ones((8, 8))

    def loss(params, x):
        return jnp.mean((x @ zero_jax.gather(params)["w"]) ** 2)

    grad_fn = ours.value_and_grad(loss)
    alone, _ = grad_fn(params, batch)
    within, _ = jit(lambda p, x: grad_fn(p, x))(params, batch)
    closed, _ = jit(lambda: grad_fn(params, batch))()
    assert alone == within == closed == 64.0
    tx = ours.optimizer(optax.sgd(0.1))
    assert ours.train_step(loss, tx)(params, tx.init(params), batch)[2].loss == 64.0
    assert seen == [ours.compiler_options] * 2, "the gradient and the step"
