"""Matrices in 8 or 4 bits: codes, and a scale for each block of 64 rows of a column.

Blocks follow the indices of the unsharded leaf, so the bits are the same for every partition. Codes
and scales are integers, which a cast of floats leaves unchanged. A leaf is dequantised where it is
used in a product.

  int8   a code is a signed byte with the value code · scale; the scale is the largest / 127
  nf4    a code is one of 16 values, two per byte: rows 0 to 31 of a block in the low halves of
         32 bytes, rows 32 to 63 in the high halves; the scale is the largest

Bits per parameter, scales included: 8.25 and 4.25.
Source: Dettmers et al., QLoRA, arXiv:2305.14314, section 3 and appendix E.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zero_jax.sharding import paths
from zero_jax.sharding.paths import PyTree

Array = jax.Array | np.ndarray
BLOCK = 64
KINDS = ("int8", "nf4")
# Quantiles in the middle of 16 equally likely parts of a normal distribution; 0 is exact.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
_OF_127 = np.float32(1 / 127)
_MIDDLES = (NF4[1:] + NF4[:-1]) / 2
# Maximum error of a value in units of the largest of its block: half of the widest gap, and the
# error of the scale, which is rounded to 8 bits.
BOUNDS = {"nf4": float(np.diff(NF4).max() / 2 + 2**-8), "int8": 0.5 / 127 + 2**-8}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """A matrix in blocks.

    Attributes:
      codes: uint8 (nf4, half as many rows) or int8, rows padded to full blocks.
      scales: The bits of a bfloat16 for each block, uint16.
      kind: "int8" or "nf4".
      dim: Dim whose rows are in blocks, counted from the end.
      rows: Number of rows.
    """

    codes: Array
    scales: Array
    kind: str = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})
    rows: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        shape = list(self.codes.shape)
        shape[self.dim] = self.rows
        return tuple(shape)

    def open(self, dtype: DTypeLike) -> jax.Array:
        """Returns the dequantised matrix."""
        scales = jax.lax.bitcast_convert_type(self.scales, jnp.bfloat16)
        at = self.dim % scales.ndim
        codes = _in_blocks(self.codes, at, scales.shape[at])
        if self.kind == "int8":
            values = codes.astype(jnp.float32)
        else:
            both = jnp.concatenate([codes & 15, codes >> 4], axis=at + 1)
            values = jnp.take(jnp.asarray(NF4), both.astype(jnp.int32), mode="clip")
        rows = _joined(values * jnp.expand_dims(scales.astype(jnp.float32), at + 1), at)
        return jax.lax.slice_in_dim(rows, 0, self.rows, axis=at).astype(dtype)


def named(tree: PyTree) -> list[tuple[str, PyTree]]:
    """Returns (path, leaf) of every leaf; quantised and padded leaves are not taken apart."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_whole)
    numbered = jax.tree.unflatten(treedef, range(len(leaves)))
    return [(path, leaves[i]) for path, i in paths.named_leaves(numbered)]


def mapped(fun: Callable[[str, PyTree], PyTree], tree: PyTree) -> PyTree:
    """Returns a tree with `fun(path, leaf)` in place of each leaf of `named`."""
    leaves = [fun(path, leaf) for path, leaf in named(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_whole), leaves)


def is_whole(node: PyTree) -> bool:
    """Returns True for a node that is a leaf of `named`, although it has leaves of its own."""
    return isinstance(node, (Quantised, paths.Padded))


def quantise(x: Array, kind: str, dim: int) -> Quantised:
    """Quantises a matrix in blocks along a dim.

    Args:
      x: Floats, of NumPy or JAX; the bits of the result are the same.
      kind: "int8" or "nf4".
      dim: Dim whose rows are in blocks, counted from the end.

    >>> packed = quantise(np.linspace(-1, 1, 64, dtype=np.float32)[:, None], "nf4", -2)
    >>> packed.codes.shape, packed.scales.shape, packed.shape
    ((32, 1), (1, 1), (64, 1))
    >>> float(abs(packed.open(jnp.float32)[:, 0] - jnp.linspace(-1, 1, 64)).max()) <= BOUNDS["nf4"]
    True
    """
    xp = np if isinstance(x, np.ndarray) else jnp
    at, rows = dim % x.ndim, x.shape[dim]
    blocks = -(-rows // BLOCK)
    around = [(0, 0)] * x.ndim
    around[at] = (0, blocks * BLOCK - rows)
    split = _in_blocks(xp.pad(x.astype(xp.float32), around), at, blocks)
    largest = xp.abs(split).max(axis=at + 1, initial=0)
    # A product, because XLA replaces a division by a constant, and the last bit may differ.
    scales = largest * _OF_127 if kind == "int8" else largest
    if xp is jnp:  # XLA for GPUs omits the pair of casts that rounds
        scales = jax.lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=7)
    scales = scales.astype(jnp.bfloat16)
    unit = xp.expand_dims(scales.astype(xp.float32), at + 1)
    if kind == "int8":
        steps = xp.rint(split / xp.where(unit > 0, unit, np.float32(1)))
        codes = xp.clip(steps, -127, 127).astype(xp.int8)
    else:
        below = sum((split > middle * unit).astype(xp.uint8) for middle in _MIDDLES)
        low, high = xp.split(below, 2, axis=at + 1)
        codes = low | (high << 4)
    return Quantised(_joined(codes, at), scales.view(xp.uint16), kind, at - x.ndim, rows)


def _in_blocks(x: Array, at: int, blocks: int) -> Array:
    each = x.shape[at] // max(blocks, 1)
    return x.reshape(*x.shape[:at], blocks, each, *x.shape[at + 1 :])


def _joined(x: Array, at: int) -> Array:
    """Inverts `_in_blocks`."""
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
