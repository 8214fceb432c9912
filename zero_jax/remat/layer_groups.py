"""Groups of about √L layers, for `block_sqrt`: a group is recomputed as a whole, then its layers.

The forward pass saves the inputs of groups, and the backward pass of a group those of its layers:
2·√L layer inputs at a time instead of L, for one more forward pass.
Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174).
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from zero_jax.collectives.barriers import Arrays, instead, is_float
from zero_jax.remat import recompute
from zero_jax.remat.policies import Place

T = TypeVar("T")


class CannotGroup(ValueError):
    """Raised if scanned layers have no groups of equal size."""


def neighbours(layers: Sequence[T]) -> list[Sequence[T]]:
    """Splits consecutive layers into groups.

    >>> [len(group) for group in neighbours(range(11))]
    [3, 3, 3, 2]
    """
    size = round(math.sqrt(len(layers)))
    return [layers[i : i + size] for i in range(0, len(layers), size)]


def scan(
    layer: recompute.Run,
    values: Arrays,
    counts: tuple[int, int],
    length: int,
    reverse: bool,
    place: Place,
    within: Sequence[int],
) -> list[jax.Array]:
    """Scans over groups of layers, each a rematerialised scan over its layers.

    Args:
      layer: The body.
      values: Inputs of the scan: constants, initial carry, and stacks.
      counts: Numbers of constants and of carried values.
      length: Number of layers.
      reverse: True to begin with the last.
      place: Where the input of a group is saved.
      within: Inputs of the body whose gradients are completed with it, see `recompute.layer`.
    """
    consts, carried = counts
    size = size_of(length)
    groups = length // size
    slices = values[consts + carried :]
    # The slices of a group would be copied out of the stacks for the inner loop. So each layer
    # reads its own from the full stacks, and the slices of the scan only receive gradients.
    full = [jax.lax.stop_gradient(x) for x in slices]
    before = consts + len(full)

    def one(args: Arrays, tap: recompute.Tap, trained: Sequence[int]) -> list[jax.Array]:
        fixed, stacks, (*rest, at) = args[:consts], args[consts:before], args[before:]
        pairs = zip(rest[carried:], stacks, strict=True)
        slices = (_read(x, s, at) for x, s in pairs)
        moved = [i if i < consts else i - len(full) for i in trained]
        return layer([*fixed, *rest[:carried], *slices], tap, moved)

    moved = [i if i < consts else i + len(full) for i in within]
    single = recompute.layer(one, {}, barrier=False, within=moved)

    def group(args: Arrays, *_: object) -> list[jax.Array]:
        return loop(single, args, before, carried, size, reverse)

    places = {i: place for i in range(before, before + carried)}
    wrapped = recompute.layer(group, places, barrier=False)
    fixed, carry = values[:consts], values[consts : consts + carried]
    xs = [
        jax.lax.reshape(x, (groups, size, *x.shape[1:]))
        for x in [*slices, jax.numpy.arange(length)]
    ]
    outs = loop(wrapped, [*fixed, *full, *carry, *xs], before, carried, groups, reverse)
    return [*outs[:carried], *(jax.lax.reshape(y, (length, *y.shape[2:])) for y in outs[carried:])]


def _read(own: jax.Array, stack: jax.Array, at: jax.Array) -> jax.Array:
    """Returns a layer's slice of a stack, whose gradient goes to the slice of the scan."""
    if not is_float(own):
        return own
    return instead(own, jax.lax.dynamic_index_in_dim(stack, at, keepdims=False))


def loop(
    step: Callable[..., list[jax.Array]],
    values: Arrays,
    consts: int,
    carried: int,
    length: int,
    reverse: bool,
    unroll: int = 1,
) -> list[jax.Array]:
    """Runs `jax.lax.scan` with flat inputs: constants, carry and stacks in this order."""
    fixed, carry = values[:consts], values[consts : consts + carried]
    xs = values[consts + carried :]

    def body(carry: Arrays, xs: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
        outs = step(*fixed, *carry, *xs)
        return outs[:carried], outs[carried:]

    carry, ys = jax.lax.scan(
        body, list(carry), list(xs), length=length, reverse=reverse, unroll=unroll
    )
    return [*carry, *ys]


def size_of(length: int) -> int:
    """Returns the number of scanned layers in a group; all groups have the same size.

    Raises:
      CannotGroup: `length` has no divisor, so groups would save no memory.

    >>> size_of(36), size_of(48), size_of(98)
    (6, 6, 7)
    """
    if length < 4:  # groups of two or three layers would save no memory
        return 1
    size = max(s for s in range(1, math.isqrt(length) + 1) if length % s == 0)
    if size == 1:
        raise CannotGroup(
            f"`remat`='block_sqrt': a scan over {length} layers has no groups of equal size, "
            f'because no number divides {length}. Use "block", or another number of layers'
        )
    return size
