"""Gradients of scanned layers are stored in the dtype of their sum over devices, without rounding.

With bf16 reductions a stack of such sums may be stored in bf16, bitwise the same; a sum of several
of them may not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero_jax
from zero_jax.collectives import gather_scatter
from zero_jax.engine import grads

L, D, ROWS = 3, 16, 32


def plain(x, w):
    return jnp.tanh(x @ w)


def twice(x, w):
    return jnp.tanh(x @ w) @ w.T


def scan(layer):
    return lambda x, w: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def repeated(layer):
    return lambda x, w: jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=20)[0]


# Each model, other settings than stage 3, and whether its gradients are stored in bf16.
MODELS = {
    "scan": (scan(plain), {"stage": 2}, True),
    "micro-batches": (scan(plain), {"micro_batches": 2}, True),
    "two operations": (scan(twice), {}, False),
    "norm": (scan(lambda x, w: plain(x, w / jnp.linalg.norm(w))), {"stage": 2}, False),
    "remat": (scan(jax.checkpoint(twice)), {}, True),
    "shared": (lambda x, w: scan(plain)(scan(plain)(x, w), w), {"stage": 2}, False),
    "loop of scans": (repeated(scan(plain)), {}, False),
    "loop in a layer": (scan(repeated(plain)), {"stage": 2}, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_do_not_depend_on_the_storage_dtype(name, monkeypatch):
    model, settings, narrow = MODELS[name]
    precision = zero_jax.Precision("fp32", reduce="bf16")
    zero = zero_jax.Zero(zero_jax.make_mesh(), **{"stage": 3, "precision": precision} | settings)
    params = zero.init(lambda: jax.random.normal(jax.random.key(2), (L, D, D)) / D**0.5)

    def loss(w, x):
        return jnp.mean(model(x, w) ** 2)

    batch = jax.random.normal(jax.random.key(1), (ROWS, D))
    traced = grads.GlobalLoss(zero.settings, loss).read(params, batch, ())
    assert any(leaf.waits_in is not None for leaf in traced.leaves) == narrow
    found = zero.value_and_grad(loss)(params, batch)
    monkeypatch.setattr(gather_scatter, "takes_slot", lambda cut, wire: False)
    jax.tree.map(np.testing.assert_array_equal, found, zero.value_and_grad(loss)(params, batch))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
