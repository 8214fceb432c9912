"""The ResNets are right on one device, and keep statistics over an axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.models import resnet

MODEL = resnet.ResNet(stages=(1, 1), width=4)
PRESETS = (resnet.resnet8, resnet.resnet18, resnet.resnet50)
RANDOM = np.random.default_rng(0)
IMAGES, LABELS = jnp.asarray(RANDOM.normal(size=(8, 8, 8, 3)), jnp.float32), jnp.arange(8)


def shapes_of(model):
    return jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), IMAGES)


@pytest.fixture(scope="module")
def start():
    tree = shapes_of(MODEL)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(RANDOM.normal(size=leaf.shape), leaf.dtype), tree["params"]
    )
    return params, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), tree["batch_stats"])


def test_statistics_are_updated_and_are_those_of_the_whole_batch_over_an_axis(start):
    params, stats = start
    whole = jax.jit(functools.partial(resnet.loss, MODEL))
    (total, weight), updated = whole(params, stats, IMAGES, LABELS)
    assert weight == 8 and np.isfinite(total)
    assert jax.tree.map(jnp.shape, updated) == jax.tree.map(jnp.shape, stats)
    # The stem's running mean after one step is a tenth of the batch's own mean, momentum 0.9.
    kernel, dims = params["stem"]["kernel"], ("NHWC", "HWIO", "NHWC")
    stem = jax.lax.conv_general_dilated(IMAGES, kernel, (1, 1), "SAME", dimension_numbers=dims)
    mean = 0.1 * jnp.mean(stem, axis=(0, 1, 2))
    np.testing.assert_allclose(updated["stem_norm"]["mean"], mean, atol=1e-6)

    synced = functools.partial(resnet.loss, MODEL.clone(axis_name="data"), params, stats)
    halves = jax.jit(jax.vmap(synced, axis_name="data"))
    (totals, _), found = halves(IMAGES.reshape(2, 4, 8, 8, 3), LABELS.reshape(2, 4))
    assert float(totals.sum()) == pytest.approx(float(total), rel=1e-5)
    for got, want, old in zip(*map(jax.tree.leaves, (found, updated, stats)), strict=True):
        np.testing.assert_allclose(got[0], got[1])
        np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)
        assert not np.array_equal(old, want)


def test_it_computes_in_the_dtype_of_its_parameters(start):
    params, stats = start
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    run = functools.partial(MODEL.apply, train=False, capture_intermediates=True)
    logits, state = jax.eval_shape(run, {"params": half, "batch_stats": stats}, IMAGES)
    blocks = {k: v for k, v in state["intermediates"].items() if k.startswith("stage")}
    assert {leaf.dtype for leaf in jax.tree.leaves(blocks)} == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == jnp.float32


def test_presets_have_their_depth_and_size():
    # He et al.: the name counts convolutions on the path and the classifier. ResNet-18 with
    # a CIFAR stem and 10 classes has 11,173,962 parameters, ResNet-50 23,520,842.
    sizes = (8, None), (18, 11_173_962), (50, 23_520_842)
    for make, (layers, size) in zip(PRESETS, sizes, strict=True):
        leaves = jax.tree_util.tree_leaves_with_path(shapes_of(make())["params"])
        paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        assert sum("kernel" in path and "shortcut" not in path for path in paths) == layers
        assert size in (None, sum(leaf.size for _, leaf in leaves))
