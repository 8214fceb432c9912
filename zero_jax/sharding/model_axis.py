"""The `model` axis: the dim of a leaf that tensor parallelism splits, and collectives on its parts.

Tensor parallelism is an annotation. Each leaf may have one dim split over `model`, as Megatron
splits columns, rows and the vocabulary. The `data` partition takes another dim of the same leaf,
so a device stores 1 / (N·MP) of a matrix. Inside the step `model` stays an automatic axis of
`shard_map`: XLA splits the matmuls of an unmodified model by the names of its weights and
activations.

Note [pieces over model]: XLA does not split a collective over a manual axis along an automatic
one; it gathers the operand over `model` first. So collectives over `data` run in a nested
`shard_map` in which `model` is manual too: each device sends its own 1/MP of the leaf.

Source: ZeRO (arXiv:1910.02054), section 1; Megatron-LM (arXiv:1909.08053), section 3.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
from flax import linen as nn
from flax import nnx
from flax.core import meta, spmd
from jax.sharding import AbstractMesh, PartitionSpec

from zero_jax.sharding import paths
from zero_jax.sharding.mesh import MODEL
from zero_jax.sharding.paths import PyTree

Specs = tuple[tuple[str, PartitionSpec], ...]
Rules = tuple[tuple[str, str | None], ...]
# Names of a transformer's dims that Megatron splits, besides the name of the axis itself.
MEGATRON = (("heads", MODEL), ("mlp", MODEL), ("vocab", MODEL))
# Those that its sequence parallelism (arXiv:2205.05198) splits in addition, outside the matmuls.
SEQUENCE = (("seq", MODEL),)
# Where Flax keeps the names of a variable's dims, newest first.
_NAMES = ("out_sharding", "sharding_names", "sharding")
# JAX keeps traces of loop bodies, and does not know that Flax's rules are in them.
_RULES_OF_TRACE = jax.make_user_context(())


class LeafDims(NamedTuple):
    """A leaf, and the names that the model gives to its dims.

    Attributes:
      path: Its path.
      shape: Its full shape.
      names: The name of each dim, or None; () without names.
      stacked: True if the model names the dims of one layer, and dim 0 stacks layers.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...] = ()
    stacked: bool = False


def named_dims(tree: PyTree, named: bool) -> list[LeafDims]:
    """Returns the leaves of a full tree of arrays or ShapeDtypeStructs, if `named` with names."""
    kinds = (nnx.Variable, meta.AxisMetadata) if named else ()
    dims: list[tuple[str | None, ...]] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds)):
        given: Sequence[str | None] = ()
        if isinstance(node, nnx.Variable):
            metadata = node.get_metadata()
            given = next((metadata[key] for key in _NAMES if metadata.get(key)), ())
        elif isinstance(node, meta.AxisMetadata):
            given = getattr(node, "names", ())
        dims += [tuple(given)] * len(jax.tree.leaves(node))
    result = []
    for (path, leaf), names in zip(paths.named_leaves(tree), dims, strict=True):
        shape = tuple(leaf.shape)
        stacked = 0 < len(names) == len(shape) - 1
        result.append(LeafDims(path, shape, (None, *names) if stacked else names, stacked))
    return result


@dataclasses.dataclass(frozen=True)
class ModelAxis:
    """How leaves are split over `model`.

    Attributes:
      size: MP, the size of the axis.
      specs: (pattern of paths, PartitionSpec) pairs; None for the names of dims in the model.
      rules: (name of a dim, "model" or None) pairs; the first with a name counts.
    """

    size: int = 1
    specs: Specs | None = None
    rules: Rules = ()

    def dims(self, leaves: Sequence[LeafDims]) -> list[int | None]:
        """Returns the dim of each leaf that is split over `model`, counted from the end, or None.

        Raises:
          ValueError: A spec names another axis, more dims than there are, or a dim that MP does
            not divide.
        """
        specs: list[Sequence[object]] = [()] * len(leaves)
        if self.specs is None and self.size > 1:
            specs = [tuple(map(self.axis_of, leaf.names)) for leaf in leaves]
        for pattern, spec in self.specs or ():
            hits = paths.matches(pattern, [leaf.path for leaf in leaves], "param_specs")
            specs = [tuple(spec) if hit else old for hit, old in zip(hits, specs, strict=True)]
        # Specs are checked without a model axis too: a mistake shows before the run on a cluster.
        dims = list(map(self._dim, leaves, specs))
        return dims if self.size > 1 else [None] * len(leaves)

    def check_split(self, dims: Sequence[int | None]) -> None:
        """Raises ValueError if no leaf is sharded over the model axis."""
        if self.size > 1 and dims and all(dim is None for dim in dims):
            specs = "" if self.specs is None else f" by `param_specs`={dict(self.specs)}"
            raise ValueError(
                f"`mesh` has a model axis of {self.size}, but no parameter is sharded over it"
                f"{specs}, so each device would store and compute all of them. Pass `param_specs`="
                "{'pattern of paths': PartitionSpec(None, 'model')} for matrices (dims with few "
                "elements are sharded over data instead), name the dims in the model "
                "(nnx.with_partitioning), or use a mesh with model=1"
            )

    def axis_of(self, name: str | None) -> str | None:
        """Returns the mesh axis for the name of a dim: `model`, or None."""
        axes: dict[str | None, str | None] = dict(reversed(self.rules))
        return MODEL if axes.get(name, name) == MODEL else None

    def _dim(self, leaf: LeafDims, spec: Sequence[object]) -> int | None:
        split = [d for d, axis in enumerate(spec) if axis is not None]
        if not split:
            return None
        dim, shape = split[0], leaf.shape
        where = f"{leaf.path} {shape} has the spec {PartitionSpec(*spec)}"
        if spec[dim] != MODEL:
            raise ValueError(
                f"{where}: only {MODEL!r} can be named, not {spec[dim]!r}, because the data axis "
                f"takes a dim by itself. Write PartitionSpec(..., {MODEL!r})"
            )
        if len(split) > 1 or dim >= len(shape):
            raise ValueError(f"{where}: name {MODEL!r} for one of its {len(shape)} dims")
        if shape[dim] % self.size:
            fit = [d for d in range(len(shape)) if shape[d] % self.size == 0]
            raise ValueError(
                f"{where}, but a model axis of {self.size} does not divide {shape[dim]}: "
                + (f"use one of the dims {fit}, or " if fit else "use ")
                + "another size of the model axis"
            )
        return dim - len(shape)


