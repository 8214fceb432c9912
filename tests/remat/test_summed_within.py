"""Layers of several buckets: up to half of their gradients are summed before the loop goes on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import ODD_GPT, gpt_problem

import zero_jax
from zero_jax.plan import flat_trace
from zero_jax.sharding import layout

N = 4
CONFIG = dataclasses.replace(ODD_GPT, layers=4, width=32)
SMALL, LARGE = 2**12, 2**30


def barriers(zero, loss, params, batch):
    """Shapes of single arrays behind a barrier in backward loops."""
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

    jaxpr = jax.jit(zero.value_and_grad(loss)).trace(params, batch).jaxpr
    walk(flat_trace.device_part(jaxpr), False)
    return sorted(found)


# Of a GPT's four matrices the two that end a branch: up would be more than half with down, and
# the gradient of qkv is the last.
DOWN_AND_PROJ = sorted([(CONFIG.width, CONFIG.width), (CONFIG.width // N, CONFIG.width)])


@pytest.mark.parametrize(
    ("stage", "remat", "bucket", "alone"),
    [
        (2, "block_sqrt", SMALL, DOWN_AND_PROJ),
        (3, "block", 0.49, DOWN_AND_PROJ),  # of a layer
        (3, "block", 0.51, []),
    ],
)
def test_up_to_half_of_a_layer_is_summed_within_the_loop(stage, remat, bucket, alone):
    problem = gpt_problem(CONFIG)
    if bucket < 1:
        words = sum(x.size for x in jax.tree.leaves(problem.start["blocks"]))
        bucket = int(bucket * 4 * words / CONFIG.layers)
    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), stage, remat=remat, bucket_bytes=bucket)
    batch = jax.ShapeDtypeStruct(problem.batch.shape, problem.batch.dtype)
    assert barriers(zero, problem.loss, zero.abstract(problem.make), batch) == alone


@pytest.mark.parametrize("remat", ["block", "dots"])
def test_the_order_is_that_of_use(remat):
    """Both leaves of a layer are read first, `a` before `z`, which is used before it."""

    def loss(params, x):
        def layer(x, own):
            return jnp.tanh(x @ own["z"]) @ own["a"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0])

    zero = zero_jax.Zero(zero_jax.abstract_mesh(N), 3, remat=remat, bucket_bytes=SMALL // 2)
    params = zero.abstract(lambda: {"a": jnp.zeros((4, 32, 24)), "z": jnp.zeros((4, 24, 32))})
    batch = jax.ShapeDtypeStruct((8, 24), "float32")
    assert barriers(zero, loss, params, batch) == [(32 // N, 24)]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "remat"), [(2, "block"), (3, "block_sqrt")])
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
