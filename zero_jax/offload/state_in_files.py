"""An optimizer state in files as a tree: what rests on the device, and where the rest is."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.sharding.cuts import Split
from zero_jax.sharding.paths import Padded

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """The state of an optimizer whose larger part is in files.

    Attributes:
      resident: the leaves that are no moments (counters, rates), on the device.
      files: the rest.
    """

    resident: list[jax.Array]
    files: Any = dataclasses.field(metadata={"static": True})

    def unfolded(self) -> PyTree:
        """The state as a tree like that of the plain transformation, an `InFiles` for what is in
        files."""
        files, kept = self.files, iter(self.resident)
        found = []
        for at, (held, cut) in enumerate(zip(files.held, files.state_cuts, strict=True)):
            value: InFiles | jax.Array | Padded
            value = InFiles(files, f"state{at}") if held else next(kept)
            if not held and cut.padded and np.shape(value) == cut.rest_shape:
                assert cut.dim is not None
                value = Padded(value, cut.dim, cut.size)
            found.append(value)
        return jax.tree.unflatten(jax.tree.structure(files.state), found)

    def folded(self, tree: PyTree) -> "Stored":
        """The inverse, for a tree like that of `unfolded`."""
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Padded))
        kept = [
            x.value if isinstance(x, Padded) else x for x in nodes if not isinstance(x, InFiles)
        ]
        return Stored(kept, self.files)


@dataclasses.dataclass(frozen=True)
class InFiles:
    """One leaf of a state that is in files; what it is now is read and written there."""

    files: Any
    key: str

    @property
    def cut(self) -> Split:
        return self.files.split_of(self.key)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.cut.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.files.dtype_of(self.key)

    def shards(self) -> list[tuple[str, tuple[int, ...], bool]]:
        """This process's shards: name, where it starts, and whether it is the first to have it."""
        return self.files.shards(self.key)

    def read(self, name: str, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        store = self.files.store
        return store.read(store.step, f"{self.key}/{name}", starts, stops)

    def write(self, name: str, starts: Sequence[int], piece: np.ndarray) -> None:
        """Changes the state in place; until the next step is done there is nothing to resume."""
        store = self.files.store
        store.forget()
        store.write(store.step, f"{self.key}/{name}", starts, piece)
