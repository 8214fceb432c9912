"""Which devices take part in a collective together, and which mesh axis that is.

XLA writes replica groups in three ways: lists of ids, an iota `[groups,size]<=[dims]T(order)`, and
axes of a mesh by name. All three become rows of device positions, and rows become axis names by
comparison with the mesh.
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from zero_jax.hlo_text import product


@functools.lru_cache
def size_of(text: str, num_devices: int) -> int:
    """Devices that take part together; `num_devices` if the text names none.

    Raises:
      ValueError: if the groups cannot be read.

    >>> size_of("[8,4]<=[32]", 32), size_of("mesh['a'=4,'b'=2] {'b'}", 8)
    (4, 2)
    """
    if text == "{}":
        return num_devices
    if lists := re.findall(r"\{([\d,]+)\}", text):  # {{0,1},{2,3}}
        return max(ids.count(",") + 1 for ids in lists)
    if iota := re.match(r"\[\d+,(\d+)\]<=", text):  # [groups,size]<=[4,2]T(1,0)
        return int(iota[1])
    if mesh := re.match(r"mesh\[(.*?)\].*\{(.*)\}$", text):  # mesh['a'=4,'b'=2] {'a':(2)2,'b'}
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
        return product([part or sizes[axis] for axis, part in axes])
    raise ValueError(f"cannot read these replica groups: {text}")


def axis_of(text: str, mesh: Mapping[str, int] | None) -> str:
    """The mesh axis that the groups run along.

    Args:
      text: the groups as XLA spells them.
      mesh: sizes of the mesh's axes by name, in order; None if it is not known.

    Returns:
      The name; "replica+data" for two axes together; "?" if neither the text nor the mesh says.

    >>> axis_of("{{0,2},{1,3}}", {"replica": 2, "data": 2})
    'replica'
    """
    if named := re.match(r"mesh\[.*?\].*\{(.*)\}$", text):
        return "+".join(re.findall(r"'([^']*)'", named[1])) or "?"
    if mesh is None:
        return "?"
    wanted = _rows(text, math.prod(mesh.values()))
    for count in range(1, len(mesh) + 1):
        for axes in itertools.combinations(mesh, count):
            if _same(wanted, _mesh_rows(mesh, axes)):
                return "+".join(axes)
    return "?"


def _rows(text: str, num_devices: int) -> np.ndarray:
    if text == "{}":
        return np.arange(num_devices)[None]
    if lists := re.findall(r"\{([\d,]+)\}", text):
        rows = [[int(i) for i in ids.split(",")] for ids in lists]
        return np.array(rows) if len({len(row) for row in rows}) == 1 else np.zeros((0, 0))
    iota = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota is None:
        return np.zeros((0, 0))
    ids = np.arange(int(iota[1]) * int(iota[2])).reshape([int(d) for d in iota[3].split(",")])
    if iota[4]:
        ids = ids.transpose([int(d) for d in iota[4].split(",")])
    return ids.reshape(int(iota[1]), int(iota[2]))


def _mesh_rows(mesh: Mapping[str, int], axes: tuple[str, ...]) -> np.ndarray:
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    chosen = [list(mesh).index(axis) for axis in axes]
    ids = np.moveaxis(ids, chosen, range(ids.ndim - len(chosen), ids.ndim))
    return ids.reshape(-1, math.prod(mesh[axis] for axis in axes))


def _same(rows: np.ndarray, others: np.ndarray) -> bool:
    def key(array: np.ndarray) -> list[list[int]]:
        return sorted(sorted(row) for row in array.tolist())

    return rows.shape == others.shape and key(rows) == key(others)
