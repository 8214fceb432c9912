"""The parts of an update that need full matrices, and what is sent for them."""

import jax
import jax.numpy as jnp
import pytest
from transformations import by_hand, root

from zero_jax.jaxpr import equations
from zero_jax.owners.regions import Walk, regions

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
