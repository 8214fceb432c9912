"""Leaves by name: paths like 'blocks/attn/kernel', patterns for them, and frozen leaves.

A path leaves out the nodes that only wrap one array: stored `Padded` leaves, NNX variables and
the boxes of linen's own metadata.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

PyTree = Any
_Path = tuple[object, ...]
Frozen = str | Callable[[str], bool] | None  # a pattern or a predicate of paths


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Padded:
    """A stored leaf whose sharded dim was padded with zeros up to a multiple of N.

    Attributes:
      value: The stored array, padding included.
      dim: The padded dim, counted from the end.
      size: Its size without padding.
    """

    value: PyTree
    dim: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        shape = list(self.value.shape)
        shape[self.dim] = self.size
        return tuple(shape)

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or name in ("value", "dim", "size"):
            raise AttributeError(name)
        raise AttributeError(f"{name!r} of {self._said()}")

    def _refused(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(self._said())

    __getitem__ = __iter__ = __array__ = __jax_array__ = __neg__ = __pow__ = _refused
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refused

    def _said(self) -> str:
        return (
            f"a sharded parameter of shape {self.shape}, padded to {tuple(self.value.shape)} so "
            "that all devices store equal parts: zero_jax.unpad(tree) removes the padding, and "
            "zero.unshard(params) makes full arrays. A loss gets full parameters"
        )


def _is_wrapper(node: object) -> bool:
    return isinstance(node, (Padded, nnx.Variable, meta.AxisMetadata))


def named_leaves(tree: PyTree) -> list[tuple[str, PyTree]]:
    """Returns (path, leaf) of every leaf, in tree order; patterns match these paths.

    Nodes that wrap a single array (`Padded`, NNX variables, linen boxes) are not part of a path.
    """
    return [(path_name(path), leaf) for path, leaf in _unwrapped(tree, ())]


def path_name(path: _Path) -> str:
    """Returns the keys of a path with slashes between them."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _unwrapped(tree: PyTree, prefix: _Path) -> Iterator[tuple[_Path, PyTree]]:
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_wrapper)[0]:
        path = (*prefix, *path)
        if not _is_wrapper(node):
            yield path, node
            continue
        # One level: every child of the node is a leaf.
        inside = jax.tree_util.tree_flatten_with_path(node, lambda x, node=node: x is not node)[0]
        for key, child in inside:
            yield from _unwrapped(child, path if len(inside) == 1 else (*path, *key))


def matches(pattern: str, names: Sequence[str], what: str) -> list[bool]:
    """Returns True for each name that matches a pattern; raises ValueError if none does."""
    try:
        found = [re.search(pattern, name) is not None for name in names]
    except re.error as error:
        raise ValueError(f"`{what}`={pattern!r} is not a regular expression: {error}") from error
    if not any(found):
        raise ValueError(
            f"`{what}`={pattern!r} matches none of the {len(names)} parameters, among them "
            f"{', '.join(names[:5])}: correct the pattern"
        )
    return found


def frozen_leaves(tree: PyTree, frozen: Frozen) -> list[bool]:
    """Returns True for each leaf that is not trained: its path matches, or it is not a float."""
    leaves = named_leaves(tree)
    names = [name for name, _ in leaves]
    if isinstance(frozen, str):
        matched = matches(frozen, names, "frozen")
    else:
        matched = [frozen is not None and bool(frozen(name)) for name in names]
    pairs = zip(leaves, matched, strict=True)
    return [hit or not jnp.issubdtype(x.dtype, jnp.floating) for (_, x), hit in pairs]


def trained_part(tree: PyTree, frozen: Frozen) -> float:
    """Returns the trained fraction of the elements of a full tree; 1.0 if it is empty.

    >>> trained_part({"base": jnp.ones(3), "lora": jnp.ones(1)}, "base")
    0.25
    """
    leaves = jax.tree.leaves(tree)
    pairs = zip(leaves, frozen_leaves(tree, frozen), strict=True)
    trained, total = sum(x.size for x, still in pairs if not still), sum(x.size for x in leaves)
    return trained / total if total else 1.0
