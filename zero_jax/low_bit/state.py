"""Optimizer state with leaves in 8 or 16 bits.

These are the leaves with the shape of a parameter, in fp32, of at least 4096 elements. A leaf that
is computed from parameters in `init` (an average, a slow copy) is a weight, not a statistic, and
stays in fp32: the trace of `init` shows it, names do not matter.

Bytes per element: 1 in 8 bits and 2 per block of 128; 2 in bf16. `offload/host.py` updates the
state in pieces. Only blocks that span devices need communication (storage.py).
"""

import dataclasses
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax

from zero_jax.low_bit.storage import Coding, scales_split
from zero_jax.sharding import paths
from zero_jax.sharding.layout import Partition, Partitioner, mirrors, state_partitions
from zero_jax.sharding.paths import PyTree
from zero_jax.tracing.dataflow import needed
from zero_jax.tracing.jaxpr import CALLS, written_out

FP32 = "fp32"
OptimizerStateDtype = Literal["fp32", "bf16", "8bit"]
KINDS = get_args(OptimizerStateDtype)
_SMALL = 4096  # elements


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowBitState:
    """The state of a transformation with low-bit leaves.

    Attributes:
      inner: The state as the transformation has it; low-bit leaves are uint8 (8bit) or bf16.
      scales: In 8 bits, the scales of the blocks of each low-bit leaf, uint16.
      count: Number of updates.
      seeds: For each leaf of `inner` the seed of its rounding, or None if it is not low-bit. A seed
        is a hash of its parameter's path plus its position among the parameter's states, so that
        other leaves do not change its bits.
      kind: "8bit" or "bf16".
    """

    inner: PyTree
    scales: tuple[PyTree, ...]
    count: jax.Array
    seeds: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})

    @property
    def narrow(self) -> list[str]:
        """The paths of low-bit leaves.

        >>> state = initial(optax.adam(1e-3), {"w": jnp.ones((64, 64))}, "8bit")
        >>> state.narrow
        ['0/mu/w', '0/nu/w']
        """
        pairs = zip(paths.named_leaves(self.inner), self.seeds, strict=True)
        return [name for (name, _), seed in pairs if seed is not None]

    def parts(self) -> list[list[jax.Array]]:
        """Returns the array of each leaf of `inner`, with its scales if there are any."""
        scales = iter(jax.tree.leaves(self.scales))
        pairs = zip(jax.tree.leaves(self.inner), self.seeds, strict=True)
        has_scales = self.kind == "8bit"
        return [[x] if seed is None or not has_scales else [x, next(scales)] for x, seed in pairs]

    def codings(self, full: PyTree) -> list[Coding | None]:
        """Returns the storage of each leaf, or None, given `inner` with full shapes."""
        pairs = zip(jax.tree.leaves(full), self.seeds, strict=True)
        return [None if seed is None else Coding(x.shape, self.kind, seed) for x, seed in pairs]

    def in_fp32(self) -> PyTree:
        """Returns the transformation's own state in fp32; for a full state."""
        pairs = zip(self.codings(self.inner), self.parts(), strict=True)
        leaves = [
            parts[0] if coding is None else coding.decode(parts, _origin(parts[0]))
            for coding, parts in pairs
        ]
        return jax.tree.unflatten(jax.tree.structure(self.inner), leaves)

    def with_parts(self, parts: Sequence[Sequence[jax.Array]], count: jax.Array) -> "LowBitState":
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
    return state.kind if _is_low_bit(state) else FP32


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
    return state if kind == FP32 else _encoded(state, _seeds(tx, params), kind)


def _seeds(tx: optax.GradientTransformation, params: PyTree) -> tuple[int | None, ...]:
    """Returns for each leaf of a transformation's state its seed, or None if it stays in fp32."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    closed, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    closed = written_out(closed, CALLS)  # every result of a call depends on all its operands
    splits, inputs = Partitioner(1)(params), set(closed.jaxpr.invars)
    owners = mirrors(state_partitions(state, params, splits), splits)
    names = [name for name, _ in paths.named_leaves(params)]
    seeds, states = list[int | None](), Counter[int]()
    results = zip(jax.tree.leaves(state), owners, closed.jaxpr.outvars, strict=True)
    for leaf, owner, result in results:
        seed = None
        if owner is not None:
            states[owner] += 1
            large = leaf.dtype == jnp.float32 and leaf.size >= _SMALL
            if large and inputs.isdisjoint(needed(closed.jaxpr.eqns, [result])):
                seed = zlib.crc32(names[owner].encode()) + states[owner]
        seeds.append(seed)
    return tuple(seeds)


def _encoded(state: PyTree, seeds: tuple[int | None, ...], kind: str) -> LowBitState:
    """Encodes a full fp32 state that has not been updated."""
    count = jnp.zeros((), jnp.int32)
    scales = tuple(0 for seed in seeds if seed is not None and kind == "8bit")  # replaced below
    like = LowBitState(state, scales, count, seeds, kind)
    pairs = zip(like.codings(state), jax.tree.leaves(state), strict=True)
    parts = [(x,) if coding is None else coding.encode(x, _origin(x), count) for coding, x in pairs]
    return like.with_parts(parts, count)


def restated(state: PyTree, like: PyTree) -> PyTree:
    """Converts a state to the dtypes of another.

    Args:
      state: A full state, with or without `LowBitState`s.
      like: An abstract state with the wanted `LowBitState`s, or without.

    Raises:
      ValueError: They are of different transformations or of different parameters.

    >>> adam, params = optax.adam(1e-3), {"w": jnp.ones((64, 64))}
    >>> like = jax.eval_shape(lambda p: initial(adam, p, "8bit"), params)
    >>> jax.tree.structure(restated(adam.init(params), like)) == jax.tree.structure(like)
    True
    """
    plain = _in_fp32(state)
    has, needs = (
        {f"{name} {tuple(x.shape)}" for name, x in paths.named_leaves(tree)}
        for tree in (plain, jax.eval_shape(_in_fp32, like))
    )
    if has != needs:
        raise ValueError(
            "`state` is of another transformation or of other parameters: it has "
            f"{_few(has - needs)}, but this optimizer has {_few(needs - has)}. Pass the state of "
            "this transformation and these parameters"
        )

    def one(node: PyTree, tree: PyTree) -> PyTree:
        return _encoded(tree, node.seeds, node.kind) if _is_low_bit(node) else tree

    return jax.tree.map(one, like, plain, is_leaf=_is_low_bit)


def _few(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) or "nothing else"


def _in_fp32(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.in_fp32() if _is_low_bit(x) else x, state, is_leaf=_is_low_bit)


def _origin(x: jax.Array) -> tuple[int, ...]:
    return (0,) * x.ndim


def _is_low_bit(node: PyTree) -> bool:
    return isinstance(node, LowBitState)


def splits_of(state: PyTree, params: PyTree, param_splits: Sequence[Partition]) -> list[Partition]:
    """Returns the partition of each state leaf, as `state_partitions`, and of scales."""

    def with_scales(node: PyTree) -> PyTree:
        if not _is_low_bit(node) or not node.scales:
            return node
        pairs = zip(jax.tree.leaves(node.inner), node.seeds, strict=True)
        scales = tuple(scales_split(cut) for cut, seed in pairs if seed is not None)
        return dataclasses.replace(node, scales=scales)

    splits = state_partitions(state, params, param_splits)
    tree = jax.tree.unflatten(jax.tree.structure(state), splits)
    return jax.tree.leaves(jax.tree.map(with_scales, tree, is_leaf=_is_low_bit))
