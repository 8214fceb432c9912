"""Where each tensor of a model of transformers is in ours: what the tables of all models share.

Ours stacks a parameter of all layers in one array (L, ...), of their experts in one (L, E, ...);
theirs has a tensor for each.
What else differs is said by a turn: it reads a part of ours out of theirs, and places a part of
ours in theirs, so that neither is ever needed whole.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

# Reads a tensor of theirs between starts and stops.
Read = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]
Box = tuple[Any, ...]


class Turn(Protocol):
    """How a tensor of theirs becomes ours."""

    def shape(self, theirs: Sequence[int]) -> tuple[int, ...]:
        """Of ours."""
        ...

    def part(self, read: Read, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        """Ours between starts and stops."""
        ...

    def put(self, starts: Sequence[int], part: np.ndarray) -> tuple[Box, np.ndarray]:
        """What to write where in theirs for a part of ours that begins at starts."""
        ...


class Same:
    """Both are alike."""

    def shape(self, theirs: Sequence[int]) -> tuple[int, ...]:
        return tuple(theirs)

    def part(self, read: Read, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        return read(tuple(starts), tuple(stops))

    def put(self, starts: Sequence[int], part: np.ndarray) -> tuple[Box, np.ndarray]:
        return _box(starts, part), part


def _box(starts: Sequence[int], part: np.ndarray) -> Box:
    return tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))


SAME = Same()


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A matrix of theirs has a row for each of its results; `turn` orders the rows."""

    turn: Turn = SAME

    def shape(self, theirs: Sequence[int]) -> tuple[int, ...]:
        return self.turn.shape(theirs[::-1])

    def part(self, read: Read, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        return self.turn.part(lambda a, b: read(a[::-1], b[::-1]).T, starts, stops)

    def put(self, starts: Sequence[int], part: np.ndarray) -> tuple[Box, np.ndarray]:
        box, columns = self.turn.put(starts, part)
        return box[::-1], columns.T


TRANSPOSED = Transposed()


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor of theirs, and where it is in ours.

    Attributes:
      name: theirs, in full.
      shape: theirs.
      path: ours.
      at: index in the first dims of our stacked array: layer, or layer and expert; () where ours is
        no stack.
      turn: how theirs becomes ours.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    at: tuple[int, ...] = ()
    turn: Turn = SAME


# The tensors of one of our arrays, by their index.
Places = dict[tuple[int, ...], Place]


@dataclasses.dataclass(frozen=True)
class Layout:
    """All tensors of a model.

    Attributes:
      places: in the order of the model.
      full_name: of a tensor as it is found in a file; None for one that no model of today needs.
      tied: a head that may be saved too, and the embedding that it must be equal to.
    """

    places: tuple[Place, ...]
    full_name: Callable[[str], str | None]
    tied: tuple[str, str] | None = None

    @property
    def by_path(self) -> dict[str, Places]:
        """The tensors of each of our parameters."""
        found: dict[str, Places] = {}
        for place in self.places:
            found.setdefault(place.path, {})[place.at] = place
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Our parameters: path and shape."""
        # The last of a stack comes last.
        return {p.path: (*(n + 1 for n in p.at), *p.turn.shape(p.shape)) for p in self.places}
