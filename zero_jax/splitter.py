"""How the leaves of a whole tree are cut: finds the stacks of layers, asks `layout.split` of each.

A model that scans over its layers stacks them along dim 0, which is never cut: each turn of the
loop gathers its own layer.
"""

import dataclasses
from typing import Any

import jax

from zero_jax import paths
from zero_jax.layout import Split, split
from zero_jax.model_axis import ModelAxis

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Makes the split of every leaf of a logical tree, in tree order.

    A lone leaf of rank 3 or more counts as stacked too, since it may be scanned over: where it
    is not, it is cut along its second dim, which costs a transpose and nothing else.

    Attributes:
      shards: N, into how many pieces a leaf is cut.
      scanned: pattern of the paths that stack layers; None finds them by shape.
      model: how leaves are split over `model`.
      parts: R, into how many parts a piece is cut at rest.

    >>> shapes = {"w": jax.ShapeDtypeStruct((6, 4), "float32")}
    >>> Splitter(4)(shapes)[0].shard_shape
    (6, 1)
    """

    shards: int
    scanned: str | None = None
    model: ModelAxis = ModelAxis()
    parts: int = 1

    def __call__(self, tree: PyTree) -> list[Split]:
        stacked = [a or b for a, b in zip(self.stacks(tree), self._lone(tree), strict=True)]
        leaves = zip(jax.tree.leaves(tree), stacked, self.model.dims(tree, stacked), strict=True)
        size = self.model.size
        cuts = [
            split(x.shape, self.shards, stacked=s, model=d, model_shards=size, parts=self.parts)
            for x, s, d in leaves
        ]
        self.model.check_split([cut.model for cut in cuts])
        return cuts

    def stacks(self, tree: PyTree) -> list[bool]:
        """Of each leaf whether it stacks the layers that a model scans over along dim 0.

        With a pattern, the leaves whose path it matches. Without one, by shape: the leaves of a
        subtree that all share one leading size (two leaves or more, one of them of rank 3 or more).
        """
        entries = paths.named_leaves(tree)
        if self.scanned is not None:
            return paths.matches(self.scanned, [name for name, _ in entries], "scanned")
        groups: dict[str, list[int]] = {}
        for at, (name, _) in enumerate(entries):
            parts = name.split("/")
            for depth in range(len(parts)):
                groups.setdefault("/".join(parts[:depth]), []).append(at)
        shapes = [tuple(leaf.shape) for _, leaf in entries]
        stacks = [group for group in groups.values() if _is_stack([shapes[at] for at in group])]
        members = {at for group in stacks for at in group}
        return [at in members for at in range(len(entries))]

    def _lone(self, tree: PyTree) -> list[bool]:
        leaves = jax.tree.leaves(tree)
        unnamed = self.scanned is None
        return [unnamed and len(x.shape) >= 3 and max(x.shape[1:]) >= self.shards for x in leaves]


def _is_stack(shapes: list[tuple[int, ...]]) -> bool:
    if len(shapes) < 2 or any(not s for s in shapes) or len({s[0] for s in shapes}) > 1:
        return False
    return max(len(s) for s in shapes) >= 3
