"""Layers of several buckets: up to half of their gradients are summed before the loop goes on."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from problems import ODD_GPT, gpt_problem

import zero_jax
from zero_jax.plan import flat_trace
from zero_jax.sharding import layout

N = 4
CONFIG = dataclasses.replace(ODD_GPT, layers=4, width=32)
SMALL, LARGE = 2**12, 2**30


@functools.cache
def traced_gradients(stage, remat, bucket):
    problem = gpt_problem(CONFIG)
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), stage, remat=remat, bucket_bytes=bucket)
    params = zero.abstract(problem.make)
    batch = jax.ShapeDtypeStruct(problem.batch.shape, problem.batch.dtype)
    return jax.jit(zero.value_and_grad(problem.loss)).trace(params, batch).jaxpr


def barriers(jaxpr):
    """Shapes of what stands behind a barrier of its own in backward loops."""
    found = []

    def walk(body, backward):
        for eqn in body.eqns:
            alone = len(eqn.outvars) == 1  # attention has some of several arrays
            if eqn.primitive.name == "optimization_barrier" and backward and alone:
                found.append(eqn.outvars[0].aval.shape)
            inner = eqn.params.get("jaxpr")
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                loop = eqn.primitive.name == "scan"
                turned = loop and "transpose(" in str(eqn.source_info.name_stack)
                walk(getattr(inner, "jaxpr", inner), backward or turned)

    walk(flat_trace.device_part(jaxpr), False)
    return sorted(found)


@pytest.mark.parametrize("remat", ["block", "block_sqrt", "dots"])
@pytest.mark.parametrize("stage", [2, 3])
def test_up_to_half_of_a_layer_stands_behind_barriers_of_its_own(stage, remat):
    """Of a GPT's four matrices the two that end a branch: up would be more than half with down,
    and the gradient of qkv is the last."""
    width = CONFIG.width
    down, proj = (width, width), (width // N, width)
    assert barriers(traced_gradients(stage, remat, SMALL)) == sorted([down, proj])
    assert barriers(traced_gradients(stage, remat, LARGE)) == []


def test_the_order_is_that_of_use():
    """All leaves of a layer are opened first, `a` before `z`, which is used before it."""
    shapes = {"a": (4, 32, 24), "z": (4, 24, 32)}

    def loss(params, x):
        def layer(x, own):
            full = own
            return jax.nn.tanh(x @ full["z"]) @ full["a"], None

        return jax.numpy.mean(jax.lax.scan(layer, x, params)[0])

    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), 3, remat="block", bucket_bytes=SMALL // 2)
    params = zero.abstract(lambda: {k: jax.numpy.zeros(s) for k, s in shapes.items()})
    batch = jax.ShapeDtypeStruct((8, 24), "float32")
    jaxpr = jax.jit(zero.value_and_grad(loss)).trace(params, batch).jaxpr
    assert barriers(jaxpr) == [(32 // N, 24)]


@pytest.mark.parametrize(("bucket", "own"), [(0.51, 0), (0.49, 2)])
def test_a_layer_of_two_buckets_is_left_to_the_next_turn(bucket, own):
    words = sum(x.size for x in jax.tree.leaves(gpt_problem(CONFIG).start["blocks"]))
    layer = 4 * words // CONFIG.layers
    assert len(barriers(traced_gradients(3, "block", int(bucket * layer)))) == own


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["block", "block_sqrt"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_the_same(stage, remat):
    problem, found = gpt_problem(CONFIG), []
    mesh = zero_jax.make_mesh(devices=jax.devices()[:N])
    batch = zero_jax.global_batch(mesh, np.asarray(problem.batch))
    for bucket in (SMALL, LARGE):
        zero = zero_jax.Zero(mesh, stage, remat=remat, bucket_bytes=bucket)
        _, grads = jax.jit(zero.value_and_grad(problem.loss))(zero.shard(problem.start), batch)
        found.append(jax.tree.map(np.asarray, layout.logical(grads)))
    for mine, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-8)
