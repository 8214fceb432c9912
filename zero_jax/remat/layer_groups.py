"""Layers in groups of about √L, for `block_sqrt`: a group is run again as a whole, then its layers.

From forward to backward the inputs of the groups are kept, and while a group runs backward those
of its layers: 2·√L layer inputs at once in place of L, for one more forward pass.
Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.collectives import barriers
from zero_jax.remat import recompute
from zero_jax.remat.policies import Place


class CannotGroup(ValueError):
    """Scanned layers of a number that nothing divides."""


def neighbours(layers: Sequence[Any]) -> list[Sequence[Any]]:
    """Groups of layers that follow on each other.

    >>> [len(group) for group in neighbours(range(11))]
    [3, 3, 3, 2]
    """
    size = round(math.sqrt(len(layers)))
    return [layers[i : i + size] for i in range(0, len(layers), size)]


def scan(
    layer: Callable[..., list[Any]],
    values: Sequence[Any],
    counts: tuple[int, int],
    length: int,
    reverse: bool,
    place: Place,
    within: Sequence[int],
) -> list[Any]:
    """A scan over groups of layers, each a scan over its layers that is run again as a whole.

    Args:
      layer: the body.
      values: what the scan is given: constants, carry, what it takes slices of.
      counts: how many of these are constants, and how many its carry.
      length: how many layers there are.
      reverse: whether it begins with the last.
      place: where the input of a group is kept.
      within: inputs of the body whose gradients are finished with it, see `recompute.layer`.
    """
    consts, carried = counts
    size = size_of(length)
    groups = length // size
    slices = values[consts + carried :]
    # The slices of a group would be copied out of the stacks for the inner loop to read. So each
    # layer reads its own out of the whole stacks, and what the scan slices only takes gradients.
    whole = [jax.lax.stop_gradient(x) for x in slices]
    before = consts + len(whole)

    def one(args: Sequence[Any], tap: Any, trained: Sequence[int]) -> list[Any]:
        fixed, stacks, (*rest, at) = args[:consts], args[consts:before], args[before:]
        pairs = zip(rest[carried:], stacks, strict=True)
        slices = (_read(x, s, at) for x, s in pairs)
        moved = [i if i < consts else i - len(whole) for i in trained]
        return layer([*fixed, *rest[:carried], *slices], tap, moved)

    moved = [i if i < consts else i + len(whole) for i in within]
    single = recompute.layer(one, {}, barrier=False, within=moved)

    def group(args: Sequence[Any], *_: Any) -> list[Any]:
        return loop(single, args, before, carried, size, reverse)

    places = {i: place for i in range(before, before + carried)}
    wrapped = recompute.layer(group, places, barrier=False)
    fixed, carry = values[:consts], values[consts : consts + carried]
    xs = [
        jax.lax.reshape(x, (groups, size, *x.shape[1:]))
        for x in [*slices, jax.numpy.arange(length)]
    ]
    outs = loop(wrapped, [*fixed, *whole, *carry, *xs], before, carried, groups, reverse)
    return [*outs[:carried], *(jax.lax.reshape(y, (length, *y.shape[2:])) for y in outs[carried:])]


def _read(own: Any, stack: Any, at: Any) -> Any:
    """A layer's slice of a stack, whose gradient goes to a slice of its own."""
    if not barriers.is_float(own):
        return own
    return barriers.instead(own, jax.lax.dynamic_index_in_dim(stack, at, keepdims=False))


def loop(
    step: Callable[..., list[Any]],
    values: Sequence[Any],
    consts: int,
    carried: int,
    length: int,
    reverse: bool,
    unroll: int = 1,
) -> list[Any]:
    """`jax.lax.scan` of a function of constants, carry and slices in a row."""
    fixed, carry = values[:consts], values[consts : consts + carried]
    xs = values[consts + carried :]

    def body(carry: Any, xs: Any) -> Any:
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
    if length < 4:  # two or three layers keep as little one by one
        return 1
    size = max(s for s in range(1, math.isqrt(length) + 1) if length % s == 0)
    if size == 1:
        raise CannotGroup(
            f"`remat`='block_sqrt': a scan over {length} layers has no groups of equal size, "
            f'because no number divides {length}. Use "block", or another number of layers'
        )
    return size
