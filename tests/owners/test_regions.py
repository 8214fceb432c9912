"""What of an update needs whole matrices, and what travels for it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from transformations import by_hand, muon, root

from zero_jax.jaxpr import equations
from zero_jax.owners.regions import Walk, regions


def found(fn, *args, dims):
    """Regions of a function of arrays that are cut along these dims."""
    closed = equations.written_out(jax.make_jaxpr(fn)(*args), equations.CALLS)
    return regions(Walk(closed.jaxpr, [(d,) for d in dims]))


def shapes(variables):
    return [v.aval.shape for v in variables]


def test_what_is_elementwise_or_a_sum_needs_nothing():
    x = jnp.ones((8, 4))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))
    state = tx.init(x)
    count = len(jax.tree.leaves(state))
    dims = [0, *[0 if s.shape == x.shape else None for s in jax.tree.leaves(state)], 0]
    assert count == len(dims) - 2
    assert found(lambda g, s, p: tx.update(g, s, p), x, state, x, dims=dims) == []


@pytest.mark.parametrize(
    ("left", "right", "needs"),
    [(0, None, False), (None, 1, False), (0, 1, True), (1, 0, True), (0, 0, True), (1, None, True)],
)
def test_a_product_needs_whole_matrices_where_a_device_lacks_something(left, right, needs):
    x = jnp.ones((8, 8))
    assert bool(found(jnp.matmul, x, x, dims=[left, right])) == needs


def test_products_of_stacks_that_are_cut_along_the_stack_need_nothing():
    x = jnp.ones((4, 8, 8))
    assert found(jnp.matmul, x, x, dims=[0, 0]) == []


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(8, 16), (16, 8)])
def test_of_an_iteration_only_the_matrix_and_its_result_travel(shape, dim):
    """Transposed copies, and what stands between the products, are made by the owner."""
    x = jnp.ones(shape)
    (region,) = found(by_hand, x, dims=[dim])
    assert shapes(region.dealt) == shapes(region.made) == [tuple(sorted(shape))]
    assert region.same == ()


def test_leaves_are_regions_of_their_own():
    x, y = jnp.ones((8, 16)), jnp.ones((3, 4, 12))
    two = found(lambda x, y: (by_hand(x), by_hand(y)), x, y, dims=[0, 2])
    assert [shapes(r.dealt) for r in two] == [[(8, 16)], [(3, 4, 12)]]


def test_an_iteration_in_a_loop_is_one_operation():
    x = {"w": jnp.ones((8, 16))}
    tx = muon()
    state = tx.init(x)
    dims = [0, *[0 if s.ndim == 2 else None for s in jax.tree.leaves(state)]]
    (region,) = found(lambda g, s: tx.update(g, s, g), x, state, dims=dims)
    assert [e.primitive.name for e in region.eqns] == ["scan"]
    assert shapes(region.dealt) == [(1, 8, 16)]


def test_decompositions_need_whole_matrices():
    (region,) = found(lambda x: root(x @ x.T), jnp.ones((8, 16)), dims=[0])
    assert shapes(region.dealt) == [(8, 16)]
    assert shapes(region.made) == [(8, 8)]


def test_factors_that_happen_to_be_cut_do_not_travel_as_matrices():
    (region,) = found(
        lambda x, factors: (x @ x.T * factors) @ x, jnp.ones((8, 16)), jnp.ones(8), dims=[0, 0]
    )
    assert shapes(region.dealt) == shapes(region.made) == [(8, 16)]
    assert len(region.same) == 1


def branching(step, grads, states):
    """An update every other step: one matrix, and what is elementwise."""

    def update(grads, states):
        return by_hand(grads["w"]), jax.tree.map(jnp.add, states, grads)

    def wait(grads, states):
        return jnp.zeros_like(grads["w"]), states

    return jax.lax.cond(step % 2 == 0, update, wait, grads, states)


def test_a_branch_with_much_beside_its_matrix_does_not_travel_as_a_whole():
    tree = {"w": jnp.ones((8, 16)), "v": jnp.ones((32, 16))}
    closed = equations.written_out(jax.make_jaxpr(branching)(0, tree, tree), equations.CALLS)
    walk = Walk(closed.jaxpr, [(None,), (0,), (0,), (0,), (0,)])
    assert (len(walk.apart), walk.across, regions(walk)) == (1, {}, [])
