"""How leaves of any shape are sharded over any N, and which rows a process feeds."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.sharding import layout, mesh
from zero_jax.sharding.layout import Partition, Partitioner, state_partitions, with_dim

SHAPES = [(), (0,), (0, 4), (1,), (3,), (13,), (8,), (10, 7), (7, 13), (3, 3, 5, 7), (4096, 3)]
# The first dim that N divides; the least padding (7 -> 8 wastes 1/7, 10 -> 12 wastes 1/5); a dim
# that may count layers only where all others waste far more: 32 and 128 would be padded to 256.
DIMS = [
    ((9, 8, 16), 8, -2), ((16, 8), 8, -2), ((10, 7), 4, -1), ((8, 3, 16), 8, -1),
    ((8, 1000), 8, -1), ((8, 100), 8, -2), ((4096, 32, 128), 256, -3), ((4096, 32, 128), 128, -1),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "n", "dim"), DIMS)
def test_the_dim_that_is_sharded(shape, n, dim):
    assert with_dim(Partition(shape, None, n)).dim == dim


def test_parts_of_a_shard_are_ordered_by_data_and_then_by_replica():
    cut = with_dim(Partition((10, 7), None, 3, parts=2))
    assert cut.stored_spec == jax.P(("data", "replica"))
    assert (cut.shard_size, cut.stored_shape, cut.device_shape) == (4, (12, 7), (2, 7))
    cut = with_dim(Partition((2, 64), None, 1, model=-1, model_shards=4))  # no data axis
    assert (cut.dim, cut.model, cut.device_shape) == (None, -1, (2, 16))


@pytest.mark.parametrize("n", [3, 8, 400])
def test_padding_and_stripping_are_inverse(n):
    tree = {str(s): jnp.arange(math.prod(s), dtype=jnp.float32).reshape(s) for s in SHAPES}
    cuts = Partitioner(n)(tree)
    stored = layout.pad(tree, cuts)
    back = layout.unpad(stored)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for name in tree:
        np.testing.assert_array_equal(back[name], tree[name])
    padding = sum(float(jnp.sum(x)) for x in jax.tree.leaves(stored))
    assert padding == sum(float(jnp.sum(x)) for x in tree.values())
    per_device = sum(4 * math.prod(cut.stored_shape) // cut.shards for cut in cuts if cut.dim)
    whole = sum(4 * math.prod(cut.shape) for cut in cuts if cut.dim is None)
    leaves = jax.tree.leaves(tree)
    assert layout.bytes_per_device(cuts, leaves) == per_device + whole
    half = with_dim(Partition((8, 6), None, 4, model=-1, model_shards=2))
    assert layout.bytes_per_device([half], [jnp.zeros((8, 6))]) == 4 * 8 * 6 // (4 * 2)


def test_state_that_mirrors_a_parameter_is_sharded_like_it():
    params = {"blocks": {"w": jnp.zeros((8, 16, 4)), "b": jnp.zeros((8, 4))}}
    cuts = Partitioner(4)(params)
    rows = {"blocks": {"w": jnp.zeros((8, 16))}}  # a parameter's path, but another shape
    got = state_partitions(({"mu": params, "count": jnp.zeros(())}, rows), params, cuts)
    assert got[0].dim is None
    assert got[1:3] == cuts
    assert (got[3].shape, got[3].dim) == ((8, 16), -2)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("other", ["experts", "model"])
@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_a_process_loads_the_rows_of_its_devices(order, other, count, monkeypatch):
    """Whatever the order of the axes. Devices that differ in `model` share rows."""
    axes, types = [("replica", other, "data")[i] for i in order], (jax.sharding.AxisType.Auto,) * 3
    made = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), axes, axis_types=types)
    shards = 4 if other == "model" else 8
    placed = mesh.batch_sharding(made).devices_indices_map((shards,))  # where JAX puts them
    for first in range(0, 8, count):
        local = jax.devices()[first : first + count]
        monkeypatch.setattr(type(made), "local_devices", local)
        index, parts = mesh.batch_share(made)
        rows = sorted({placed[device][0].start for device in local})
        own = shards // parts
        assert rows == list(range(index * own, (index + 1) * own))
        for shape in [(), (own + 1,)][: min(own, 2)]:
            with pytest.raises(ValueError, match=r"`local`\['x'\].*multiple of"):
                mesh.global_batch(made, {"x": np.zeros(shape)})
