"""Optimizer state with leaves in 8 or 16 bits.

Narrow are the leaves with the shape of a parameter, in fp32, of at least 4096 elements. A leaf that
is computed from parameters in `init` (an average, a slow copy) is a weight, not a statistic, and
stays in fp32: the trace of `init` shows it, names do not matter.

Bytes per element: 1 in 8 bits and 2 per block of 128; 2 in bf16. `offload/streaming.py` updates the
state in pieces. Only blocks that span devices need communication (storage.py).
"""

import dataclasses
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from zero_jax.low_bit.storage import Coding, scales_split
from zero_jax.sharding import paths
from zero_jax.sharding.partition import Partition, Partitioner, mirrors, state_partitions
from zero_jax.tracing.dataflow import needed
from zero_jax.tracing.jaxpr import CALLS, is_var, written_out

PyTree = Any
FP32 = "fp32"
OptimizerStateDtype = Literal["fp32", "bf16", "8bit"]
KINDS = get_args(OptimizerStateDtype)
_SMALL = 4096  # elements


class NarrowLeaf(NamedTuple):
    """A state leaf in 8 or 16 bits.

    Attributes:
      at: Its position in the state.
      number: Decides its rounding: a hash of its parameter's path plus its position among the
        parameter's states, so that other leaves do not change its bits.
    """

    at: int
    number: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NarrowState:
    """The state of a transformation with narrow leaves.

    Attributes:
      inner: The state as the transformation has it; narrow leaves are uint8 (8bit) or bf16.
      scales: In 8 bits, the scales of the blocks of each narrow leaf, uint16.
      count: Number of updates.
      leaves: The narrow leaves.
      kind: "8bit" or "bf16".
    """

    inner: PyTree
    scales: tuple[Any, ...]
    count: Any
    leaves: tuple[NarrowLeaf, ...] = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})

    @property
    def narrow(self) -> list[str]:
        """The paths of narrow leaves.

        >>> state = initial(optax.adam(1e-3), {"w": jnp.ones((64, 64))}, "8bit")
        >>> state.narrow
        ['0/mu/w', '0/nu/w']
        """
        names = [name for name, _ in paths.named_leaves(self.inner)]
        return [names[leaf.at] for leaf in self.leaves]

    def parts(self) -> list[tuple[Any, ...]]:
        """Returns the array of each leaf of `inner`, with its scales if there are any."""
        positions = (leaf.at for leaf in self.leaves)
        scales = dict(zip(positions, jax.tree.leaves(self.scales), strict=False))
        leaves = enumerate(jax.tree.leaves(self.inner))
        return [(x, scales[at]) if at in scales else (x,) for at, x in leaves]

    def codings(self, full: PyTree) -> list[Coding | None]:
        """Returns the storage of each leaf, or None, given `inner` with full shapes."""
        numbers = {leaf.at: leaf.number for leaf in self.leaves}
        return [
            Coding(x.shape, self.kind, numbers[at]) if at in numbers else None
            for at, x in enumerate(jax.tree.leaves(full))
        ]

    def wide(self) -> PyTree:
        """Returns the transformation's own state in fp32; for a full state."""
        pairs = zip(self.codings(self.inner), self.parts(), strict=True)
        decoded = [
            parts[0] if coding is None else coding.decode(parts, _origin(parts[0]))
            for coding, parts in pairs
        ]
        return jax.tree.unflatten(jax.tree.structure(self.inner), decoded)

    def with_parts(self, parts: Sequence[Sequence[Any]], count: Any) -> "NarrowState":
        """Returns the state with other arrays, in the order of `parts`."""
        inner = jax.tree.unflatten(jax.tree.structure(self.inner), [leaf[0] for leaf in parts])
        scales = [leaf[1] for leaf in parts if len(leaf) > 1]
        scales = jax.tree.unflatten(jax.tree.structure(self.scales), scales)
        return dataclasses.replace(self, inner=inner, scales=scales, count=count)


