"""Dims of leaves that are split over `model` or `experts`, by their names or `param_specs`.

Tensor parallelism is an annotation. Each leaf may have one dim split over `model`, as Megatron
splits columns, rows and the vocabulary. The `data` partition takes another dim of the same leaf,
so a device stores 1 / (N·MP) of a matrix. A dim named "experts" is split over `experts`.

Source: ZeRO (arXiv:1910.02054), section 1; Megatron-LM (arXiv:1909.08053), section 3.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
from flax import nnx
from flax.core import meta
from jax.sharding import PartitionSpec

from zero_jax.sharding import paths
from zero_jax.sharding.mesh import EXPERTS, MODEL
from zero_jax.sharding.paths import PyTree

Specs = tuple[tuple[str, PartitionSpec], ...]
Rules = tuple[tuple[str, str | None], ...]
Names = tuple[str | None, ...]
# Names of a transformer's dims that Megatron splits, besides the name of the axis itself.
MEGATRON = (("heads", MODEL), ("mlp", MODEL), ("vocab", MODEL))
# Those that its sequence parallelism (arXiv:2205.05198) splits in addition, outside the matmuls.
SEQUENCE = (("seq", MODEL),)
# Where Flax keeps the names of a variable's dims, newest first.
_NAMES = ("out_sharding", "sharding_names", "sharding")


class LeafDims(NamedTuple):
    """The dims of a leaf that are split over other axes than `data`, counted from the end.

    Attributes:
      model: The dim that is split over `model`, or None.
      experts: The dim that counts experts, or None.
      stacked: True if the model names the dims of one layer, and dim 0 stacks layers.
    """

    model: int | None = None
    experts: int | None = None
    stacked: bool = False


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

    def check_split(self, dims: Sequence[int | None]) -> None:
        """Raises ValueError if no leaf is sharded over the model axis."""
        if self.size > 1 and dims and all(dim is None for dim in dims):
            specs = "" if self.specs is None else f" by `param_specs`={dict(self.specs)}"
            raise ValueError(
                f"`mesh` has a model axis of {self.size}, but no parameter is sharded over it"
                f"{specs}. Pass `param_specs`={{'pattern of paths': PartitionSpec(None, 'model')}} "
                "for matrices (dims with few elements are sharded over data instead), name the "
                "dims in the model (nnx.with_partitioning), or use a mesh with model=1"
            )

    def axis_of(self, name: str | None) -> str | None:
        """Returns the mesh axis for the name of a dim: `model`, or None."""
        axes: dict[str | None, str | None] = dict(reversed(self.rules))
        return MODEL if axes.get(name, name) == MODEL else None

    def dim(self, where: str, shape: Sequence[int], spec: Sequence[object]) -> int | None:
        """Returns the dim that a spec splits, counted from the end, or None.

        Raises:
          ValueError: It names another axis, more dims than there are, or a dim that MP does not
            divide.
        """
        split = [d for d, axis in enumerate(spec) if axis is not None]
        if not split:
            return None
        dim, where = split[0], f"{where} has the spec {PartitionSpec(*spec)}"
        if len(split) > 1 or spec[dim] != MODEL or dim >= len(shape):
            raise ValueError(
                f"{where}: write {MODEL!r} for one of its {len(shape)} dims, and no other axis, "
                "because the data axis takes a dim by itself"
            )
        if shape[dim] % self.size:
            fit = [d for d in range(len(shape)) if shape[d] % self.size == 0]
            raise ValueError(
                f"{where}, but a model axis of {self.size} does not divide {shape[dim]}, only the "
                f"dims {fit}: use one of these, or another size of the model axis"
            )
        return dim - len(shape)


def of_leaves(tree: PyTree, model: ModelAxis, experts: int) -> list[LeafDims]:
    """Returns the split dims of the leaves of a full tree of arrays or ShapeDtypeStructs.

    Args:
      tree: The tree.
      model: How leaves are split over `model`.
      experts: The size of the `experts` axis.

    Raises:
      ValueError: A spec or a name does not fit its leaf, or the axes.
    """
    leaves = paths.named_leaves(tree)
    named = _names(tree) if model.size > 1 or experts > 1 else [()] * len(leaves)
    every = [path for path, _ in leaves]
    specs = [(spec, paths.matches(p, every, "param_specs")) for p, spec in model.specs or ()]
    result = []
    for at, (path, leaf) in enumerate(leaves):
        shape, names = tuple(leaf.shape), named[at]
        stacked = 0 < len(names) == len(shape) - 1
        names = (None, *names) if stacked else names
        by_name = model.specs is None and model.size > 1
        spec: Sequence[object] = tuple(map(model.axis_of, names)) if by_name else ()
        for specified, hits in specs:
            spec = tuple(specified) if hits[at] else spec
        # Specs are checked without a model axis too: a mistake shows before the run on a cluster.
        dim = model.dim(f"{path} {shape}", shape, spec)
        dim = dim if model.size > 1 else None
        expert_dim = _expert_dim(f"{path} {shape}", shape, names, experts, dim)
        result.append(LeafDims(dim, expert_dim, stacked))
    if experts > 1 and leaves and all(dims.experts is None for dims in result):
        raise ValueError(
            f"`mesh` has an experts axis of {experts}, but no parameter has a dim named 'experts'. "
            "Name it, nnx.with_partitioning(init, ('experts', None, None)), or make experts=1"
        )
    return result


def _names(tree: PyTree) -> list[Names]:
    """Returns the names that the model gives to the dims of each leaf; () without names."""
    kinds = (nnx.Variable, meta.AxisMetadata)
    result: list[Names] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds)):
        names: Sequence[str | None] = ()
        if isinstance(node, nnx.Variable):
            metadata = node.get_metadata()
            names = next((metadata[key] for key in _NAMES if metadata.get(key)), ())
        elif isinstance(node, meta.AxisMetadata):
            names = getattr(node, "names", ())
        result += [tuple(names)] * len(jax.tree.leaves(node))
    return result


def _expert_dim(
    where: str, shape: Sequence[int], names: Names, groups: int, model: int | None
) -> int | None:
    """Returns the dim named "experts", counted from the end, or None.

    Raises:
      ValueError: The groups of devices do not divide it, it is split over `model`, or the names
        are not as many as the dims.
    """
    if groups == 1 or EXPERTS not in names:
        return None
    dim = names.index(EXPERTS) - len(names)
    if len(names) != len(shape) or dim == model:
        raise ValueError(
            f"{where} has dims named {names}: give each dim a name or None, and 'experts' to one "
            "that is not split over the model axis"
        )
    if shape[dim] % groups:
        fit = [str(n) for n in range(2, shape[dim] + 1) if shape[dim] % n == 0]
        raise ValueError(
            f"{where} has {shape[dim]} experts, which an experts axis of {groups} does not divide: "
            f"make the mesh with experts={' or '.join(fit)}"
        )
    return dim


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
