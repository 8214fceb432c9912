"""The doors through which models reach parameters, so that models stay unmodified.

A `Box` holds a shard and opens into the full leaf. Flax opens it by itself: linen calls
`AxisMetadata.unbox` when a module reads a parameter, NNX calls the `on_get_value` hook of a
Variable. Plain functions open it with `zero_jax.gather`. Boxes are pytree nodes, so they pass
through scan, vmap of layers and remat; the split dim is counted from the end, so slicing off
the layer dim leaves it right.
"""

from typing import Any

import jax
from flax import nnx
from flax.core import meta

from zero_jax import collectives
from zero_jax.collectives import Wire
from zero_jax.layout import Split
from zero_jax.splitter import Splitter

PyTree = Any


@jax.tree_util.register_pytree_with_keys_class
class Box(meta.AxisMetadata):
    """A parameter inside the step: a shard that is whole when touched.

    Attributes:
      shard: this device's piece, fp32.
      copy: the full leaf gathered earlier (stage 2), or None.
      slot: what the gradient is taken with respect to instead of the shard, or None; see
        `collectives.touch`.
      cut: how the leaf is split.
      wire: axis and dtypes.
    """

    def __init__(self, shard: Any, copy: Any, slot: Any, cut: Split, wire: Wire):
        self.shard = shard
        self.copy = copy
        self.slot = slot
        self.cut = cut
        self.wire = wire

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        names = map(jax.tree_util.GetAttrKey, ("shard", "copy", "slot"))
        children, static = self.tree_flatten()
        return tuple(zip(names, children, strict=True)), static

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.shard, self.copy, self.slot), (self.cut, self.wire)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "Box":
        return cls(*children, *static)

    def unbox(self) -> jax.Array:
        """The full leaf, in the compute dtype."""
        return collectives.touch(self.shard, self.copy, self.slot, self.cut, self.wire)

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Box":
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Box":
        return self

    # Enough of an array for Flax's own checks and for `jnp` functions.
    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.shard.shape)
        if self.cut.dim is not None:
            shape[self.cut.dim] = self.cut.size
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.shard.ndim

    @property
    def dtype(self) -> Any:
        return self.wire.compute or self.shard.dtype

    def __jax_array__(self) -> jax.Array:
        return self.unbox()

    def __getitem__(self, index: Any) -> Any:
        # NNX reads a variable as `kernel[...]` and opens the box in the hook that follows.
        return self if index is Ellipsis else self.unbox()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        return iter(self.unbox())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a parameter has no {name!r} here: inside the step it is this device's shard. "
            "Open it where it is used: w = zero_jax.gather(params['w'])"
        )


def _opened(operator: str) -> Any:
    return lambda self, *others: getattr(self.unbox(), operator)(*others)


# On the right of an array a box is opened by __jax_array__, on the left by these.
for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "neg"):
    setattr(Box, f"__{_name}__", _opened(f"__{_name}__"))


def _open_on_get(variable: Any, value: Any) -> Any:
    return value.unbox() if isinstance(value, Box) else value


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def with_doors(treedef: Any, leaves: list[Any]) -> PyTree:
    """The tree that the loss function gets, of boxes and arrays; NNX variables get the hook.

    Boxes of the model's own (`nn.with_partitioning`) are taken off: their constraints name axes
    of another mesh.
    """

    def one(node: Any) -> Any:
        if _is_variable(node):
            hooks = node.get_metadata().get("on_get_value", ())
            hooks = hooks if isinstance(hooks, tuple) else (hooks,)
            return node.copy(on_get_value=(_open_on_get, *hooks))
        if isinstance(node, meta.AxisMetadata) and not _is_box(node):
            return jax.tree.leaves(node, is_leaf=_is_box)[0]
        return node

    def is_leaf(node: Any) -> bool:
        return _is_variable(node) or isinstance(node, meta.AxisMetadata)

    return jax.tree.map(one, jax.tree.unflatten(treedef, leaves), is_leaf=is_leaf)


def _is_box(node: Any) -> bool:
    return isinstance(node, Box)


def gather(
    tree: PyTree,
    like: PyTree | None = None,
    *,
    axis_name: str = "data",
    compute: Any = None,
    reduce: Any = "float32",
) -> PyTree:
    """Opens parameters: every shard becomes the full leaf, differentiably.

    Two uses. Inside a loss function given to `Zero`, `gather(params)` opens the boxes; on a tree
    without boxes (one device, stages 0 and 1) it changes nothing. Inside a `shard_map` of your
    own, `gather(shards, like=shapes)` gathers shards that were cut by `zero_jax.shard`.

    Args:
      tree: boxes, or this device's shards.
      like: for shards: a tree of the logical leaves (arrays or ShapeDtypeStructs).
      axis_name: the mesh axis the shards are spread over.
      compute: dtype to gather in; None keeps the leaf's own.
      reduce: dtype in which the gradient is summed.

    Returns:
      The full leaves. Their gradients arrive as shards, summed over `axis_name`, except those of
      leaves too small to split, which stay local: sum them with `jax.lax.psum`.
    """
    if like is None:
        return jax.tree.map(lambda n: n.unbox() if _is_box(n) else n, tree, is_leaf=_is_box)
    wire = Wire(axis_name, compute and jax.numpy.dtype(compute), jax.numpy.dtype(reduce))
    cuts = Splitter(jax.lax.axis_size(axis_name))(like)
    leaves, treedef = jax.tree.flatten(tree)
    full = [collectives.touch(x, None, None, c, wire) for x, c in zip(leaves, cuts, strict=True)]
    return jax.tree.unflatten(treedef, full)


def shard(tree: PyTree, *, axis_name: str = "data") -> PyTree:
    """This device's pieces of a tree that every device holds in full; inside `shard_map`.

    Args:
      tree: full leaves.
      axis_name: the mesh axis to spread them over.

    Returns:
      The same tree of shards, padded with zeros where N does not divide.
    """
    leaves, treedef = jax.tree.flatten(tree)
    cuts = Splitter(jax.lax.axis_size(axis_name))(tree)
    pieces = [collectives.local_shard(x, c, axis_name) for x, c in zip(leaves, cuts, strict=True)]
    return jax.tree.unflatten(treedef, pieces)