def kind_of(state: PyTree) -> str:
    """Returns the dtype of a transformation's state, one of `KINDS`.

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
    """Returns the initial state of a transformation in a dtype.

    >>> params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    >>> state = initial(optax.adam(1e-3), params, "8bit")
    >>> state.inner[0].nu["w"].dtype, state.inner[0].nu["b"].dtype
    (dtype('uint8'), dtype('float32'))
    """
    state = tx.init(params)
    return state if kind == FP32 else _narrowed(state, _narrow_leaves(tx, params), kind)


def _narrow_leaves(tx: optax.GradientTransformation, params: PyTree) -> tuple[NarrowLeaf, ...]:
    """Returns the leaves of a transformation's state that are stored narrow."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    closed, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    closed = written_out(closed, CALLS)  # every result of a call depends on all its operands
    splits, inputs = Partitioner(1)(params), set(closed.jaxpr.invars)
    owners = mirrors(state_partitions(state, params, splits), splits)
    names = [name for name, _ in paths.named_leaves(params)]
    leaves, states = [], Counter[int]()
    known = zip(jax.tree.leaves(state), owners, closed.jaxpr.outvars, strict=True)
    for at, (leaf, owner, result) in enumerate(known):
        if owner is None:
            continue
        states[owner] += 1
        large = leaf.dtype == jnp.float32 and leaf.size >= _SMALL
        weight = is_var(result) and not inputs.isdisjoint(needed(closed.jaxpr.eqns, [result]))
        if large and not weight:
            leaves.append(NarrowLeaf(at, zlib.crc32(names[owner].encode()) + states[owner]))
    return tuple(leaves)


def _narrowed(wide: PyTree, leaves: tuple[NarrowLeaf, ...], kind: str) -> NarrowState:
    """Encodes a full fp32 state that has not been updated."""
    count = jnp.zeros((), jnp.int32)
    scales = (0,) * len(leaves) if kind == "8bit" else ()  # replaced below
    like = NarrowState(wide, scales, count, leaves, kind)
    pairs = zip(like.codings(wide), jax.tree.leaves(wide), strict=True)
    parts = [(x,) if coding is None else coding.encode(x, _origin(x), count) for coding, x in pairs]
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
    has, needs = (
        {f"{name} {tuple(x.shape)}" for name, x in paths.named_leaves(tree)}
        for tree in (wide, wanted)
    )
    if has != needs:
        raise ValueError(
            "`state` is of another transformation or of other parameters: it has "
            f"{_few(has - needs)}, but this optimizer has {_few(needs - has)}. Pass the state of "
            "this transformation and these parameters"
        )

    def one(node: Any, tree: PyTree) -> PyTree:
        return _narrowed(tree, node.leaves, node.kind) if _is_narrow(node) else tree

    return jax.tree.map(one, like, wide, is_leaf=_is_narrow)


def _few(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) or "nothing else"


def _wide(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.wide() if _is_narrow(x) else x, state, is_leaf=_is_narrow)


def _origin(x: jax.Array) -> tuple[int, ...]:
    return (0,) * x.ndim


def _is_narrow(node: Any) -> bool:
    return isinstance(node, NarrowState)


def splits_of(state: PyTree, params: PyTree, param_splits: Sequence[Partition]) -> list[Partition]:
    """Returns the partition of each state leaf, as `state_partitions`, and of scales."""
    splits = state_partitions(state, params, param_splits)
    at = 0
    for node in jax.tree.leaves(state, is_leaf=_is_narrow):
        if not _is_narrow(node):
            at += 1
            continue
        first, at = at, at + len(jax.tree.leaves(node.inner))
        for leaf, _ in zip(node.leaves, node.scales, strict=False):
            splits[at] = scales_split(splits[first + leaf.at])
            at += 1
        at += 1  # the counter
    return splits
