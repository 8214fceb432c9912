"""Where each leaf is cut: the one table everything else is derived from.

A leaf keeps its logical shape and is split along one dim, chosen by a pure function of its
shape: the first dim that N divides, because contiguous shards gather without transposes;
otherwise the dim that wastes least when padded. A leaf with fewer than N elements stays whole.
Dim 0 of a leaf of rank 3 or more may count layers that a loop takes one by one, so it is cut only
where every other dim would waste twice as much; nor is a dim 0 of a matrix that is sixteen times
shorter than the other. A stack that is cut along dim 0 all the same is gathered before its loop.
A dim that tensor parallelism splits over `model` is never the one that is cut, see model_axis.py.

Cost at rest: ceil(d/N)/d of a leaf's bytes per device, d being the dim it is split along.
Source: ZeRO (arXiv:1910.02054), section 5; per-leaf instead of flattened buffers.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.sharding.expert_axis import ExpertAxis
from zero_jax.sharding.mesh import DATA, EXPERTS, MODEL, REPLICA, Axis, names
from zero_jax.sharding.model_axis import ModelAxis

PyTree = Any
# Where dim 0 may count layers: how long it is at most where there is one dim more, how much shorter
# than that, and how much more than by cutting it would be wasted otherwise for it to be cut still.
_LAYERS, _SHORTER, _WASTE = 256, 16, 2


@dataclasses.dataclass(frozen=True)
class Split:
    """Where one leaf is cut.

    Attributes:
      shape: the logical shape.
      dim: the dim that is cut, counted from the end (so that it survives a scan that slices
        off the layer dim), or None for a leaf that stays whole on every device.
      shards: N, the number of pieces.
      stacked: whether a loop of the model takes it slice by slice along dim 0; known from the trace
        only, see `engine/reading.py`.
      model: the dim that is split over `model`, counted from the end, or None.
      model_shards: MP, the size of that axis.
      parts: R if a piece is cut further at rest, over `replica`; a step joins its parts first.
      axis: the mesh axis, or axes, that pieces are spread over.
      experts: the dim that counts experts, which are split over `experts` and never gathered over
        it, counted from the end; or None.
      expert_shards: the size of that axis.
    """

    shape: tuple[int, ...]
    dim: int | None
    shards: int
    stacked: bool = False
    model: int | None = None
    model_shards: int = 1
    parts: int = 1
    axis: Axis = DATA
    experts: int | None = None
    expert_shards: int = 1

    @property
    def size(self) -> int:
        """Logical size of the dim that is cut; 0 for a whole leaf."""
        return 0 if self.dim is None else self.shape[self.dim]

    @property
    def shard_size(self) -> int:
        """Size of that dim of one of N pieces, padding included."""
        return -(-self.size // (self.shards * self.parts)) * self.parts

    @property
    def layer_rank(self) -> int:
        """Number of dims within one layer."""
        return len(self.shape) - self.stacked

    @property
    def by_layer(self) -> bool:
        """Whether its shards can be gathered layer by layer."""
        return self.stacked and self.dim is not None and self.dim != -len(self.shape)

    @property
    def padded(self) -> bool:
        """Whether N does not divide the dim that is cut."""
        return self.shard_size * self.shards != self.size

    def _with_size(self, size: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        at = self.dim % len(self.shape)
        return (*self.shape[:at], size, *self.shape[at + 1 :])

    @property
    def rest_shape(self) -> tuple[int, ...]:
        """Global shape at rest, padding included."""
        return self._with_size(self.shard_size * self.shards)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one of N pieces: what `shard_map` over `data` sees."""
        shape = list(self._with_size(self.shard_size))
        if self.experts is not None:
            shape[self.experts] //= self.expert_shards
        return tuple(shape)

    @property
    def device_shape(self) -> tuple[int, ...]:
        """Shape of what one device holds at rest: the piece, split over `replica` and `model`."""
        shape = list(self.shard_shape)
        if self.dim is not None:
            shape[self.dim] //= self.parts
        if self.model is not None:
            shape[self.model] //= self.model_shards
        return tuple(shape)

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec without `model`, for `shard_map`."""
        return self._spec({self.dim: self._axes, self.experts: EXPERTS})

    @property
    def spec_at_rest(self) -> PartitionSpec:
        """The partition spec over all axes."""
        axes = {self.model: MODEL, self.dim: self._axes, self.experts: EXPERTS}
        return self._spec(axes)

    @property
    def _axes(self) -> Any:
        """The axes of the dim that is cut: parts of one piece follow each other."""
        return self.axis if self.parts == 1 else (*names(self.axis), REPLICA)

    def _spec(self, axes: dict[int | None, Any]) -> PartitionSpec:
        last = max((d % len(self.shape) for d in axes if d is not None), default=-1)
        return PartitionSpec(*(axes.get(d - len(self.shape)) for d in range(last + 1)))


def split(
    shape: Sequence[int],
    shards: int,
    *,
    first: int = 0,
    model: int | None = None,
    model_shards: int = 1,
    parts: int = 1,
    axis: Axis = DATA,
    experts: int | None = None,
    expert_shards: int = 1,
) -> Split:
    """Chooses the dim along which a leaf is cut.

    Args:
      shape: the logical shape.
      shards: N, the number of pieces.
      first: the first dim that may be cut: 1 where the model's own names say that dim 0 stacks
        layers.
      model: the dim that is split over `model`, counted from the end; never cut either. Where the
        other dims have fewer than N elements (a bias), `data` takes this dim and `model` none.
      model_shards: MP.
      parts: R, into how many parts a piece is cut at rest.
      axis: the mesh axis, or axes, that pieces are spread over.
      experts: the dim that counts experts, counted from the end; never cut either.
      expert_shards: over how many groups of devices they are split.

    Returns:
      The split. `dim` is None where there are fewer than N·R elements to hand out.

    >>> split((10, 8), 4).dim, split((10, 7), 4).dim, split((3,), 4).dim
    (-1, -1, None)
    >>> split((12, 64, 64), 4).shard_shape, split((12, 512), 4).shard_shape
    ((12, 16, 64), (12, 128))
    >>> split((4096, 32, 128), 256).shard_shape
    (16, 32, 128)
    """
    shape = tuple(shape)
    dims = [d for d in range(first, len(shape)) if d - len(shape) not in (model, experts)]
    pieces = shards * parts
    enough = math.prod(shape[d] for d in dims) >= pieces
    if model is not None and not enough:
        return split(
            *(shape, shards),
            first=first,
            model_shards=model_shards,
            parts=parts,
            axis=axis,
            experts=experts,
            expert_shards=expert_shards,
        )
    rest = (shards, False, model, model_shards, parts, axis, experts, expert_shards)
    if pieces == 1 or not enough:
        return Split(shape, None, *rest)

    def waste(d: int) -> float:
        return -(-shape[d] // pieces) * pieces / max(shape[d], 1)

    others = [d for d in dims if d > 0]
    if 0 in dims and others and _may_stack(shape) and min(map(waste, others)) < _WASTE * waste(0):
        dims = others
    exact = [d for d in dims if shape[d] % pieces == 0]
    dim = exact[0] if exact else min(dims, key=waste)
    return Split(shape, dim - len(shape), *rest)


def _may_stack(shape: tuple[int, ...]) -> bool:
    """Whether dim 0 may count layers."""
    few = len(shape) == 2 and shape[0] <= _LAYERS and _SHORTER * shape[0] <= shape[1]
    return few or len(shape) > 2


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Makes the split of every leaf of a logical tree, in tree order.

    Attributes:
      shards: N, into how many pieces a leaf is cut.
      model: how leaves are split over `model`.
      parts: R, into how many parts a piece is cut at rest.
      axis: the mesh axis, or axes, that pieces are spread over.
      experts: which dim counts experts, for those that are split over `experts`.

    >>> shapes = {"w": jax.ShapeDtypeStruct((6, 4), "float32")}
    >>> Splitter(4)(shapes)[0].shard_shape
    (6, 1)
    """

    shards: int
    model: ModelAxis = ModelAxis()
    parts: int = 1
    axis: Axis = DATA
    experts: ExpertAxis = ExpertAxis()

    def __call__(self, tree: PyTree) -> list[Split]:
        dims = self.model.dims(tree)
        known = zip(
            *(jax.tree.leaves(tree), dims, self.model.stacks(tree)),
            self.experts.dims(tree, dims),
            strict=True,
        )
        cuts = [
            split(
                x.shape,
                self.shards if experts is None else max(1, self.shards // self.experts.size),
                first=int(stack),
                model=dim,
                model_shards=self.model.size,
                parts=self.parts,
                axis=self.axis if experts is None else names(self.axis)[-1],
                experts=experts,
                expert_shards=1 if experts is None else self.experts.size,
            )
            for x, dim, stack, experts in known
        ]
        self.model.check_split([cut.model for cut in cuts])
        return cuts


def mirrors(state_splits: Sequence[Split], param_splits: Sequence[Split]) -> list[int | None]:
    """For each leaf of a state, which parameter it mirrors."""
    # state_splits hands out a mirrored parameter's own Split, so identity tells.
    index = {id(cut): at for at, cut in enumerate(param_splits)}
    return [index.get(id(cut)) for cut in state_splits]


def state_splits(state: PyTree, params: PyTree, param_splits: Sequence[Split]) -> list[Split]:
    """Splits of an optimizer state: a leaf that mirrors a parameter is cut like it.

    A state leaf mirrors a parameter when its path ends with the parameter's path and the shapes
    agree (moments, accumulators, averages). All others (factored moments, counters) follow
    `split` alone, so the state needs no table of its own.
    """
    like = next((cut for cut in param_splits if cut.experts is None), Split((), None, 1))
    keys = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    known = dict(zip(keys, param_splits, strict=True))
    out = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        tails = (jax.tree_util.keystr(path[i:]) for i in range(len(path) + 1))
        mirrored = next((known[t] for t in tails if t in known), None)
        if mirrored is not None and mirrored.shape == tuple(leaf.shape):
            out.append(mirrored)
        else:
            whole = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            own = split(leaf.shape, like.shards, parts=like.parts, axis=like.axis)
            out.append(split(leaf.shape, 1) if whole else own)
    return out
