"""Sections and tables of a run's page."""

from __future__ import annotations

from collections.abc import Sequence

from training.charts import text
from training.show import human_bytes


class Made(str):
    """HTML that is put into a table as it is."""

    __slots__ = ()


def section(title: str, body: str) -> str:
    """A part of the page with its heading."""
    return f"<section><h2>{text(title)}</h2>{body}</section>"


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    caption: str = "",
    own: int | None = None,
    left: bool = False,
) -> str:
    """A table, which scrolls by itself where it is too wide.

    Args:
        columns: Their names.
        rows: Cells; what is not `Made` is shown as text.
        caption: What it shows.
        own: A row to point out.
        left: Whether all columns begin at the left, as words do.

    >>> table(["a"], [["<x>"]])[-61:]
    '<tr><th scope="row">&lt;x&gt;</th></tr></tbody></table></div>'
    """
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in columns)
    body = "".join(_row(row, at == own) for at, row in enumerate(rows))
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table{" class=" + chr(34) + "left" + chr(34) if left else ""}>'
        f"{said}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def nbytes(size: float | None) -> str:
    """Bytes, or a dash where nobody knows."""
    return "–" if size is None else human_bytes(size)


def _row(cells: Sequence[object], own: bool) -> str:
    first, *rest = cells
    made = f'<th scope="row">{_cell(first)}</th>'
    for cell in rest:
        kind = ' class="wide"' if isinstance(cell, Made) else ""
        made += f"<td{kind}>{_cell(cell)}</td>"
    return f"<tr{' class=' + chr(34) + 'own' + chr(34) if own else ''}>{made}</tr>"


def _cell(cell: object) -> str:
    return str(cell) if isinstance(cell, Made) else text(cell)
