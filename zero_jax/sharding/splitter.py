"""How the leaves of a whole tree are cut: `layout.split` of each, and what `model` splits."""

import dataclasses
from typing import Any

import jax

from zero_jax.sharding.layout import Split, split
from zero_jax.sharding.mesh import DATA
from zero_jax.sharding.model_axis import ModelAxis

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Makes the split of every leaf of a logical tree, in tree order.

    Attributes:
      shards: N, into how many pieces a leaf is cut.
      model: how leaves are split over `model`.
      parts: R, into how many parts a piece is cut at rest.
      axis: the mesh axis that pieces are spread over.

    >>> shapes = {"w": jax.ShapeDtypeStruct((6, 4), "float32")}
    >>> Splitter(4)(shapes)[0].shard_shape
    (6, 1)
    """

    shards: int
    model: ModelAxis = ModelAxis()
    parts: int = 1
    axis: str = DATA

    def __call__(self, tree: PyTree) -> list[Split]:
        known = zip(
            jax.tree.leaves(tree), self.model.dims(tree), self.model.stacks(tree), strict=True
        )
        cuts = [
            split(
                x.shape,
                self.shards,
                first=int(stack),
                model=dim,
                model_shards=self.model.size,
                parts=self.parts,
                axis=self.axis,
            )
            for x, dim, stack in known
        ]
        self.model.check_split([cut.model for cut in cuts])
        return cuts
