"""Embedding lookup in a sharded table, which is never gathered: each device receives its rows.

An embedding is the largest leaf of many models, and a step reads few of its rows. Gathering it and
reduce-scattering its gradient sends 2·V·E elements. For T rows read on each device this sends

    2·T·E + 2·V·E / N elements: rows and their gradients, and the shard as columns and back

No device ever stores the table. Every device holds all rows of some columns (a shard of full rows
is exchanged for columns first), reads the rows that any device needs in them, and sends each device
its own. Runs inside `shard_map`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from zero_jax.collectives.gather_scatter import Optional, Wire, all_to_all
from zero_jax.sharding.layout import Partition, pad_dim


@dataclasses.dataclass(frozen=True)
class Take:
    """Handling of indices out of bounds, in the dtype of the leaf: see `jax.lax.gather`."""

    mode: jax.lax.GatherScatterMode
    fill_value: ArrayLike | None

    def __call__(self, table: jax.Array, indices: jax.Array) -> jax.Array:
        """Returns rows (M, E) of a table (V, E), given indices (M, 1)."""
        dims = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
        size = (1, table.shape[1])
        return jax.lax.gather(
            table, indices, dims, size, mode=self.mode, fill_value=self.fill_value
        )


def rows(
    shard: jax.Array, slot: Optional, indices: jax.Array, take: Take, cut: Partition, wire: Wire
) -> jax.Array:
    """Returns the rows that this device reads, differentiable with respect to the shard.

    Args:
      shard: This device's shard of an fp32 master matrix (V, E).
      slot: See `touch`.
      indices: Integer indices of rows, (..., 1).
      take: Handling of indices out of bounds.
      cut: Partition of the leaf.
      wire: Dtypes and bucket of the communication.

    Returns:
      Rows (..., E) in the compute dtype.
    """

    @jax.custom_vjp
    def looked_up(shard: jax.Array, slot: Optional, indices: jax.Array) -> jax.Array:
        return forward(shard, slot, indices)[0]

    @jax.named_scope("zero_lookup")
    def forward(
        shard: jax.Array, slot: Optional, indices: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        own = wire.cast(shard)
        asked = jax.lax.all_gather(indices.reshape(-1, 1), cut.axis, tiled=True)
        columns = own if cut.dim == -1 else _to_columns(own, cut, wire)[: cut.shape[0]]
        read = _to_rows(take(columns, asked), cut, wire)
        return read.reshape(*indices.shape[:-1], cut.shape[1]), asked

    @jax.named_scope("zero_lookup")
    def backward(asked: jax.Array, cotangent: jax.Array) -> tuple[Optional, Optional, None]:
        flat = cotangent.reshape(-1, cut.shape[1])
        sent = _to_columns(flat.astype(wire.reduce), cut, wire)
        wide = jnp.promote_types(cotangent.dtype, jnp.float32)
        table = jax.ShapeDtypeStruct((cut.shape[0], sent.shape[1]), wide)
        (grad,) = jax.linear_transpose(lambda t: take(t, asked), table)(sent.astype(wide))
        if cut.dim == -2:
            padded = pad_dim(grad.astype(wire.reduce), 0, cut.shard_size * cut.shards)
            grad = _to_rows(padded, cut, wire).astype(wide)
        return (grad, None, None) if slot is None else (None, grad.astype(slot.dtype), None)

    looked_up.defvjp(forward, backward)
    return looked_up(shard, slot, indices)


def _to_columns(x: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """Exchanges full rows (M, E) of each device for some columns of all N·M rows, with padding."""
    width = cut.shard_size if cut.dim == -1 else -(-cut.shape[1] // cut.shards)
    padded = pad_dim(x, 1, width * cut.shards).reshape(len(x), cut.shards, width)
    parts = all_to_all(jnp.moveaxis(padded, 1, 0), cut.axis, wire.bucket)
    return parts.reshape(-1, width)


def _to_rows(x: jax.Array, cut: Partition, wire: Wire) -> jax.Array:
    """Inverts `_to_columns`, and removes the padding."""
    parts = x.reshape(cut.shards, len(x) // cut.shards, -1)
    parts = all_to_all(parts, cut.axis, wire.bucket)
    rows = jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1)
    return rows[:, : cut.shape[1]]
