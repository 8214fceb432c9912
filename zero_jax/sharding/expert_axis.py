"""The `experts` axis: which dim of a leaf counts experts, which stay with a part of the devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zero_jax.sharding import paths
from zero_jax.sharding.mesh import EXPERTS
from zero_jax.sharding.model_axis import names_of_dims

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """How experts are split over groups of devices.

    Attributes:
      size: of the axis, the number of groups.
    """

    size: int = 1

    def dims(self, tree: PyTree, model: Sequence[int | None]) -> list[int | None]:
        """Returns the dim of each leaf that is named "experts", counted from the end, or None.

        Args:
          tree: A tree of full arrays or ShapeDtypeStructs.
          model: The dim of each leaf that is sharded over `model`.

        Raises:
          ValueError: No leaf has one, the groups do not divide it, or it is sharded over `model`.
        """
        leaves = paths.named_leaves(tree)
        if self.size == 1:
            return [None] * len(leaves)
        both = zip(leaves, names_of_dims(tree), strict=True)
        dims = [self._dim(name, leaf.shape, given) for (name, leaf), given in both]
        if leaves and all(dim is None for dim in dims):
            raise ValueError(
                f"`mesh` has an experts axis of {self.size}, but no parameter has a dim named "
                "'experts'. Name the dims in the model, nnx.with_partitioning(init, ('experts', "
                "None, None)), or use a mesh with experts=1"
            )
        for (name, leaf), dim, other in zip(leaves, dims, model, strict=True):
            if dim is not None and dim == other:
                raise ValueError(
                    f"{name} {leaf.shape} has one dim for both the experts and the model axis: "
                    "name two dims, or use a mesh without one of these axes"
                )
        return dims

    def _dim(self, name: str, shape: tuple[int, ...], given: tuple[Any, ...]) -> int | None:
        if EXPERTS not in given:
            return None
        # A layer names its own dims, and stacking it puts one before them.
        if len(given) not in (len(shape), len(shape) - 1):
            raise ValueError(
                f"{name} {shape} has names for {len(given)} dims, {given}, and 'experts' is one "
                "of them: give each dim a name or None"
            )
        dim = given.index(EXPERTS) - len(given)
        if shape[dim] % self.size:
            fit = [n for n in range(2, shape[dim] + 1) if shape[dim] % n == 0]
            raise ValueError(
                f"{name} {shape} has {shape[dim]} experts, which an experts axis of {self.size} "
                f"does not divide: make the mesh with experts={' or '.join(map(str, fit))}"
            )
        return dim
