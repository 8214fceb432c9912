"""Devices that take part in a collective together, and the mesh axis that they form.

XLA writes replica groups in three ways: lists of ids, an iota `[groups,size]<=[dims]T(order)`, and
axes of a mesh by name, which may be a mesh of XLA's own (`axis_0`). All three, and the pairs of a
permute, become rows of device positions, and rows become axis names by comparison with the mesh.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Groups:
    """Device positions of each group; `names` are the axes that the text names, if it does."""

    rows: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of devices in a group."""
        return max(len(set(row)) for row in self.rows)

    def axis(self, mesh: Mapping[str, int] | None) -> str:
        """Returns the mesh axis that the groups run along.

        Args:
          mesh: Sizes of the mesh axes by name, in order; None if unknown.

        Returns:
          The name; "replica+data" for two axes together, in the order of the mesh; "?" if neither
          the text nor the mesh determines it.

        >>> parse("{{0,2},{1,3}}", 4).axis({"replica": 2, "data": 2})
        'replica'
        """
        if mesh is None:
            return "+".join(self.names) or "?"
        if self.names and set(self.names) <= set(mesh):
            return "+".join(axis for axis in mesh if axis in self.names)
        ids = np.arange(math.prod(mesh.values()))
        for count in range(1, len(mesh) + 1):
            for axes in itertools.combinations(mesh, count):
                along = _along(mesh, {axis: (1, mesh[axis]) for axis in axes}, ids)
                if _sets(self.rows) == _sets(along.tolist()):
                    return "+".join(axes)
        return "?"


@functools.lru_cache
def parse(text: str, num_devices: int) -> Groups:
    """Parses replica groups; all of `num_devices` together if the text names none.

    Raises:
      ValueError: The groups cannot be read.

    >>> parse("[2,2]<=[4]", 4).rows, parse("mesh['a'=4,'b'=2] {'b'}", 8).size
    (((0, 1), (2, 3)), 2)
    """
    if lists := re.findall(r"\{([\d,]+)\}", text):  # {{0,1},{2,3}}
        return Groups(tuple(tuple(map(int, ids.split(","))) for ids in lists))
    names: tuple[str, ...] = ()
    if text == "{}":
        rows = np.arange(num_devices)[None]
    elif iota := re.match(r"\[(\d+),(\d+)\]<=(.*)", text):  # [groups,size]<=[4,2]T(1,0)
        rows = _iota(iota[3]).reshape(int(iota[1]), int(iota[2]))
    elif mesh := re.match(r"mesh\[(.*?)\](.*)\{(.*)\}$", text):
        # mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(2)2,'b'}: half of a, and b
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[3])
        names = tuple(axis for axis, _, _ in parts)
        ids = _iota(mesh[2].partition("=")[2] or f"[{math.prod(sizes.values())}]")
        chosen = {a: (int(before or 1), int(size or sizes[a])) for a, before, size in parts}
        rows = _along(sizes, chosen, ids)
    else:
        raise ValueError(f"cannot read these replica groups: {text}")
    return Groups(tuple(map(tuple, rows.tolist())), names)


def _iota(text: str) -> np.ndarray:
    """Returns the ids in the order of "[4,2]T(1,0)"."""
    dims, _, order = ([int(n) for n in re.findall(r"\d+", part)] for part in text.partition("T"))
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(order) if order else ids


def _along(
    sizes: Mapping[str, int], parts: Mapping[str, tuple[int, int]], ids: np.ndarray
) -> np.ndarray:
    """Returns rows of ids along a part of each named axis: the size before it, and its size."""
    dims = []  # of each axis: what is before the chosen part, that part, and what is after it
    for axis, size in sizes.items():
        before, mine = parts.get(axis, (size, 1))
        dims += [before, mine, size // (before * mine)]
    together = range(1, len(dims), 3)
    ids = np.moveaxis(ids.reshape(dims), together, range(-len(together), 0))
    return ids.reshape(-1, math.prod(mine for _, mine in parts.values()))


def _sets(rows: Iterable[Iterable[int]]) -> set[frozenset[int]]:
    return {frozenset(row) for row in rows}
