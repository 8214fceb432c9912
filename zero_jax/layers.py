"""Finds the layers of a model that does not scan over them.

In a tree of parameters, layers are siblings that differ by a number in their name (blocks_0,
blocks_1, or the items of a list) and have the same leaves of the same shapes. In a traced loss, a
layer goes from where the least is alive before its parameters are first used (its input, not the
half of a norm that follows) to where the next one starts. To recompute any stretch of a program
gives the same values, so what is found here decides on memory, never on results.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from zero_jax.jaxprs import LAYOUT, has_remat, is_in, slices_its_inputs

OTHER = -1  # in place of a layer's number: a parameter of none


def number_layers(leaves: Sequence[tuple[str, tuple[int, ...]]]) -> list[int | None]:
    """For each leaf the number of the layer that it belongs to, or None.

    Where siblings stand within siblings (products in blocks, blocks in towers), the more numerous
    ones are the layers. Siblings without a matrix in them are none.

    Args:
      leaves: path and shape of each.

    >>> number_layers([("block_0/w", (4, 4)), ("block_1/w", (4, 4)), ("head/w", (4, 2))])
    [0, 1, None]
    """
    tree: dict[str, Any] = {}
    for index, (path, shape) in enumerate(leaves):
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = (index, tuple(shape))
    numbers: list[int | None] = [None] * len(leaves)
    for number, layer in enumerate(layer for group in _groups(tree) for layer in group):
        for index in layer:
            numbers[index] = number
    return numbers


def _groups(node: Any) -> list[list[list[int]]]:
    """The groups of sibling layers below a node; a layer is the indices of its leaves."""
    if not isinstance(node, dict):
        return []
    alike: dict[Any, list[Any]] = {}
    for name, child in node.items():
        stem = re.sub(r"\d+$", "", name)
        shapes = [(path, shape) for path, _, shape in _below(child)]
        matrices = any(len(shape) > 1 for _, shape in shapes)
        key = (stem, *shapes) if stem != name and matrices else (name, None)
        alike.setdefault(key, []).append(child)
    found = []
    for members in alike.values():
        inner = [group for member in members for group in _groups(member)]
        longest = max((len(group) for group in inner), default=1)
        if len(members) > 1 and len(members) >= longest:
            found.append([[index for _, index, _ in _below(m)] for m in members])
        else:
            found += inner
    return found


def _below(node: Any, path: str = "") -> list[tuple[str, int, tuple[int, ...]]]:
    if not isinstance(node, dict):
        return [(path, *node)]
    return [leaf for name, child in node.items() for leaf in _below(child, f"{path}/{name}")]


def segments(jaxpr: Any, owner: Mapping[Any, int], touches: Sequence[str]) -> list[range]:
    """The stretches of equations that are layers, in order.

    Args:
      jaxpr: with its calls written out, but for touches.
      owner: for each variable that is a parameter the number of its layer, or OTHER.
      touches: names of the calls that open a parameter.
    """
    uses, owner = _uses(jaxpr, owner, touches)
    loops = {i for i, e in enumerate(jaxpr.eqns) if slices_its_inputs(e, owner)}
    scanned = {number for i in loops for number in uses[i]}
    first: dict[int, int] = {}
    for i, numbers in enumerate(uses):
        for number in numbers - scanned - {OTHER}:
            first.setdefault(number, i)
    alive = _alive(jaxpr, owner)
    starts = sorted(first.items(), key=lambda item: item[1])
    begins = [_cut(alive, _after_use(uses, at), at) for _, at in starts]
    found: list[range] = []
    for k, (number, at) in enumerate(starts):
        after = starts[k + 1][1] if k + 1 < len(starts) else len(jaxpr.eqns)
        own = max(i for i in range(at, after) if number in uses[i])
        others = [i for i in range(own + 1, after) if uses[i] - {number}]
        if others or k + 1 == len(starts):
            limit = others[0] if others else after
            # What follows the last layer is no part of it: it ends where one before it does.
            longest = max((len(r) for r in found), default=limit)
            stop = _cut(alive, own + 1, max(min(limit, begins[k] + longest), own + 1))
        else:
            stop = begins[k + 1]
        found.append(range(begins[k], stop))
    return [r for r in found if not _decided(jaxpr.eqns[r.start : r.stop]) and not loops & set(r)]


def _decided(eqns: Sequence[Any]) -> bool:
    """Whether the model itself says what a layer keeps."""
    return has_remat(jex.Jaxpr((), (), (), list(eqns)))


def _uses(
    jaxpr: Any, owner: Mapping[Any, int], touches: Sequence[str]
) -> tuple[list[set[int]], dict[Any, int]]:
    """Whose parameters each equation computes with, and re-arranged and opened parameters too."""
    known = dict(owner)
    uses = []
    for eqn in jaxpr.eqns:
        numbers = {known[a] for a in eqn.invars if is_in(a, known)}
        moves = eqn.primitive.name in LAYOUT or eqn.params.get("name") in touches
        if moves and len(numbers) == 1:
            known.update((v, min(numbers)) for v in eqn.outvars)
            numbers = set()
        uses.append(numbers)
    return uses, known


def _after_use(uses: Sequence[set[int]], at: int) -> int:
    """The first equation after which no parameter is used before this one."""
    return max((i + 1 for i in range(at) if uses[i]), default=0)


def _cut(alive: Sequence[int], low: int, high: int) -> int:
    """Where in low..high the fewest bytes are alive; the latest such place."""
    return min(range(high, low - 1, -1), key=lambda i: alive[i])


def _alive(jaxpr: Any, weights: Mapping[Any, int]) -> list[int]:
    """Bytes of activations that are alive before each equation, and after the last."""
    end = len(jaxpr.eqns)
    last = {a: end for a in jaxpr.outvars if not isinstance(a, jex.Literal)}
    for i in range(end - 1, -1, -1):
        for atom in jaxpr.eqns[i].invars:
            if not isinstance(atom, jex.Literal):
                last.setdefault(atom, i)
    change = [0] * (end + 2)
    for i, eqn in enumerate(jaxpr.eqns):
        for var in eqn.outvars:
            if var in last and var not in weights and hasattr(var.aval, "dtype"):
                change[i + 1] += _bytes(var.aval)
                change[last[var] + 1] -= _bytes(var.aval)
    alive = [0]
    for step in change[1:-1]:
        alive.append(alive[-1] + step)
    return alive


def _bytes(aval: Any) -> int:
    size = aval.dtype.itemsize if jnp.issubdtype(aval.dtype, jnp.generic) else 4  # keys have none
    return math.prod(aval.shape) * size
