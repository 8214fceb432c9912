"""The tokens of a row that a device of `context` has: two chunks, as in a zig-zag.

A row of T tokens is 2·C chunks, and device c of C has the chunks c and 2·C - 1 - c, in this order.
Under a causal mask late tokens see more keys than early ones; two such chunks together cost the
same on every device.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zero_jax.sharding.mesh import CONTEXT
from zero_jax.sharding.paths import PyTree


def size() -> int:
    """Returns C, the size of the `context` axis; 1 outside `shard_map`, or without that axis."""
    try:
        return jax.lax.axis_size(CONTEXT)
    except NameError:
        return 1


def starts(tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the positions in the row of this device's two chunks, given its number of tokens."""
    first, length = jax.lax.axis_index(CONTEXT), tokens // 2
    return first * length, (2 * size() - 1 - first) * length


def positions(tokens: int) -> jax.Array:
    """Returns the positions (T / C,) in the row of this device's tokens, int32."""
    if size() == 1:
        return jnp.arange(tokens, dtype=jnp.int32)
    own = jnp.arange(tokens // 2, dtype=jnp.int32)
    return jnp.concatenate([start.astype(jnp.int32) + own for start in starts(tokens)])


def take(row: jax.Array, dim: int) -> jax.Array:
    """Returns this device's tokens of full rows."""
    tokens = row.shape[dim] // size()
    parts = [
        jax.lax.dynamic_slice_in_dim(row, start, tokens // 2, axis=dim) for start in starts(tokens)
    ]
    return jnp.concatenate(parts, axis=dim)


def ordered(row: jax.Array, dim: int) -> jax.Array:
    """Returns full rows in the order of their tokens, given those of the devices in order."""
    count = 2 * size()
    # Chunk i of the row is the first one of device i, or the second one of device 2·C - 1 - i.
    places = [2 * i if i < count // 2 else 2 * (count - 1 - i) + 1 for i in range(count)]
    return _rearranged(row, dim, places)


def dealt(row: jax.Array, dim: int) -> jax.Array:
    """Inverts `ordered`."""
    count = 2 * size()
    places = [chunk for i in range(count // 2) for chunk in (i, count - 1 - i)]
    return _rearranged(row, dim, places)


def _rearranged(row: jax.Array, dim: int, places: Sequence[int]) -> jax.Array:
    length = row.shape[dim] // len(places)
    parts = [jax.lax.slice_in_dim(row, at * length, (at + 1) * length, axis=dim) for at in places]
    return jnp.concatenate(parts, axis=dim)


def has_tokens(batch: PyTree, devices: int) -> list[bool]:
    """Returns for each leaf of a batch whether its dim 1 has the tokens of a row.

    They are the leaves of rank 2 and more with the most common length of dim 1, or the first one.

    Raises:
      ValueError: No leaf has rows of tokens, 2·C does not divide their number, or another leaf has
        one token more or less.
    """
    shapes = [tuple(x.shape) for x in jax.tree.leaves(batch)]
    lengths = [shape[1] for shape in shapes if len(shape) > 1]
    if devices == 1:
        return [False] * len(shapes)
    if not lengths:
        raise ValueError(
            f"`mesh` has a context axis of {devices}, but no array of the batch has tokens as its "
            f"dim 1, only shapes {shapes}: use make_mesh(context=1)"
        )
    tokens = max(lengths, key=lengths.count)
    if any(abs(length - tokens) == 1 for length in lengths):
        raise ValueError(
            f"the batch has rows of {sorted(set(lengths))} tokens, and a device of the context "
            "axis has a part of each: pass `inputs, labels = tokens[:, :-1], tokens[:, 1:]` as two "
            "arrays of the batch, and shift nothing in the loss"
        )
    if tokens % (2 * devices):
        below = tokens // (2 * devices) * 2 * devices
        raise ValueError(
            f"rows have {tokens} tokens, and a context axis of {devices} requires a multiple of "
            f"{2 * devices}: use {f'{below} or ' if below else ''}{below + 2 * devices}, or pad"
        )
    return [len(shape) > 1 and shape[1] == tokens for shape in shapes]
