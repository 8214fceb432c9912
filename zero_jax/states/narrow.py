"""A state some of whose leaves rest in 8 or 16 bits: made, opened, made another.

Bytes: of a leaf in 8 bits one for each element and two for each block of 128, of one in bf16 two.
It is updated in pieces (offload/update_in_pieces.py), which sends nothing but what straddling
blocks need (coded.py).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from zero_jax.sharding import paths
from zero_jax.sharding.cuts import Split, state_splits
from zero_jax.states.coded import Coding, scales_cut
from zero_jax.states.selection import Kept, selected

PyTree = Any
FP32 = "fp32"
OptimizerStateDtype = Literal["fp32", "bf16", "8bit"]
KINDS = get_args(OptimizerStateDtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NarrowState:
    """The state of a transformation in fewer bits.

    Attributes:
      inner: as the transformation has it; narrow leaves are uint8 (8bit) or bf16.
      scales: of 8 bits, of each narrow leaf the scales of its blocks, uint16.
      count: how often it was updated.
      kept: which leaves are narrow.
      kind: "8bit" or "bf16".
    """

    inner: PyTree
    scales: tuple[Any, ...]
    count: Any
    kept: tuple[Kept, ...] = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})

    @property
    def narrow(self) -> list[str]:
        """The paths of narrow leaves.

        >>> state = initial(optax.adam(1e-3), {"w": jnp.ones((64, 64))}, "8bit")
        >>> state.narrow
        ['0/mu/w', '0/nu/w']
        """
        names = [name for name, _ in paths.named_leaves(self.inner)]
        return [names[kept.at] for kept in self.kept]

    def parts(self) -> list[tuple[Any, ...]]:
        """Of each leaf of `inner` its array, and its scales if it has any."""
        positions = (kept.at for kept in self.kept)
        scales = dict(zip(positions, jax.tree.leaves(self.scales), strict=False))
        leaves = enumerate(jax.tree.leaves(self.inner))
        return [(x, scales[at]) if at in scales else (x,) for at, x in leaves]

    def codings(self, shapes: PyTree) -> list[Coding | None]:
        """How each leaf is kept; None for one that is as the transformation has it.

        Args:
          shapes: the logical `inner`.
        """
        numbers = {kept.at: kept.number for kept in self.kept}
        return [
            Coding(x.shape, self.kind, numbers[at]) if at in numbers else None
            for at, x in enumerate(jax.tree.leaves(shapes))
        ]

    def wide(self) -> PyTree:
        """The transformation's own state, in fp32; of a logical state."""
        pairs = zip(self.codings(self.inner), self.parts(), strict=True)
        opened = [
            parts[0] if how is None else how.open(parts, _whole(parts[0])) for how, parts in pairs
        ]
        return jax.tree.unflatten(jax.tree.structure(self.inner), opened)

    def with_parts(self, parts: Sequence[Sequence[Any]], count: Any) -> "NarrowState":
        """The same with other arrays, in the order of `parts`."""
        inner = jax.tree.unflatten(jax.tree.structure(self.inner), [own[0] for own in parts])
        own = [own[1] for own in parts if len(own) > 1]
        scales = jax.tree.unflatten(jax.tree.structure(self.scales), own)
        return dataclasses.replace(self, inner=inner, scales=scales, count=count)


def kind_of(state: PyTree) -> str:
    """As what a transformation's state is kept.

    >>> kind_of(optax.adam(1e-3).init({"w": jnp.ones((64, 64))}))
    'fp32'
    """
    return state.kind if _is_narrow(state) else FP32


def check_kind(kind: str) -> str:
    """Returns the optimizer state dtype.

    Raises:
      ValueError: It is unsupported.
    """
    if kind not in KINDS:
        raise ValueError(f"`optimizer_state_dtype`={kind!r}: use one of {', '.join(KINDS)}")
    return kind


def initial(tx: optax.GradientTransformation, params: PyTree, kind: str) -> PyTree:
    """The state that a transformation begins with, as it is kept.

    >>> params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    >>> state = initial(optax.adam(1e-3), params, "8bit")
    >>> state.inner[0].nu["w"].dtype, state.inner[0].nu["b"].dtype
    (dtype('uint8'), dtype('float32'))
    """
    state = tx.init(params)
    return state if kind == FP32 else narrowed(state, selected(tx, params), kind)


def narrowed(wide: PyTree, kept: tuple[Kept, ...], kind: str) -> NarrowState:
    """A transformation's own state as it is kept, not updated yet.

    Args:
      wide: the state, logical.
      kept: which leaves are kept in fewer bits.
      kind: how.
    """
    count = jnp.zeros((), jnp.int32)
    scales = (0,) * len(kept) if kind == "8bit" else ()  # until they are made
    like = NarrowState(wide, scales, count, kept, kind)
    pairs = zip(like.codings(wide), jax.tree.leaves(wide), strict=True)
    parts = [(x,) if how is None else how.close(x, _whole(x), count) for how, x in pairs]
    return like.with_parts(parts, count)


def restated(state: PyTree, like: PyTree) -> PyTree:
    """Converts a state to the dtypes of another.

    Args:
      state: A full state, with or without `NarrowState`s.
      like: An abstract state with the wanted `NarrowState`s, or without.

    Raises:
      ValueError: They are of different transformations or of different parameters.

    >>> adam, params = optax.adam(1e-3), {"w": jnp.ones((64, 64))}
    >>> like = jax.eval_shape(lambda p: initial(adam, p, "8bit"), params)
    >>> jax.tree.structure(restated(adam.init(params), like)) == jax.tree.structure(like)
    True
    """
    wide, wanted = _wide(state), jax.eval_shape(_wide, like)
    given, own = (
        {f"{name} {tuple(x.shape)}" for name, x in paths.named_leaves(tree)}
        for tree in (wide, wanted)
    )
    if given != own:
        raise ValueError(
            "`state` is of another transformation or of other parameters: it has "
            f"{_few(given - own)}, but this optimizer has {_few(own - given)}. Pass the state of "
            "this transformation and these parameters"
        )

    def one(node: Any, own: PyTree) -> PyTree:
        return narrowed(own, node.kept, node.kind) if _is_narrow(node) else own

    return jax.tree.map(one, like, wide, is_leaf=_is_narrow)


def _few(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) or "nothing else"


def _wide(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.wide() if _is_narrow(x) else x, state, is_leaf=_is_narrow)


def _whole(x: jax.Array) -> tuple[int, ...]:
    """Where a whole leaf begins."""
    return (0,) * x.ndim


def _is_narrow(node: Any) -> bool:
    return isinstance(node, NarrowState)


def cuts_of(state: PyTree, params: PyTree, param_cuts: Sequence[Split]) -> list[Split]:
    """As `state_splits`, with `NarrowState`s in it: scales are cut as their leaves are."""
    found = state_splits(state, params, param_cuts)
    at = 0
    for node in jax.tree.leaves(state, is_leaf=_is_narrow):
        if not _is_narrow(node):
            at += 1
            continue
        first, at = at, at + len(jax.tree.leaves(node.inner))
        for kept, _ in zip(node.kept, node.scales, strict=False):
            found[at] = scales_cut(found[first + kept.at])
            at += 1
        at += 1  # the counter
    return found
