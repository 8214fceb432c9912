"""A stack of matrices computed one by one: the same numbers, or all at once where it can't be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_regions import found
from transformations import orthogonal, root

from zero_jax.owners.units import units

X = jax.random.normal(jax.random.key(0), (5, 6, 8))


def gram(x):
    return x @ jnp.swapaxes(x, 1, 2)


def reshaped(x):
    return (gram(x).sum(1).reshape(5, 6, 1) * x).reshape(5, 48).reshape(5, 8, 6) @ x


def branching(x):
    return jax.lax.cond(len(x) > 3, lambda g: g @ g, lambda g: g, gram(x)) @ x


ONE_BY_ONE = {
    "iteration": jax.vmap(orthogonal),
    "decomposition": lambda x: jax.vmap(root)(gram(x)),
    # A factor for each matrix, and one matrix for all.
    "factors": lambda x: (gram(x) * jnp.arange(1.0, 6.0)[:, None, None]) @ x @ jnp.eye(8),
    "reshaped": reshaped,
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: gram(y) @ y / 50, x),
    "branching": branching,
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_by_one_equals_all_at_once(name):
    (region,) = found(ONE_BY_ONE[name], X, dims=[1])
    one = units(region)
    assert (one.count, [v.aval.shape for v in region.dealt]) == (5, [X.shape])
    keys = jax.random.split(jax.random.key(1), len(region.same))
    pairs = zip(region.same, keys, strict=True)
    same = [jax.random.uniform(k, v.aval.shape, minval=0.5).astype(v.aval.dtype) for v, k in pairs]
    want = jax.extend.core.jaxpr_as_fun(region.closed)(X, *same)
    run = jax.jit(lambda at, x: one.run(at, [x], same))
    for at in (0, 4):
        for x, y, stack in zip(run(at, X[at : at + 1]), want, one.stacks[1], strict=True):
            np.testing.assert_allclose(x, jnp.take(y, jnp.array([at]), stack), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: gram(x) @ x.sum(0),
        lambda x: jnp.cumsum(gram(x), 0) @ x,
        lambda x: gram(x).reshape(30, 6).reshape(5, 6, 6) @ x,
    ],
    ids=["sum over the stack", "cumulative", "reshaped across"],
)
def test_operations_across_matrices_are_not_taken_apart(fn):
    assert all(units(region).count == 1 for region in found(fn, X, dims=[1]))
