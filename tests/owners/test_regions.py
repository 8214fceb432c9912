"""The parts of an update that need full matrices, what is sent for them, and stacks of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformations import by_hand, orthogonal, root

from zero_jax.jaxpr import equations
from zero_jax.owners.regions import Walk, regions
from zero_jax.owners.units import units

X = jnp.ones((3, 4, 12))


def walk(fn, *args, dims):
    """A function of arrays that are sharded along these dims."""
    closed = equations.written_out(jax.make_jaxpr(fn)(*args), equations.CALLS)
    return Walk(closed.jaxpr, [(d,) for d in dims])


def found(fn, *args, dims):
    return regions(walk(fn, *args, dims=dims))


def shapes(variables):
    return [v.aval.shape for v in variables]


@pytest.mark.parametrize(
    ("shape", "left", "right", "needs"),
    [
        ((8, 8), 0, None, False),
        ((8, 8), None, 1, False),
        ((8, 8), 0, 1, True),
        ((8, 8), 1, 0, True),
        ((8, 8), 0, 0, True),
        ((8, 8), 1, None, True),
        ((4, 8, 8), 0, 0, False),  # along the stack
    ],
)
def test_a_product_needs_full_matrices_where_a_device_lacks_something(shape, left, right, needs):
    x = jnp.ones(shape)
    assert bool(found(jnp.matmul, x, x, dims=[left, right])) == needs


@pytest.mark.parametrize(("shape", "dim"), [((8, 16), 0), ((16, 8), 0), ((8, 16), 1)])
def test_of_an_iteration_only_the_matrix_and_its_result_are_sent(shape, dim):
    """Transposed copies and intermediate results stay on the assigned device."""
    two = found(lambda x, y: (by_hand(x), by_hand(y)), jnp.ones(shape), X, dims=[dim, 2])
    assert [shapes(r.dealt) for r in two] == [[tuple(sorted(shape))], [X.shape]]
    assert [shapes(r.made) for r in two] == [[tuple(sorted(shape))], [X.shape]]
    assert two[0].same == ()


def test_decompositions_and_sharded_vectors():
    (region,) = found(lambda x: root(x @ x.T), jnp.ones((8, 16)), dims=[0])
    assert (shapes(region.dealt), shapes(region.made)) == ([(8, 16)], [(8, 8)])
    scaled = lambda x, factors: (x @ x.T * factors) @ x  # noqa: E731
    (region,) = found(scaled, jnp.ones((8, 16)), jnp.ones(8), dims=[0, 0])
    assert shapes(region.dealt) == shapes(region.made) == [(8, 16)]
    assert len(region.same) == 1, "the factors are not sent as a matrix"


def test_a_branch_with_much_beside_its_matrix_is_not_sent_as_a_whole():
    def update(grads, states):
        return by_hand(grads["w"]), jax.tree.map(jnp.add, states, grads)

    def wait(grads, states):
        return jnp.zeros_like(grads["w"]), states

    def branching(step, grads, states):
        return jax.lax.cond(step % 2 == 0, update, wait, grads, states)

    tree = {"w": jnp.ones((8, 16)), "v": jnp.ones((32, 16))}
    made = walk(branching, 0, tree, tree, dims=[None, 0, 0, 0, 0])
    assert (len(made.apart), made.across, regions(made)) == (1, {}, [])


# Stacks of matrices.

STACK = jax.random.normal(jax.random.key(0), (5, 6, 8))


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
    (region,) = found(ONE_BY_ONE[name], STACK, dims=[1])
    one = units(region)
    assert (one.count, [v.aval.shape for v in region.dealt]) == (5, [STACK.shape])
    keys = jax.random.split(jax.random.key(1), len(region.same))
    pairs = zip(region.same, keys, strict=True)
    same = [jax.random.uniform(k, v.aval.shape, minval=0.5).astype(v.aval.dtype) for v, k in pairs]
    want = jax.extend.core.jaxpr_as_fun(region.closed)(STACK, *same)
    run = jax.jit(lambda at, x: one.run(at, [x], same))
    for at in (0, 4):
        for x, y, stack in zip(run(at, STACK[at : at + 1]), want, one.stacks[1], strict=True):
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
    assert all(units(region).count == 1 for region in found(fn, STACK, dims=[1]))
