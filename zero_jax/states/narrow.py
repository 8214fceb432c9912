"""A state some of whose leaves rest in 8 or 16 bits."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.jaxpr.equations import CALLS, is_var, written_out
from zero_jax.jaxpr.reads import needed
from zero_jax.names import unknown
from zero_jax.sharding import paths
from zero_jax.sharding.cuts import Split, Splitter, mirrors, state_splits
from zero_jax.states.coded import Coding, scales_cut

PyTree = Any
FP32 = "fp32"
KINDS = (FP32, "bf16", "8bit")
SMALL = 4096  # elements


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NarrowState:
    """The state of a transformation in fewer bits.

    Attributes:
      inner: as the transformation has it; narrow leaves are uint8 (8bit) or bf16.
      scales: of 8 bits, by the leaf's path, the scales of its blocks, uint16.
      count: how often it was updated.
      narrow: the paths of narrow leaves.
      kind: "8bit" or "bf16".
    """

    inner: PyTree
    scales: dict[str, Any]
    count: Any
    narrow: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})

    def parts(self) -> list[tuple[Any, ...]]:
        """Of each leaf of `inner` its array, and its scales if it has any."""
        leaves = jax.tree.leaves(self.inner)
        known = {name: jax.tree.leaves(scales) for name, scales in self.scales.items()}
        names = [name for name, _ in paths.named_leaves(self.inner)]
        return [(x, *known.get(name, ())) for name, x in zip(names, leaves, strict=True)]

    def codings(self, shapes: PyTree) -> list[Coding | None]:
        """How each leaf is kept; None for one that is as the transformation has it.

        Args:
          shapes: the logical `inner`.
        """
        number = {name: at for at, name in enumerate(self.narrow)}
        return [
            Coding(x.shape, self.kind, number[name]) if name in number else None
            for name, x in paths.named_leaves(shapes)
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
        inner = jax.tree.unflatten(jax.tree.structure(self.inner), [x for x, *_ in parts])
        names = [name for name, _ in paths.named_leaves(self.inner)]
        made = {name: own[1] for name, own in zip(names, parts, strict=True) if len(own) > 1}
        order = [made[name] for name in sorted(made)]
        scales = jax.tree.unflatten(jax.tree.structure(self.scales), order)
        return dataclasses.replace(self, inner=inner, scales=scales, count=count)


def kind_of(state: PyTree) -> str:
    """As what a transformation's state is kept.

    >>> kind_of(optax.adam(1e-3).init({"w": jnp.ones((64, 64))}))
    'fp32'
    """
    return state.kind if _is_narrow(state) else FP32


def check_kind(kind: str) -> str:
    """Returns it if states can be kept so.

    Raises:
      ValueError: naming the nearest one.
    """
    if kind not in KINDS:
        raise ValueError(unknown("states", str(kind), KINDS, "Choose one of"))
    return kind


def initial(tx: optax.GradientTransformation, params: PyTree, kind: str) -> PyTree:
    """The state that a transformation begins with, as it is kept.

    >>> params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    >>> state = initial(optax.adam(1e-3), params, "8bit")
    >>> state.inner[0].nu["w"].dtype, state.inner[0].nu["b"].dtype
    (dtype('uint8'), dtype('float32'))
    """
    state = tx.init(params)
    return state if kind == FP32 else narrowed(state, narrow_leaves(tx, params), kind)


def narrow_leaves(tx: optax.GradientTransformation, params: PyTree) -> tuple[str, ...]:
    """The paths of the leaves of a state that are kept in fewer bits: read from what they are.

    They are like a parameter, fp32, and of at least 4096 elements. What starts as the parameters
    do (averages of them, slow copies) is a weight and no statistic, and stays.

    Args:
      tx: the transformation.
      params: logical parameters, arrays or shapes.

    Raises:
      ValueError: two of them have the same path.

    >>> shapes = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
    >>> narrow_leaves(optax.adam(1e-3), shapes)
    ('0/mu/w', '0/nu/w')
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    closed, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    closed = written_out(closed, CALLS)  # a call makes all of its results of all that it is given
    cuts, own = Splitter(1)(params), set(closed.jaxpr.invars)
    owner = mirrors(state_splits(state, params, cuts), cuts)
    found = []
    known = zip(paths.named_leaves(state), owner, closed.jaxpr.outvars, strict=True)
    for (name, leaf), parameter, made in known:
        large = leaf.dtype == jnp.float32 and leaf.size >= SMALL
        weight = is_var(made) and not own.isdisjoint(needed(closed.jaxpr.eqns, [made]))
        if parameter is not None and large and not weight:
            found.append(name)
    _check_names(state, found)
    return tuple(found)


def _check_names(state: PyTree, narrow: Sequence[str]) -> None:
    """Raises where scales, which are kept by their leaf's path, would be those of two."""
    times = Counter(name for name, _ in paths.named_leaves(state))
    for name in narrow:
        if times[name] > 1:
            raise ValueError(f"two leaves are called {name!r}: give them paths of their own")


def narrowed(wide: PyTree, narrow: tuple[str, ...], kind: str) -> NarrowState:
    """A transformation's own state as it is kept, not updated yet.

    Args:
      wide: the state, logical.
      narrow: which leaves are kept in fewer bits, by path.
      kind: how.
    """
    count = jnp.zeros((), jnp.int32)
    like = NarrowState(
        wide, dict.fromkeys(narrow if kind == "8bit" else (), 0), count, narrow, kind
    )
    pairs = zip(like.codings(wide), jax.tree.leaves(wide), strict=True)
    parts = [(x,) if how is None else how.close(x, _whole(x), count) for how, x in pairs]
    return like.with_parts(parts, count)


def restated(state: PyTree, like: PyTree) -> PyTree:
    """A state as it is kept elsewhere, with the same numbers.

    Args:
      state: logical, with `NarrowState`s in it, or without.
      like: with `NarrowState`s where they are to be, or without; abstract.

    >>> adam, params = optax.adam(1e-3), {"w": jnp.ones((64, 64))}
    >>> like = jax.eval_shape(lambda p: initial(adam, p, "8bit"), params)
    >>> jax.tree.structure(restated(adam.init(params), like)) == jax.tree.structure(like)
    True
    """
    wide = jax.tree.map(lambda x: x.wide() if _is_narrow(x) else x, state, is_leaf=_is_narrow)

    def one(node: Any, own: PyTree) -> PyTree:
        return narrowed(own, node.narrow, node.kind) if _is_narrow(node) else own

    return jax.tree.map(one, like, wide, is_leaf=_is_narrow)


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
        names = [name for name, _ in paths.named_leaves(node.inner)]
        cuts = dict(zip(names, found[at:], strict=False))
        at += len(names)
        for name in sorted(node.scales):
            found[at] = scales_cut(cuts[name])
            at += 1
        at += 1  # the counter
    return found
