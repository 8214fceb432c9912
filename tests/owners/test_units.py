"""A region of a stack, computed matrix by matrix: the same numbers, or as one where it can't be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_regions import found
from transformations import orthogonal, root

from zero_jax.owners.units import units

X = jax.random.normal(jax.random.key(0), (5, 6, 8))
FACTORS = jnp.arange(1.0, 6.0)


def scaled(x):
    """A factor for each matrix, and a matrix for all."""
    return (x @ jnp.swapaxes(x, 1, 2) * FACTORS[:, None, None]) @ x @ jnp.eye(8)


def reshaped(x):
    flat = (x @ x.transpose(0, 2, 1)).sum(1).reshape(5, 6, 1)
    return (flat * x).reshape(5, 48).reshape(5, 8, 6) @ x


def looped(x):
    return jax.lax.fori_loop(0, 3, lambda _, y: y @ jnp.swapaxes(y, 1, 2) @ y / 50, x)


def branching(x):
    gram = x @ jnp.swapaxes(x, 1, 2)
    return jax.lax.cond(gram.shape[0] > 3, lambda g: g @ g, lambda g: g, gram) @ x


ONE_BY_ONE = {
    "iteration": jax.vmap(orthogonal),
    "decomposition": lambda x: jax.vmap(root)(x @ jnp.swapaxes(x, 1, 2)),
    "factors": scaled,
    "reshaped": reshaped,
    "looped": looped,
    "branching": branching,
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_matrix_by_matrix_is_as_all_together(name):
    (region,) = found(ONE_BY_ONE[name], X, dims=[1])
    one = units(region)
    assert (one.count, [v.aval.shape for v in region.dealt]) == (5, [X.shape])
    keys = jax.random.split(jax.random.key(1), len(region.same))
    pairs = zip(region.same, keys, strict=True)
    same = [jax.random.uniform(k, v.aval.shape, minval=0.5).astype(v.aval.dtype) for v, k in pairs]
    want = jax.extend.core.jaxpr_as_fun(region.closed)(X, *same)
    for at in range(5):
        made = jax.jit(one.run)(at, [X[at : at + 1]], same)
        for x, y, stack in zip(made, want, one.stacks[1], strict=True):
            np.testing.assert_allclose(x, jnp.take(y, jnp.array([at]), stack), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x @ jnp.swapaxes(x, 1, 2) @ x.sum(0),
        lambda x: jnp.cumsum(x @ jnp.swapaxes(x, 1, 2), 0) @ x,
        lambda x: (x @ jnp.swapaxes(x, 1, 2)).reshape(30, 6).reshape(5, 6, 6) @ x,
    ],
    ids=["sum over the stack", "cumulative", "reshaped across"],
)
def test_what_needs_several_matrices_is_one(fn):
    assert all(units(region).count == 1 for region in found(fn, X, dims=[1]))
