"""XLA options of a step for GPUs, and checks of donated arrays."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax
from zero_jax import releases, zero
from zero_jax.engine import compiler, step

KINDS = "all_gather", "reduce_scatter", "all_reduce"
GATHER, SCATTER, REDUCE = (f"xla_gpu_{kind}_combine_threshold_bytes" for kind in KINDS)


def _loss(params, x):
    """Layers in a loop, or one after the other, and a convolution that looks like a stack."""

    def layer(x, own):
        return jnp.tanh(x @ own["up"] + own["bias"])[:, : x.shape[1]], None

    if isinstance(params["blocks"], list):
        x = functools.reduce(lambda x, own: layer(x, own)[0], params["blocks"], x)
    else:
        x, _ = jax.lax.scan(layer, x, params["blocks"])
    return jnp.mean(x) + jnp.mean(params["conv"])


def _options(width, stage=3, model=1, scanned=True, **settings):
    ours = zero_jax.Zero(zero_jax.abstract_mesh(8, model=model), stage, **settings)

    def make():
        stack = (3,) if scanned else ()
        shapes = {"up": (*stack, width, 4 * width), "bias": (*stack, 4 * width)}
        blocks = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        conv = jnp.zeros((3, 3, 3 * width, 9 * width))
        return {"conv": conv, "blocks": blocks if scanned else [blocks] * 3}

    params, tx = ours.abstract(make), ours.optimizer(optax.sgd(0.1))
    batch = jax.ShapeDtypeStruct((16, width), jnp.float32)
    return ours.train_step(_loss, tx).compiler_options(params, tx.init(params), batch)


def test_xla_merges_no_more_than_a_bucket():
    assert _options(64, stage=2) == {}
    assert compiler.options(2**20, 64) == {GATHER: 2**20, REDUCE: 2**20, SCATTER: 2**14}
    # Where XLA's own limit is the lower one, it stays.
    assert list(compiler.options(2**27, 64)) == [SCATTER]
    assert compiler.options(2**30, 2) == {}
    # Leaves of one layer are sent together; gradients are summed in fp32.
    count, known = 4 * 4096**2 + 4 * 4096, _options(4096, scanned=False, precision="bf16")
    assert 2 * count <= known[GATHER] < 1.1 * 2 * count
    assert 4 * count <= 8 * known[SCATTER] < 1.1 * 4 * count
    # A device has a quarter of the layer.
    known = _options(4096, model=4, model_specs={"up": jax.P(None, None, "model")})
    assert 4 <= known[GATHER] / (4096**2 + 4 * 4096) < 1.1 * 4


# fmt: off
AHEAD = [
    (True, {"width": 64, "micro_batches": 2}), (True, {"width": 64, "scanned": False}),
    # An iteration over micro-batches reads all layers that are not scanned.
    (False, {"width": 64, "micro_batches": 2, "scanned": False}),
    # Two layers are held, so not where one is many buckets.
    (True, {"width": 4096, "bucket_bytes": 2**26, "precision": "bf16"}),
    (False, {"width": 4096, "bucket_bytes": 2**25, "precision": "bf16"}),
]
# fmt: on


@pytest.mark.parametrize(("ahead", "settings"), AHEAD)
def test_where_layers_are_gathered_ahead(ahead, settings):
    known = _options(**settings)
    assert any("pipeline" in name for name in known) == ahead
    assert any("overlap_limit" in name for name in known) == (ahead or settings["width"] == 64)
    # Merging small layers is left to XLA.
    assert known.get(GATHER) == settings.get("bucket_bytes")
    jax.jit(lambda: 0).lower().compile(compiler_options=known)  # XLA accepts them


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


def test_an_option_that_xla_does_not_know_is_named_and_left_out():
    compiler.first_known.cache_clear()
    assert compiler.first_known((("xla_gpu_none", True), (GATHER, 1))) == {GATHER: 1}
    with pytest.warns(UserWarning, match="xla_gpu_none, xla_gpu_neither"):
        assert compiler.first_known((("xla_gpu_none", 1), ("xla_gpu_neither", 2))) == {}


X = jnp.ones((8, 64))


def affine(params, x, *_):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def begun(stage=3, **settings):
    ours = zero_jax.Zero(zero_jax.make_mesh(), stage, **settings)
    tx = ours.optimizer(optax.adam(0.1))
    params = ours.init(lambda: {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)})
    return ours, ours.train_step(affine, tx), (params, tx.init(params))


@pytest.mark.parametrize("stage", [0, 3])
def test_options_are_given_where_jax_allows_them(monkeypatch, stage):
    """JAX refuses them in a jit within a jit, as in the user's own step around `grad_fn`; arrays of
    other shapes have options of their own."""
    seen, jit = [], jax.jit

    def spy(fn, **how):
        seen.extend([how["compiler_options"]] if "compiler_options" in how else [])
        return jit(fn, **how)

    for module in (zero, step):
        monkeypatch.setattr(module, "on_gpu", lambda mesh: True)
    monkeypatch.setattr(compiler.jax, "jit", spy)
    ours, train_step, (params, state) = begun(stage, bucket_bytes=2**20)
    known, grad_fn = train_step.compiler_options(params, None, X), ours.value_and_grad(affine)
    assert known[REDUCE] == 2**20
    for x in (X, jnp.ones((16, 64)), X):
        assert grad_fn(params, x)[0] == 64**2
    assert jit(grad_fn)(params, X)[0] == jit(lambda: grad_fn(params, X))()[0] == 64**2
    assert train_step(params, state, X)[2].loss == 64**2
    assert seen == [known] * 3, "two of the gradient and one of the step"


def test_arrays_that_were_donated_or_are_donated_twice(tmp_path):
    ours, train_step, old = begun()
    new = train_step(*old, X)[:2]
    stale, twice = new[0] | {"w": old[0]["w"]}, optax.tree.set(new[1], mu=new[0])
    for message, call, args in (
        ("'b' of `params`", train_step, (*old, X)),
        ("'b' of `params`", train_step.first_bad_leaf, (*old, X)),
        ("'inner/0/count' of `opt_state`", train_step, (new[0], old[1], X)),
        ("'w' of `params`", train_step, (stale, new[1], X)),
        ("'0/b' of `extras`", train_step, (*new, X, old[0])),
        ("'b' of `params`", ours.value_and_grad(affine), (old[0], X)),
        ("`batch`", ours.evaluate(affine), (new[0], old[0]["w"])),
        # JAX 0.10 ends with a segmentation fault where one array is donated twice.
        ("'b' of `params` and '0/b' of `extras`", train_step, (*new, X, new[0])),
        ("'b' of `params` and 'inner/0/mu/b' of `opt_state`", train_step, (new[0], twice, X)),
    ):
        with pytest.raises(ValueError, match=message):
            call(*args)
    # A copy may be donated.
    train_step(*jax.tree.map(jnp.copy, new), X, new[0])
    # With states in files too.
    _, train_step, before = begun(offload=f"optimizer:nvme={tmp_path}")
    _, state, _ = train_step(*before, X)
    with pytest.raises(ValueError, match="'b' of `params`"):
        train_step(before[0], state, X)