def check_specs(given: Mapping[str, PartitionSpec] | Specs) -> Specs:
    """Returns the specs as pairs of a pattern and a PartitionSpec.

    Raises:
      ValueError: One is not a PartitionSpec.
    """
    specs = tuple(dict(given).items())
    for pattern, spec in specs:
        if not isinstance(spec, PartitionSpec):
            raise ValueError(
                f"`param_specs` has {spec!r} for {pattern!r}: write a jax.sharding.PartitionSpec, "
                f"for example PartitionSpec(None, {MODEL!r})"
            )
    return specs


def check_rules(given: Mapping[str, object] | Iterable[Sequence[object]]) -> Rules:
    """Returns the rules as pairs of a dim's name and `model` or None.

    The step is manual over the other axes (a batch over `data`), so they become None.

    Raises:
      ValueError: One is not a pair of a name and a mesh axis.

    >>> check_rules({"batch": "data", "mlp": ("model",)})
    (('batch', None), ('mlp', 'model'))
    """
    rules = []
    for pair in given.items() if isinstance(given, Mapping) else given:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(
                f"`logical_axis_rules` has {pair!r}: write pairs of a dim's name and a mesh axis "
                f"or None, for example (('mlp', {MODEL!r}), ('embed', None))"
            )
        axes = pair[1] if isinstance(pair[1], (tuple, list)) else (pair[1],)
        rules.append((pair[0], MODEL if MODEL in axes else None))
    return tuple(rules)


@contextlib.contextmanager
def named_activations(rules: Rules) -> Iterator[None]:
    """Makes `nn.with_logical_constraint` split activations by these rules, during a trace."""
    with (
        _RULES_OF_TRACE(rules),
        spmd.logical_axis_rules(rules),
        nnx.use_eager_sharding(False),
        nn.intercept_methods(_kernels_without_names),
    ):
        yield


def _kernels_without_names(
    call: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    context: nn.module.InterceptorContext,
) -> object:
    """Hides the mesh from linen's `DenseGeneral`, which attention consists of.

    It makes a flat kernel and constrains it by the names of all its dims, which are more.
    """
    if not isinstance(context.module, nn.DenseGeneral):
        return call(*args, **kwargs)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return call(*args, **kwargs)


def on_pieces(
    fn: Callable[[jax.Array], jax.Array], x: jax.Array, dim: int | None, size: int
) -> jax.Array:
    """Runs a collective on each device's own piece of a value; see [pieces over model].

    Args:
      fn: A function of one array that keeps its rank.
      x: A value inside the step.
      dim: The dim of `x` that is split over `model`, counted from the end, or None.
      size: MP.
    """
    if size == 1:
        return fn(x)
    spec = PartitionSpec() if dim is None else PartitionSpec(*[None] * (dim % x.ndim), MODEL)
    return over_model(fn, x, spec, spec)


def over_model(
    fn: Callable[[jax.Array], jax.Array], x: jax.Array, spec: PartitionSpec, out: PartitionSpec
) -> jax.Array:
    """Runs `fn` with `model` as a manual axis: it gets and returns pieces by these specs."""
    if MODEL in jax.sharding.get_abstract_mesh().manual_axes:
        return fn(x)
    return jax.shard_map(fn, in_specs=(spec,), out_specs=out, axis_names={MODEL}, check_vma=False)(
        x
    )
