"""The ResNets are right on one device, and keep statistics over an axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.models import resnet
from zero_jax.sharding import paths

MODEL = resnet.ResNet(stages=(1, 1), width=4)
RANDOM = np.random.default_rng(0)
IMAGES, LABELS = jnp.asarray(RANDOM.normal(size=(8, 8, 8, 3)), jnp.float32), jnp.arange(8)
KEY = jax.random.key(0)
shapes_of = lambda m: jax.eval_shape(lambda k: m.init(k, IMAGES, train=False), KEY)  # noqa: E731
SHAPES = shapes_of(MODEL)
PARAMS = jax.tree.map(lambda x: jnp.float32(RANDOM.normal(size=x.shape)), SHAPES["params"])
STATS = jax.tree.map(lambda x: jnp.zeros(x.shape), SHAPES["batch_stats"])


def test_statistics_are_updated_and_are_those_of_the_whole_batch_over_an_axis():
    whole = jax.jit(functools.partial(resnet.loss, MODEL))
    (total, weight), updated = whole(PARAMS, STATS, IMAGES, LABELS)
    assert weight == 8 and np.isfinite(total)
    assert jax.tree.map(jnp.shape, updated) == jax.tree.map(jnp.shape, STATS)
    # The stem's running mean after one step is a tenth of the batch's own mean, momentum 0.9.
    kernel, dims = PARAMS["stem"]["kernel"], ("NHWC", "HWIO", "NHWC")
    stem = jax.lax.conv_general_dilated(IMAGES, kernel, (1, 1), "SAME", dimension_numbers=dims)
    mean = 0.1 * jnp.mean(stem, axis=(0, 1, 2))
    np.testing.assert_allclose(updated["stem_norm"]["mean"], mean, atol=1e-6)
    synced = functools.partial(resnet.loss, MODEL.clone(axis_name="data"), PARAMS, STATS)
    halves = jax.jit(jax.vmap(synced, axis_name="data"))
    (totals, _), found = halves(IMAGES.reshape(2, 4, 8, 8, 3), LABELS.reshape(2, 4))
    np.testing.assert_allclose(totals.sum(), total, rtol=1e-5)
    for got, want, old in zip(*map(jax.tree.leaves, (found, updated, STATS)), strict=True):
        np.testing.assert_allclose(got[0], got[1])
        np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)
        assert not np.array_equal(old, want)


def test_it_computes_in_the_dtype_of_its_parameters():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    run = functools.partial(MODEL.apply, train=False, capture_intermediates=True)
    logits, state = jax.eval_shape(run, {"params": half, "batch_stats": STATS}, IMAGES)
    blocks = {k: v for k, v in state["intermediates"].items() if k.startswith("stage")}
    assert {leaf.dtype for leaf in jax.tree.leaves(blocks)} == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == jnp.float32


def test_presets_have_their_depth_and_size():
    # He et al.: the name counts convolutions on the path and the classifier. ResNet-18 with
    # a CIFAR stem and 10 classes has 11,173,962 parameters, ResNet-50 23,520,842.
    for layers, size in (8, None), (18, 11_173_962), (50, 23_520_842):
        leaves = dict(paths.named_leaves(shapes_of(getattr(resnet, f"resnet{layers}")())["params"]))
        assert sum("kernel" in name and "shortcut" not in name for name in leaves) == layers
        assert size in (None, sum(leaf.size for leaf in leaves.values()))
