"""Which devices take part in a collective together, and which mesh axis that is.

XLA writes replica groups in three ways: lists of ids, an iota `[groups,size]<=[dims]T(order)`, and
axes of a mesh by name, which may be a mesh of XLA's own (`axis_0`). All three become rows of device
positions, and rows become axis names by comparison with the mesh.
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from zero_jax.hlo.hlo_text import product


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
      The name; "replica+data" for two axes together, in the order of the mesh; "?" if neither the
      text nor the mesh says.

    >>> axis_of("{{0,2},{1,3}}", {"replica": 2, "data": 2})
    'replica'
    """
    named = re.match(r"mesh\[.*?\].*\{(.*)\}$", text)
    names = re.findall(r"'([^']*)'", named[1]) if named else []
    if mesh is None:
        return "+".join(names) or "?"
    if names and set(names) <= set(mesh):
        return "+".join(axis for axis in mesh if axis in names)
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
    if mesh := re.match(r"mesh\[(.*?)\](.*)\{(.*)\}$", text):
        return _named_rows(*mesh.groups())
    iota = re.match(r"\[(\d+),(\d+)\]<=(.*)", text)
    return _iota(iota[3]).reshape(int(iota[1]), int(iota[2])) if iota else np.zeros((0, 0))


def _iota(text: str) -> np.ndarray:
    """Ids in the order of "[4,2]T(1,0)"."""
    dims, _, order = (re.findall(r"\d+", part) for part in text.partition("T"))
    ids = np.arange(product(dims)).reshape([int(d) for d in dims])
    return ids.transpose([int(d) for d in order]) if order else ids


def _named_rows(axes: str, order: str, chosen: str) -> np.ndarray:
    """Rows of "'a'=4,'b'=2", "device_ids=([2,4]T(1,0))", "'a':(2)2,'b'" (half of a, and b)."""
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    parts = {
        axis: (int(before or 1), int(size or sizes[axis]))
        for axis, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", chosen)
    }
    ids = _iota(order.partition("=")[2] or f"[{math.prod(sizes.values())}]")
    dims = []  # of each axis: what is before the chosen part, that part, and what is after it
    for axis, size in sizes.items():
        before, mine = parts.get(axis, (size, 1))
        dims += [before, mine, size // (before * mine)]
    together = range(1, len(dims), 3)
    ids = np.moveaxis(ids.reshape(dims), together, range(-len(together), 0))
    return ids.reshape(-1, math.prod(mine for _, mine in parts.values()))


def _mesh_rows(mesh: Mapping[str, int], axes: tuple[str, ...]) -> np.ndarray:
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    chosen = [list(mesh).index(axis) for axis in axes]
    ids = np.moveaxis(ids, chosen, range(ids.ndim - len(chosen), ids.ndim))
    return ids.reshape(-1, math.prod(mesh[axis] for axis in axes))


def _same(rows: np.ndarray, others: np.ndarray) -> bool:
    def key(array: np.ndarray) -> list[list[int]]:
        return sorted(sorted(row) for row in array.tolist())

    return rows.shape == others.shape and key(rows) == key(others)
