"""Partition of each leaf: which dim is sharded, over which mesh axes, in pieces of which shape.

A leaf keeps its logical shape and is sharded along one dim, chosen by a pure function of its
shape: the first dim that N divides, because contiguous shards gather without transposes;
otherwise the dim that wastes least when padded. A leaf with fewer than N elements is replicated.
Dim 0 of a leaf of rank 3 or more may count layers that a loop slices one by one. It is sharded
only where every other dim would waste twice as much. The same holds for dim 0 of a matrix that is
sixteen times shorter than the other. A stack that is sharded along dim 0 is gathered before its
loop. A dim that tensor parallelism splits over `model` is never sharded over `data`, see
model_axis.py.

Stored: ceil(d/N)/d of a leaf's bytes per device, d being the size of the sharded dim.
Source: ZeRO (arXiv:1910.02054), section 5; per-leaf instead of flattened buffers.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zero_jax.sharding.mesh import DATA, EXPERTS, MODEL, REPLICA, Axis, names
from zero_jax.sharding.model_axis import LeafDims, ModelAxis, named_dims
from zero_jax.sharding.paths import PyTree

# When dim 0 may count layers: its maximum in a matrix, and how many times shorter than dim 1 it is
# there. It is sharded if the padding of every other dim wastes that many times more.
_LAYERS, _SHORTER, _WASTE = 256, 16, 2


@dataclasses.dataclass(frozen=True)
class Partition:
    """The partition of one leaf.

    Attributes:
      shape: The logical shape.
      dim: The sharded dim, counted from the end (so that it survives a scan that slices off the
        layer dim), or None for a replicated leaf.
      shards: N, the number of shards.
      stacked: True if a loop of the model slices dim 0; known from the trace only, see
        `engine/param_plan.py`.
      model: The dim that is split over `model`, counted from the end, or None.
      model_shards: MP, the size of that axis.
      parts: R if a stored shard is split further, over `replica`; a step joins its parts first.
      axis: The mesh axis, or axes, that shards are spread over.
      experts: The dim that counts experts, counted from the end, or None. Experts are split over
        `experts` and never gathered over it.
      expert_shards: The size of that axis.
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
        """Logical size of the sharded dim; 0 for a replicated leaf."""
        return 0 if self.dim is None else self.shape[self.dim]

    @property
    def shard_size(self) -> int:
        """Size of that dim in one of N shards, padding included."""
        return -(-self.size // (self.shards * self.parts)) * self.parts

    @property
    def layer_rank(self) -> int:
        """Number of dims within one layer."""
        return len(self.shape) - self.stacked

    @property
    def by_layer(self) -> bool:
        """True if its shards can be gathered layer by layer."""
        return self.stacked and self.dim is not None and self.dim != -len(self.shape)

    @property
    def padded(self) -> bool:
        """True if N does not divide the sharded dim."""
        return self.shard_size * self.shards != self.size

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Global stored shape, padding included."""
        return self._shape(self.shard_size * self.shards)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one of N shards, as in `shard_map` over `data`."""
        return self._shape(self.shard_size, (self.experts, self.expert_shards))

    @property
    def device_shape(self) -> tuple[int, ...]:
        """Shape that one device stores: the shard, split over `replica` and `model`."""
        experts, model = (self.experts, self.expert_shards), (self.model, self.model_shards)
        return self._shape(self.shard_size // self.parts, experts, model)

    def _shape(self, size: int, *split: tuple[int | None, int]) -> tuple[int, ...]:
        """Returns the shape with that size of the sharded dim, and other dims split in parts."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] = size
        for dim, parts in split:
            if dim is not None:
                shape[dim] //= parts
        return tuple(shape)

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec without `model`, for `shard_map`."""
        return self._spec({})

    @property
    def stored_spec(self) -> PartitionSpec:
        """The partition spec over all axes."""
        return self._spec({self.model: MODEL})

    def _spec(self, axes: dict[int | None, Axis]) -> PartitionSpec:
        # Parts of one shard follow each other.
        data = self.axis if self.parts == 1 else (*names(self.axis), REPLICA)
        axes = axes | {self.dim: data, self.experts: EXPERTS}
        last = max((d % len(self.shape) for d in axes if d is not None), default=-1)
        return PartitionSpec(*(axes.get(d - len(self.shape)) for d in range(last + 1)))


def partition(shape: Sequence[int], shards: int, *, parts: int = 1, axis: Axis = DATA) -> Partition:
    """Returns the partition of a leaf of this shape; see `Partition` for the arguments.

    >>> partition((10, 8), 4).dim, partition((10, 7), 4).dim, partition((3,), 4).dim
    (-1, -1, None)
    >>> partition((12, 64, 64), 4).shard_shape, partition((12, 512), 4).shard_shape
    ((12, 16, 64), (12, 128))
    >>> partition((4096, 32, 128), 256).shard_shape
    (16, 32, 128)
    """
    return with_dim(Partition(tuple(shape), None, shards, parts=parts, axis=axis))


def with_dim(cut: Partition, first: int = 0) -> Partition:
    """Chooses the dim along which a leaf is sharded.

    Args:
      cut: The partition, with `dim` None. The dims `model` and `experts` are not sharded too. But
        if the others have fewer than N elements (a bias), `data` takes the dim of `model`.
      first: The first dim that may be sharded: 1 if the model's own names say that dim 0 stacks
        layers.

    Returns:
      The partition. `dim` is None if there are fewer than N·R elements to distribute.
    """
    shape, pieces = cut.shape, cut.shards * cut.parts
    dims = [d for d in range(first - len(shape), 0) if d != cut.experts]
    others = [d for d in dims if d != cut.model]
    if math.prod(shape[d] for d in others) >= pieces:
        dims = others
    else:
        cut = dataclasses.replace(cut, model=None)
    if pieces == 1 or math.prod(shape[d] for d in dims) < pieces:
        return cut

    def waste(d: int) -> float:
        return -(-shape[d] // pieces) * pieces / max(shape[d], 1)

    layers = -len(shape)  # dim 0
    inner = [d for d in dims if d != layers]
    may_stack = layers in dims and inner and _may_stack(shape)
    if may_stack and min(map(waste, inner)) < _WASTE * waste(layers):
        dims = inner
    exact = [d for d in dims if shape[d] % pieces == 0]
    dim = exact[0] if exact else min(dims, key=waste)
    return dataclasses.replace(cut, dim=dim)


def _may_stack(shape: tuple[int, ...]) -> bool:
    """Returns True if dim 0 may count layers."""
    few = len(shape) == 2 and shape[0] <= _LAYERS and _SHORTER * shape[0] <= shape[1]
    return few or len(shape) > 2


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """Makes the partition of every leaf of a logical tree, in tree order.

    Attributes:
      shards: N, the number of shards of a leaf.
      model: How leaves are split over `model`.
      parts: R, the number of parts that a stored shard is split into.
      axis: The mesh axis, or axes, that shards are spread over.
      experts: The size of the `experts` axis.

    >>> shapes = {"w": jax.ShapeDtypeStruct((6, 4), "float32")}
    >>> Partitioner(4)(shapes)[0].shard_shape
    (6, 1)
    """

    shards: int
    model: ModelAxis = ModelAxis()
    parts: int = 1
    axis: Axis = DATA
    experts: int = 1

    def __call__(self, tree: PyTree) -> list[Partition]:
        leaves = named_dims(tree, named=self.experts > 1 or self.model.size > 1)
        result = []
        for leaf, model in zip(leaves, self.model.dims(leaves), strict=True):
            experts = self._expert_dim(leaf, model)
            groups = 1 if experts is None else self.experts
            cut = Partition(
                leaf.shape,
                None,
                max(1, self.shards // groups),
                model=model,
                model_shards=self.model.size,
                parts=self.parts,
                axis=self.axis if experts is None else names(self.axis)[-1],
                experts=experts,
                expert_shards=groups,
            )
            result.append(with_dim(cut, first=int(leaf.stacked and self.model.size > 1)))
        if self.experts > 1 and leaves and all(cut.experts is None for cut in result):
            raise ValueError(
                f"`mesh` has an experts axis of {self.experts}, but no parameter has a dim named "
                "'experts'. Name the dims in the model, nnx.with_partitioning(init, ('experts', "
                "None, None)), or use a mesh with experts=1"
            )
        self.model.check_split([cut.model for cut in result])
        return result

    def _expert_dim(self, leaf: LeafDims, model: int | None) -> int | None:
        """Returns the dim named "experts", counted from the end, or None.

        Raises:
          ValueError: The groups of devices do not divide it, or it is sharded over `model`.
        """
        if self.experts == 1 or EXPERTS not in leaf.names:
            return None
        where = f"{leaf.path} {leaf.shape}"
        if len(leaf.names) != len(leaf.shape):
            raise ValueError(
                f"{where} has names for {len(leaf.names)} dims, {leaf.names}, and 'experts' is one "
                "of them: give each dim a name or None"
            )
        dim = leaf.names.index(EXPERTS) - len(leaf.names)
        experts = leaf.shape[dim]
        if experts % self.experts:
            fit = [str(n) for n in range(2, experts + 1) if experts % n == 0]
            raise ValueError(
                f"{where} has {experts} experts, which an experts axis of {self.experts} does not "
                f"divide: make the mesh with experts={' or '.join(fit)}"
            )
        if dim == model:
            raise ValueError(
                f"{where} has one dim for both the experts and the model axis: name two dims, or "
                "use a mesh without one of these axes"
            )
        return dim


def mirrors(state: Sequence[Partition], params: Sequence[Partition]) -> list[int | None]:
    """Returns the position of the parameter that each leaf of a state mirrors, or None."""
    # state_partitions returns the Partition of a mirrored parameter itself, so identity tells.
    positions = {id(one): at for at, one in enumerate(params)}
    return [positions.get(id(one)) for one in state]


def state_partitions(
    state: PyTree, params: PyTree, partitions: Sequence[Partition]
) -> list[Partition]:
    """Returns partitions of an optimizer state: a leaf that mirrors a parameter has that of it.

    A state leaf mirrors a parameter if its path ends with the parameter's path and the shapes
    agree (moments, accumulators, averages). All others (factored moments, counters) depend on
    their shape alone, so the state needs no table of its own.
    """
    like = next((one for one in partitions if one.experts is None), Partition((), None, 1))
    keys = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    known = dict(zip(keys, partitions, strict=True))
    result = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        tails = (jax.tree_util.keystr(path[i:]) for i in range(len(path) + 1))
        mirrored = next((known[t] for t in tails if t in known), None)
        if mirrored is not None and mirrored.shape == tuple(leaf.shape):
            result.append(mirrored)
        elif jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            result.append(Partition(leaf.shape, None, 1))
        else:
            result.append(partition(leaf.shape, like.shards, parts=like.parts, axis=like.axis))
    return result
