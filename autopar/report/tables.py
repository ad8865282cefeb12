"""Rows of text with columns aligned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_ROWS = 24


def shortened(rows: Sequence[tuple[str, ...]], what: str) -> Iterable[str]:
    """The first rows, and how many more there are."""
    yield from table(rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        yield f"  ... and {len(rows) - MAX_ROWS} more {what} (see the JSON report)"


def table(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    """Rows with columns aligned; numbers are ranged right by their column."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if _is_amount(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        yield ("  " + "  ".join(cells)).rstrip()


def _is_amount(cell: str) -> bool:
    return bool(cell) and (cell[0].isdigit() or cell[0] == "-") and len(cell) < 12 and " x " not in cell
