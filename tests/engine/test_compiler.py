"""What XLA is told, and that it is told where JAX allows it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax import releases, zero
from zero_jax.engine import compiler, step

GATHER = "xla_gpu_all_gather_combine_threshold_bytes"
SCATTER = "xla_gpu_reduce_scatter_combine_threshold_bytes"
REDUCE = "xla_gpu_all_reduce_combine_threshold_bytes"


def test_xla_merges_no_more_than_a_bucket():
    small = compiler.options(2**20, 64)
    assert small == {GATHER: 2**20, REDUCE: 2**20, SCATTER: 2**14}
    # Where XLA's own limit is the lower one, it stays.
    assert list(compiler.options(2**27, 64)) == [SCATTER]
    assert compiler.options(2**30, 2) == {}


def _loss(params, x):
    """Layers in a loop, or one after the other, and a convolution that looks like a stack."""

    def layer(x, own):
        return jnp.tanh(x @ own["up"] + own["bias"])[:, : x.shape[1]], None

    x = x @ params["embed"].T @ params["embed"]
    if isinstance(params["blocks"], list):
        for own in params["blocks"]:
            x, _ = layer(x, own)
    else:
        x, _ = jax.lax.scan(layer, x, params["blocks"])
    return jnp.mean(x) + jnp.mean(params["conv"])


def _shapes(layers, width):
    return {
        "embed": jax.ShapeDtypeStruct((5 * width, width), jnp.float32),
        "conv": jax.ShapeDtypeStruct((3, 3, 3 * width, 9 * width), jnp.float32),
        "blocks": {
            "up": jax.ShapeDtypeStruct((layers, width, 4 * width), jnp.float32),
            "bias": jax.ShapeDtypeStruct((layers, 4 * width), jnp.float32),
        },
    }


def _options(ours, shapes):
    width = shapes["embed"].shape[1]
    params = ours.abstract(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    tx = ours.optimizer(optax.sgd(0.1))
    batch = jax.ShapeDtypeStruct((8, width), jnp.float32)
    return ours.train_step(_loss, tx).compiler_options(params, tx.init(params), batch)


def test_stage_3_gathers_a_layer_ahead():
    mesh = zero_jax.abstract_mesh(8)
    params = _shapes(layers=3, width=64)
    assert _options(zero_jax.Zero(mesh, 2), params) == {}
    known = _options(zero_jax.Zero(mesh, 3), params)
    assert any("pipeline" in name for name in known)
    # Small layers are left to XLA.
    assert len(known) == 2
    # XLA refuses what it does not know.
    jax.jit(lambda: 0).lower().compile(compiler_options=known)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("scanned", [True, False])
def test_a_turn_of_micro_batches_is_not_gathered_for_ahead(scanned, k):
    """Where layers are not scanned it reads all of them."""
    params = _shapes(layers=3, width=64)
    if not scanned:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params["blocks"])
        params |= {"blocks": [one] * 3}
    known = _options(zero_jax.Zero(zero_jax.abstract_mesh(4), 3, micro_batches=k), params)
    assert any("pipeline" in name for name in known) == (scanned or k == 1)
    assert any("overlap_limit" in name for name in known)


@pytest.mark.parametrize("scanned", [True, False])
def test_the_leaves_of_a_layer_travel_together_but_not_those_of_two(scanned):
    params, words = _shapes(layers=3, width=4096), 4 * 4096**2 + 4 * 4096
    if not scanned:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params["blocks"])
        params |= {"blocks": [one] * 3}
    for given, size in (("fp32", 4), ("bf16", 2)):
        ours = zero_jax.Zero(zero_jax.abstract_mesh(8), 3, precision=given)
        known = _options(ours, params)
        assert words * size <= known[GATHER] < 1.1 * words * size
        assert words * 4 <= 8 * known[SCATTER] < 1.1 * words * 4, "gradients are summed in fp32"
    # On each of them a part of the layer.
    spec = jax.P(*((None, None) if scanned else (None,)), "model")
    ours = zero_jax.Zero(zero_jax.abstract_mesh(8, model=4), 3, model_specs={"up": spec})
    words = 4096**2 + 4 * 4096
    assert 4 * words <= _options(ours, params)[GATHER] < 1.1 * 4 * words


def test_layers_of_many_buckets_are_not_gathered_ahead():
    # One more is held while this one computes.
    params = _shapes(layers=3, width=4096)
    for bucket, ahead in ((2**26, True), (2**25, False)):
        ours = zero_jax.Zero(zero_jax.abstract_mesh(8), 3, bucket_bytes=bucket, precision="bf16")
        known = _options(ours, params)
        assert any("pipeline" in name for name in known) == ahead
        assert known[GATHER] == bucket


def test_before_jax_0_12_the_sums_of_a_large_layer_are_several(monkeypatch):
    layer = (400 * 2**20, 800 * 2**20)
    assert (releases.SUMMED_AT_ONCE < layer[1]) == (jax.__version_info__ < (0, 12))
    found = []
    for most in (2**28, float("inf")):
        monkeypatch.setattr(releases, "SUMMED_AT_ONCE", most)
        known = compiler.options(2**30, 64, layer)
        assert known[GATHER] > layer[0]
        found.append(64 * known[SCATTER])
    assert found == [17 * 2**24, 17 * layer[1] // 16]


def test_parameters_of_other_shapes_get_options_of_their_own():
    told = []
    program = compiler.Program(jnp.sum, lambda x: told.append(x.shape) or {})
    for x in (jnp.ones(2), jnp.ones(3), jnp.zeros(2)):
        program(x)
    assert told == [(2,), (3,)]


def test_an_option_that_xla_does_not_know_is_named_and_left_out():
    compiler.first_known.cache_clear()
    known = ("xla_gpu_all_gather_combine_threshold_bytes", 1)
    assert compiler.first_known((("xla_gpu_none", True), known)) == dict([known])
    with pytest.warns(UserWarning, match="knows none of xla_gpu_none, xla_gpu_neither"):
        assert compiler.first_known((("xla_gpu_none", 1), ("xla_gpu_neither", 2))) == {}


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
    params = ours.init(lambda: {"w": jnp.ones((8, 8))})
    batch = jnp.ones((8, 8))

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    own = ours.train_step(loss, optax.sgd(0.1))
    known = own.compiler_options(params, None, batch)
    assert known[REDUCE] == 2**20
    grad_fn = ours.value_and_grad(loss)
    alone, _ = grad_fn(params, batch)
    within, _ = jit(lambda p, x: grad_fn(p, x))(params, batch)
    closed, _ = jit(lambda: grad_fn(params, batch))()
    assert alone == within == closed == 64.0
    tx = ours.optimizer(optax.sgd(0.1))
    assert ours.train_step(loss, tx)(params, tx.init(params), batch)[2].loss == 64.0
    assert seen == [known] * 2, "the gradient and the step"
