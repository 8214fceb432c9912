"""The ResNets are right on one device, and keep statistics over an axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.models import resnet


@pytest.fixture(scope="module")
def small_resnet():
    model = resnet.ResNet(stages=(1, 1), width=4)
    random = np.random.default_rng(0)
    images = jnp.asarray(random.normal(size=(8, 8, 8, 3)), jnp.float32)
    tree = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), tree["params"]
    )
    stats = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree["batch_stats"])
    return model, params, stats, images, jnp.arange(8)


def test_resnet_loss_updates_batch_statistics(small_resnet):
    model, params, stats, images, labels = small_resnet
    (total, weight), updated = jax.jit(functools.partial(resnet.loss, model))(
        params, stats, images, labels
    )
    assert weight == 8
    assert np.isfinite(total)
    assert jax.tree.structure(updated) == jax.tree.structure(stats)
    for old, new in zip(jax.tree.leaves(stats), jax.tree.leaves(updated), strict=True):
        assert old.shape == new.shape
        assert not np.array_equal(old, new)
    # The stem's running mean after one step is a tenth of the batch's own mean, momentum 0.9.
    stem = jax.lax.conv_general_dilated(
        images,
        params["stem"]["kernel"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_allclose(
        updated["stem_norm"]["mean"], 0.1 * jnp.mean(stem, axis=(0, 1, 2)), atol=1e-6
    )


def test_resnet_synchronizes_statistics_over_an_axis(small_resnet):
    # Two halves of a batch under one named axis have the statistics of the whole.
    model, params, stats, images, labels = small_resnet
    synced = model.clone(axis_name="data")
    local = functools.partial(resnet.loss, synced, params, stats)
    halves = jax.jit(jax.vmap(local, axis_name="data"))
    (totals, _), updated = halves(images.reshape(2, 4, 8, 8, 3), labels.reshape(2, 4))
    whole = jax.jit(functools.partial(resnet.loss, model, params, stats))
    (total, _), expected = whole(images, labels)
    assert float(totals.sum()) == pytest.approx(float(total), rel=1e-5)
    for got, right in zip(jax.tree.leaves(updated), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got[0], got[1])
        np.testing.assert_allclose(got[0], right, rtol=1e-4, atol=1e-5)


def test_resnet_computes_in_the_dtype_of_its_parameters(small_resnet):
    model, params, stats, images, _ = small_resnet
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    run = functools.partial(model.apply, train=False, capture_intermediates=True)
    logits, state = jax.eval_shape(run, {"params": half, "batch_stats": stats}, images)
    blocks = {k: v for k, v in state["intermediates"].items() if k.startswith("stage")}
    assert {leaf.dtype for leaf in jax.tree.leaves(blocks)} == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize(
    "make, weight_layers, params",
    [
        # He et al.: the name counts convolutions on the path and the classifier. ResNet-18 with
        # a CIFAR stem and 10 classes has 11,173,962 parameters, ResNet-50 23,520,842.
        (resnet.resnet8, 8, None),
        (resnet.resnet18, 18, 11_173_962),
        (resnet.resnet50, 50, 23_520_842),
    ],
)
def test_resnet_preset_has_its_depth_and_size(make, weight_layers, params):
    init = functools.partial(make().init, train=False)
    tree = jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, 8, 8, 3)))["params"]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    layers = [path for path in paths if "kernel" in path and "shortcut" not in path]
    assert len(layers) == weight_layers
    if params is not None:
        assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == params
