"""Layout of sharded trees: which dim of each leaf is sharded, padding, placement.

A leaf keeps its logical shape and is sharded along one dim, chosen by a pure function of its
shape: the first dim that N divides, because contiguous shards gather without transposes;
otherwise the dim that wastes least when padded. A leaf with fewer than N elements is replicated.
Dim 0 of a leaf of rank 3 or more may count layers that a loop slices one by one. It is sharded
only where every other dim would waste twice as much. The same holds for dim 0 of a matrix that is
sixteen times shorter than the other. A stack that is sharded along dim 0 is gathered before its
loop. A dim that tensor parallelism splits over `model` is never sharded over `data`, see
named_dims.py.

Only stored arrays are padded, as a `Padded` node that has its unpadded size. The model, the
optimizer, norms and checkpoints use unpadded shapes.

Stored: ceil(d/N)/d of a leaf's bytes per device, d being the size of the sharded dim.
Source: ZeRO (arXiv:1910.02054), section 5; per-leaf instead of flattened buffers.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.sharding import named_dims
from zero_jax.sharding.mesh import DATA, EXPERTS, MODEL, REPLICA, AnyMesh, Axis, names
from zero_jax.sharding.named_dims import LeafDims, ModelAxis
from zero_jax.sharding.paths import Padded, PyTree

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
        return self._divided({})

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one of N shards, as in `shard_map` over `data`."""
        return self._divided({self.dim: self.shards, self.experts: self.expert_shards})

    @property
    def device_shape(self) -> tuple[int, ...]:
        """Shape that one device stores: the shard, split over `replica` and `model`."""
        shards = {self.dim: self.shards * self.parts, self.model: self.model_shards}
        return self._divided(shards | {self.experts: self.expert_shards})

    def _divided(self, shards: dict[int | None, int]) -> tuple[int, ...]:
        """Returns the stored shape, with some dims split in a number of shards."""
        shape = dict(enumerate(self.shape, -len(self.shape)))
        if self.dim is not None:
            shape[self.dim] = self.shard_size * self.shards
        return tuple(size // shards.get(dim, 1) for dim, size in shape.items())

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
    stack = len(shape) > 2 or (shape[0] <= _LAYERS and _SHORTER * shape[0] <= shape[-1])
    if layers in dims and inner and stack and min(map(waste, inner)) < _WASTE * waste(layers):
        dims = inner
    exact = [d for d in dims if shape[d] % pieces == 0]
    dim = exact[0] if exact else min(dims, key=waste)
    return dataclasses.replace(cut, dim=dim)


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
        leaves = jax.tree.leaves(tree)
        if self.experts == 1 and self.model == ModelAxis():
            return [self._partition(leaf, LeafDims()) for leaf in leaves]
        dims = named_dims.of_leaves(tree, self.model, self.experts)
        cuts = list(map(self._partition, leaves, dims))
        self.model.check_split([cut.model for cut in cuts])
        return cuts

    def _partition(self, leaf: jax.Array | jax.ShapeDtypeStruct, dims: LeafDims) -> Partition:
        groups = 1 if dims.experts is None else self.experts
        cut = Partition(
            tuple(leaf.shape),
            None,
            max(1, self.shards // groups),
            model=dims.model,
            model_shards=self.model.size,
            parts=self.parts,
            axis=self.axis if dims.experts is None else names(self.axis)[-1],
            experts=dims.experts,
            expert_shards=groups,
        )
        return with_dim(cut, first=int(dims.stacked and self.model.size > 1))


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


def strip_dim(value: jax.Array, dim: int, size: int) -> jax.Array:
    """Removes the padding of one dim."""
    return jax.lax.slice_in_dim(value, 0, size, axis=dim % value.ndim)


def pad_dim(value: jax.Array, dim: int, size: int) -> jax.Array:
    """Pads one dim with zeros up to `size`."""
    widths = [(0, 0)] * value.ndim
    widths[dim] = (0, size - value.shape[dim])
    return jnp.pad(value, widths)


def unpad(tree: PyTree) -> PyTree:
    """Removes the padding of sharded leaves; they stay partitioned.

    Use it for statistics of sharded parameters or gradients:
    `optax.global_norm(zero_jax.unpad(grads))`.

    Args:
      tree: Sharded parameters or gradients.

    Returns:
      The tree with unpadded, global shapes.

    >>> unpad({"w": Padded(jnp.ones((8, 4)), -2, 7)})["w"].shape
    (7, 4)
    """

    def one(node: PyTree) -> PyTree:
        if not isinstance(node, Padded):
            return node
        # The gradient of a frozen leaf is a scalar, whatever the leaf's shape.
        return strip_dim(node.value, node.dim, node.size) if node.value.ndim else node.value

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, Padded))


def map_leaves(
    fn: Callable[[jax.Array, Partition], object], tree: PyTree, partitions: Sequence[Partition]
) -> PyTree:
    """Maps a function of a leaf and its partition."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, partitions, strict=True)
    return jax.tree.unflatten(treedef, [fn(x, cut) for x, cut in pairs])


def pad(tree: PyTree, partitions: Sequence[Partition]) -> PyTree:
    """Pads the leaves that need it, the inverse of `unpad`; keeps the tree's structure."""

    def one(leaf: jax.Array, cut: Partition) -> jax.Array | Padded:
        if not cut.padded:
            return leaf
        assert cut.dim is not None
        full = leaf if leaf.ndim == 0 else pad_dim(leaf, cut.dim, cut.shard_size * cut.shards)
        return Padded(full, cut.dim, cut.size)

    return map_leaves(one, tree, partitions)


def constrained(tree: PyTree, partitions: Sequence[Partition], mesh: AnyMesh) -> PyTree:
    """Pads a full tree and constrains it to its shards, inside `jit`.

    The update of a frozen leaf is a scalar, whatever the leaf's shape, and is replicated.
    """
    pairs = zip(partitions, jax.tree.leaves(tree), strict=True)
    placed = [cut if cut.shape == x.shape else Partition(x.shape, None, 1) for cut, x in pairs]
    padded = pad(tree, partitions)
    return jax.lax.with_sharding_constraint(padded, shardings(padded, placed, mesh))


def shardings(tree: PyTree, partitions: Sequence[Partition], mesh: AnyMesh) -> PyTree:
    """Returns NamedShardings for a padded tree."""
    return map_leaves(lambda _, cut: NamedSharding(mesh, cut.stored_spec), tree, partitions)


def with_shardings(abstract: PyTree, placed: PyTree) -> PyTree:
    """Returns ShapeDtypeStructs with their shardings, for lowering without arrays."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, placed
    )


def bytes_per_device(
    partitions: Sequence[Partition], leaves: Sequence[jax.Array | jax.ShapeDtypeStruct]
) -> int:
    """Returns the stored bytes of one device, padding included."""
    pairs = zip(partitions, leaves, strict=True)
    return sum(math.prod(p.device_shape) * np.dtype(x.dtype).itemsize for p, x in pairs)


def key_impl(key: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Returns the name of a random key's generator, also of an abstract key.

    >>> key_impl(jax.eval_shape(lambda: jax.random.key(0)))
    'threefry2x32'
    """
    found: list[str] = []
    # JAX knows the generator of an abstract key only within a trace.
    jax.eval_shape(lambda traced: found.append(str(jax.random.key_impl(traced))), key)
    return found[0]
