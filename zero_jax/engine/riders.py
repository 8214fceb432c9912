"""Matrices that are first read after the layers: their shards ride through the layers' loop.

XLA's scheduler does not see into a loop, and what it starts before one it waits for before it. So
the gather of a model's head would stand in the open between the forward and the backward loop, and
so would the sum of its gradient. XLA takes a turn out of a loop that gathers ahead: the last one
forward, the first one backward. A shard that is carried through the loop, tied in every turn to
what the turn is given, is there when the last turn begins, and gathered while the last layer
computes; its gradient is due when the last layer has run backward, and summed meanwhile.

Only a tie, which changes no number. What a loop carries unchanged is not copied. What is larger
than a bucket does not ride: put together of pieces it is held twice for a moment, now beside the
loss (Llama 3.1 70B on 64: 29.34 GB for 27.07).
"""

from collections.abc import Callable, Sequence
from typing import Any

from zero_jax.collectives.barriers import abreast, is_float
from zero_jax.remat import layer_groups


def loop(
    step: Callable[..., list[Any]],
    values: Sequence[Any],
    counts: tuple[int, int],
    length: int,
    reverse: bool,
    unroll: int,
    riders: Sequence[Any],
) -> list[Any]:
    """`layer_groups.loop` with riders in it.

    Args:
      step: the body, of constants, carry and slices.
      values: what the loop is given, in that order.
      counts: how many of these are constants, and how many its carry.
      length: how many turns there are.
      reverse: whether it begins with the last.
      unroll: turns that are written out in one.
      riders: shards that nobody in the loop reads.

    Returns:
      The results of the loop, and then the riders.
    """
    consts, carried = counts
    if not riders:
        return layer_groups.loop(step, values, consts, carried, length, reverse, unroll)
    own = consts + carried
    ends = own + len(riders)

    def turn(*args: Any) -> list[Any]:
        carry, riding = _tied(args[consts:own], args[own:ends])
        outs = step(*args[:consts], *carry, *args[ends:])
        return [*outs[:carried], *riding, *outs[carried:]]

    given = [*values[:own], *riders, *values[own:]]
    outs = layer_groups.loop(turn, given, consts, carried + len(riders), length, reverse, unroll)
    there = carried + len(riders)
    return [*outs[:carried], *outs[there:], *outs[carried:there]]


def _tied(carry: Sequence[Any], riders: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Neither what a turn is given nor the riders are there before the others, nor is, backward,
    what goes on to the turn before."""
    carry = list(carry)
    floats = [i for i, x in enumerate(carry) if is_float(x)]
    tied = abreast([*(carry[i] for i in floats), *riders])
    for i, x in zip(floats, tied, strict=False):
        carry[i] = x
    return carry, tied[len(floats) :]
