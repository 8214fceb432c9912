"""Gradients of scanned layers are stored in the dtype of their sum over devices, without rounding.

With bf16 reductions a stack of such sums may be stored in bf16, bitwise the same; a sum of several
of them may not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import zero_jax
from zero_jax.collectives import gather_scatter
from zero_jax.engine import grads

L, D, ROWS = 3, 16, 32


def plain(x, w):
    return jnp.tanh(x @ w)


def twice(x, w):
    return jnp.tanh(x @ w) @ w.T


def normalised(x, w):
    return plain(x, w / jnp.linalg.norm(w))


def scan(layer):
    """Applies a layer with each slice of the stack."""
    return lambda x, w: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def repeated(layer):
    """Applies a layer again and again."""
    return lambda x, w: jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=20)[0]


# Each model, other settings than stage 3, and whether its gradients are stored in bf16.
MODELS = {
    "scan": (scan(plain), {"stage": 2}, True),
    "micro-batches": (scan(plain), {"micro_batches": 2}, True),
    "two operations": (scan(twice), {}, False),
    "norm": (scan(normalised), {"stage": 2}, False),
    "remat": (scan(jax.checkpoint(twice)), {}, True),
    "shared": (lambda x, w: scan(plain)(scan(plain)(x, w), w), {"stage": 2}, False),
    "loop of scans": (repeated(scan(plain)), {}, False),
    "loop in a layer": (scan(repeated(plain)), {"stage": 2}, True),
}


def zero_of(settings):
    settings = {"stage": 3, "precision": zero_jax.Precision("fp32", reduce="bf16")} | settings
    return zero_jax.Zero(zero_jax.make_mesh(), **settings)


def assert_stored_in_bf16_without_rounding(zero, loss, params, narrow, monkeypatch):
    batch = jax.random.normal(jax.random.key(1), (ROWS, D))
    traced = grads.GlobalLoss(zero.settings, loss).read(params, batch, ())
    assert any(leaf.waits_in is not None for leaf in traced.leaves) == narrow
    found = zero.value_and_grad(loss)(params, batch)
    monkeypatch.setattr(gather_scatter, "takes_slot", lambda cut, wire: False)
    wanted = zero.value_and_grad(loss)(params, batch)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_do_not_depend_on_the_storage_dtype(name, monkeypatch):
    model, settings, narrow = MODELS[name]
    zero = zero_of(settings)
    params = zero.init(lambda: jax.random.normal(jax.random.key(2), (L, D, D)) / D**0.5)

    def loss(w, x):
        return jnp.mean(model(x, w) ** 2)

    assert_stored_in_bf16_without_rounding(zero, loss, params, narrow, monkeypatch)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(D)(x)), None


@pytest.mark.parametrize("remat", ["block", "dots"])
def test_linen_stacks_are_stored_in_bf16(remat, monkeypatch):
    layer = nn.remat(Layer, prevent_cse=False) if remat == "dots" else Layer
    model = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=L)()
    zero = zero_of({"remat": remat})
    params = zero.init(lambda key: model.init(key, jnp.ones((1, D)), None), jax.random.key(0))

    def loss(params, x):
        return jnp.mean(model.apply(params, x, None)[0] ** 2)

    assert_stored_in_bf16_without_rounding(zero, loss, params, True, monkeypatch)
