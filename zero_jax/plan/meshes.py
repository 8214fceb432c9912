"""Which mesh: the same devices and the same batch with more or less tensor parallelism, compared.

A mesh that fits need not be fast: what tensor parallelism saves in memory it pays in sums between
layers, which no product hides. So each mesh is predicted, those that may fit are compiled, and the
one whose step takes least on a roofline is named.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from zero_jax.plan.auto import MARGIN
from zero_jax.plan.plans import Plan
from zero_jax.plan.tables import gigabytes, table

_MOST = 16  # of MP: beyond, products are too small for their device


@dataclasses.dataclass(frozen=True)
class Row:
    """One mesh.

    Attributes:
      model_parallel: MP.
      plan: compiled, if it may fit; None where the model cannot be split so.
      why: what speaks against it, or nothing.
    """

    model_parallel: int
    plan: Plan | None
    why: str = ""

    @property
    def seconds(self) -> float | None:
        """Of a step, where it was compiled."""
        return None if self.plan is None or self.plan.time is None else self.plan.time.seconds


def splits(devices: int, replica: int = 1) -> list[int]:
    """Which MP there may be.

    >>> splits(48), splits(8, replica=2)
    ([1, 2, 4, 8, 16], [1, 2, 4])
    """
    counts = (2**power for power in range(_MOST.bit_length()))
    return [mp for mp in counts if devices % (mp * replica) == 0]


def compare(counts: Sequence[int], plan: Callable[[int, bool], Plan], limit: int) -> Iterator[Row]:
    """Plans one mesh after the other.

    Args:
      counts: the MP of each.
      plan: makes the plan of one; compiles it if told to.
      limit: bytes of a device that may be used.
    """
    for mp in counts:
        try:
            planned = plan(mp, False)
            if planned.total_bytes > limit * (1 + MARGIN):
                yield Row(mp, planned, "does not fit, as predicted")
                continue
            planned = plan(mp, True)
        except ValueError as error:
            yield Row(mp, None, str(error))
            continue
        yield Row(mp, planned, "" if planned.total_bytes <= limit else "does not fit")


def fastest(rows: Sequence[Row]) -> Row | None:
    """Of those that fit; None if none does."""
    fitting = [row for row in rows if row.seconds is not None and not row.why]
    return min(fitting, key=lambda row: row.seconds or 0.0, default=None)


def format_meshes(rows: Sequence[Row]) -> str:
    """A table, and the mesh to take."""
    lines = [["MP", "N", "GB", "words / Ψ", "covered", "step s", "waits", ""]]
    best = fastest(rows)
    for row in rows:
        shape = [str(row.model_parallel), _shards(row.plan)]
        lines.append([*shape, *_figures(row.plan), "fastest that fits" if row is best else row.why])
    none = "none fits: take more devices, or `--auto` for less memory"
    return table(lines) + "\n" + (f"take model={best.model_parallel}" if best else none)


def _shards(plan: Plan | None) -> str:
    return "" if plan is None else str(plan.axes.get("data", 1))


def _figures(plan: Plan | None) -> list[str]:
    if plan is None:
        return [""] * 5
    size, time = gigabytes(plan.total_bytes), plan.time
    if time is None:
        return [size, "", "", "", ""]
    waits = f"{time.exposed_seconds / time.seconds:.0%}"
    words = f"{plan.words_per_param:.3f}" if plan.countable else "?"
    return [size, words, f"{time.covered:.0%}", f"{time.seconds:.3f}", waits]
