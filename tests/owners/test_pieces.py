"""Matrices sharded over one or two dims, with and without padding, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zero_jax.owners.pieces import Pieces

DATA, MODEL = ("data", 4), ("model", 2)
CUTS = [
    ((8, 6), (("data",), ("model",))),
    ((7, 5), (("data",), ("model",))),
    ((5, 9), ((), ("data", "model"))),
    ((3, 2, 5), (("model",), (), ("data",))),
    ((1,), (("data", "model"),)),
]


@pytest.mark.parametrize(("shape", "axes"), CUTS, ids=str)
def test_pieces_are_those_that_devices_hold_and_join_to_the_matrix(shape, axes):
    pieces = Pieces(shape, jnp.dtype("float32"), axes, (DATA, MODEL))
    matrix = jax.random.normal(jax.random.key(0), shape)
    parts = pieces.part(matrix)
    assert parts.shape == (8, pieces.size)
    np.testing.assert_array_equal(pieces.join(parts), matrix)

    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(*pieces.stack_spec[1:])
    placed = jax.device_put(pieces.padded(matrix), NamedSharding(mesh, spec))
    held = {piece.device: piece.data for piece in placed.addressable_shards}
    for device, part in zip(mesh.devices.flat, parts, strict=True):
        np.testing.assert_array_equal(held[device], part.reshape(pieces.piece))
