"""Comparison of tensor-parallel sizes, for the same devices and the same batch.

A mesh that fits need not be fast: tensor parallelism saves memory, and its sums between layers are
exposed communication. Each mesh is predicted, those that may fit are compiled, and the one with the
shortest modelled step is recommended.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from zero_jax.plan.auto import MARGIN
from zero_jax.plan.plans import Plan
from zero_jax.plan.tables import gigabytes, table

_SIZES = (1, 2, 4, 8, 16)  # of MP: beyond, matmuls are too small for a device


@dataclasses.dataclass(frozen=True)
class Row:
    """One mesh.

    Attributes:
      model_parallel: MP.
      plan: Compiled if it may fit; None if the model cannot be split so.
      why: Reason against it; empty if it fits.
    """

    model_parallel: int
    plan: Plan | None
    why: str = ""

    @property
    def seconds(self) -> float | None:
        """Modelled seconds of a step; None if it was not compiled."""
        return None if self.plan is None or self.plan.time is None else self.plan.time.seconds


def splits(devices: int, replica: int = 1) -> list[int]:
    """Returns the possible values of MP.

    >>> splits(48), splits(8, replica=2)
    ([1, 2, 4, 8, 16], [1, 2, 4])
    """
    return [mp for mp in _SIZES if devices % (mp * replica) == 0]


def compare(counts: Sequence[int], plan: Callable[[int, bool], Plan], limit: int) -> Iterator[Row]:
    """Plans one mesh after the other.

    Args:
      counts: MP of each mesh.
      plan: Function that plans one mesh; the second argument says whether to compile it.
      limit: Bytes per device that may be used.
    """
    for mp in counts:
        try:
            planned, why = plan(mp, False), "does not fit, as predicted"
            if planned.total_bytes <= limit * (1 + MARGIN):
                planned = plan(mp, True)
                why = "" if planned.total_bytes <= limit else "does not fit"
            yield Row(mp, planned, why)
        except ValueError as error:
            yield Row(mp, None, str(error))


def fastest(rows: Sequence[Row]) -> Row | None:
    """Returns the fastest row that fits; None if none fits."""
    fitting = [row for row in rows if row.seconds is not None and not row.why]
    return min(fitting, key=lambda row: row.seconds or 0.0, default=None)


def format_meshes(rows: Sequence[Row]) -> str:
    """Formats the table and the recommended mesh."""
    lines = [["MP", "N", "GB", "elements / Ψ", "overlapped", "step s", "exposed", ""]]
    best = fastest(rows)
    for row in rows:
        plan, why = row.plan, "fastest that fits" if row is best else row.why
        cells = [str(row.model_parallel)]
        if plan is not None:
            cells += [str(plan.axes.get("data", 1)), gigabytes(plan.total_bytes)]
            if (time := plan.time) is not None:
                elements = f"{plan.elements_per_param:.3f}" if plan.countable else "?"
                exposed = f"{time.exposed_seconds / time.seconds:.0%}"
                cells += [elements, f"{time.overlapped:.0%}", f"{time.seconds:.3f}", exposed]
        lines.append([*cells, *[""] * (7 - len(cells)), why])
    none = "none fits: use more devices, or `plan auto` to find settings with less memory"
    return table(lines) + "\n" + (f"use --mesh model={best.model_parallel}" if best else none)
