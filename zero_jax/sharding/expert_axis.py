"""The `experts` axis: which dim of a leaf counts experts, split over groups of devices."""

from collections.abc import Sequence

from zero_jax.sharding.mesh import EXPERTS
from zero_jax.sharding.model_axis import names_of_dims
from zero_jax.sharding.paths import PyTree, named_leaves


def expert_dims(tree: PyTree, groups: int, model: Sequence[int | None]) -> list[int | None]:
    """Returns the dim of each leaf that is named "experts", counted from the end, or None.

    Args:
      tree: A tree of full arrays or ShapeDtypeStructs.
      groups: The size of the `experts` axis.
      model: The dim of each leaf that is sharded over `model`.

    Raises:
      ValueError: No leaf has one, the groups do not divide it, or it is sharded over `model`.
    """
    leaves = named_leaves(tree)
    if groups == 1:
        return [None] * len(leaves)
    dims = []
    for (name, leaf), named, other in zip(leaves, names_of_dims(tree), model, strict=True):
        dims.append(dim := _dim(name, leaf.shape, named, groups))
        if dim is not None and dim == other:
            raise ValueError(
                f"{name} {leaf.shape} has one dim for both the experts and the model axis: "
                "name two dims, or use a mesh without one of these axes"
            )
    if leaves and all(dim is None for dim in dims):
        raise ValueError(
            f"`mesh` has an experts axis of {groups}, but no parameter has a dim named "
            "'experts'. Name the dims in the model, nnx.with_partitioning(init, ('experts', "
            "None, None)), or use a mesh with experts=1"
        )
    return dims


def _dim(name: str, shape: tuple[int, ...], named: Sequence[str | None], groups: int) -> int | None:
    if EXPERTS not in named:
        return None
    # A layer names its own dims, and stacking it puts one before them.
    if len(named) not in (len(shape), len(shape) - 1):
        raise ValueError(
            f"{name} {shape} has names for {len(named)} dims, {named}, and 'experts' is one "
            "of them: give each dim a name or None"
        )
    dim = named.index(EXPERTS) - len(named)
    if shape[dim] % groups:
        fit = [n for n in range(2, shape[dim] + 1) if shape[dim] % n == 0]
        raise ValueError(
            f"{name} {shape} has {shape[dim]} experts, which an experts axis of {groups} "
            f"does not divide: make the mesh with experts={' or '.join(map(str, fit))}"
        )
    return dim
