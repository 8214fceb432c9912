"""The layout: any shape over any N, and what rests where."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero_jax
from zero_jax.sharding import layout
from zero_jax.sharding.cuts import Splitter, split, state_splits

SHAPES = [(), (0,), (0, 4), (1,), (3,), (13,), (8,), (10, 7), (7, 13), (3, 3, 5, 7), (4096, 3)]


def cuts_of(tree, n):
    return Splitter(n)(tree)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 400])
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_cover_the_leaf_and_waste_less_than_one_row_each(shape, n):
    cut = split(shape, n)
    if cut.dim is None:
        assert n == 1 or math.prod(shape) < n
        assert cut.shard_shape == cut.rest_shape == shape
    else:
        assert cut.shard_size * n >= cut.size
        assert (cut.shard_size - 1) * n < cut.size
        assert math.prod(cut.shard_shape) * n == math.prod(cut.rest_shape)


def test_the_first_dim_that_n_divides_is_cut():
    assert split((9, 8, 16), 8).dim == -2
    assert split((16, 8), 8).dim == -2


def test_without_a_divisible_dim_the_least_padding_wins():
    assert split((10, 7), 4).dim == -1  # 7 -> 8 wastes 1/7, 10 -> 12 wastes 1/5


def test_what_may_count_layers_is_cut_only_where_all_else_wastes_far_more():
    assert split((8, 3, 16), 8).dim == -1
    assert split((8, 1000), 8).dim == -1  # a stack of vectors, as it looks
    assert split((8, 100), 8).dim == -2
    assert split((4096, 32, 128), 256).dim == -3  # 32 and 128 would be padded to 256
    assert split((4096, 32, 128), 128).dim == -1
    tree = {"blocks": {"w": jnp.zeros((8, 16, 4)), "b": jnp.zeros((8, 400)), "gain": jnp.zeros(8)}}
    assert [c.dim for c in cuts_of(tree, 4)] == [-1, -1, -2]


@pytest.mark.parametrize("n", [3, 8])
def test_padding_and_stripping_are_inverse(n):
    tree = {str(s): jnp.arange(math.prod(s), dtype=jnp.float32).reshape(s) for s in SHAPES}
    rest = layout.at_rest(tree, cuts_of(tree, n))
    back = layout.logical(rest)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for name in tree:
        np.testing.assert_array_equal(back[name], tree[name])
    padding = sum(float(jnp.sum(x)) for x in jax.tree.leaves(rest))
    assert padding == sum(float(jnp.sum(x)) for x in tree.values())


def test_state_that_mirrors_a_parameter_is_cut_like_it():
    params = {"blocks": {"w": jnp.zeros((8, 16, 4)), "b": jnp.zeros((8, 4))}}
    cuts = cuts_of(params, 4)
    state = ({"mu": params, "count": jnp.zeros(())}, {"rows": jnp.zeros((8, 16))})
    got = state_splits(state, params, cuts)
    assert got[0].dim is None
    assert got[1:3] == cuts
    assert got[3].dim == -2


def test_each_device_holds_one_nth():
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=1)
    params = zero.init(lambda: {"w": jnp.ones((64, 8)), "odd": jnp.ones((10, 7))})
    pieces = [s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards[:1]]
    assert pieces == [4 * 10 * 1, 4 * 64 * 8 // 8]


def test_an_array_that_was_not_partitioned_is_caught():
    mesh = zero_jax.make_mesh()
    whole = jax.device_put(
        jnp.ones((8, 8)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    with pytest.raises(ValueError, match=r"w holds \(8, 8\) .* layout says \(1, 8\)"):
        layout.check_bytes({"w": whole}, cuts_of({"w": whole}, 8))
