"""Aligned columns and amounts of memory as text. GB is 1e9 bytes."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]], align: str = "<>") -> str:
    """Aligns cells in columns, two spaces apart.

    Args:
      rows: all with as many cells; the first may be a header.
      align: "<" or ">" for each column, the last one for those that follow.

    >>> print(table([["", "GB"], ["state", 1.875]]))
              GB
    state  1.875
    """
    cells = [[str(cell) for cell in row] for row in rows]
    sides = align + align[-1] * len(cells[0])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(f"{c:{side}{w}}" for c, side, w in zip(row, sides, widths, strict=False)).rstrip()
        for row in cells
    )


def gigabytes(size: float) -> str:
    """Bytes as text, 1e9 to the GB.

    >>> gigabytes(1.5e9), gigabytes(2.5e6), gigabytes(0)
    ('1.50 GB', '2.50 MB', '0')
    """
    if size >= 1e9:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:.2f} MB" if size >= 1e4 else f"{size:.0f} B" if size else "0"
