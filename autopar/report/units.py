"""Numbers as people read them. The only place where SI units become others."""

from __future__ import annotations

import math


def seconds_text(seconds: float | None) -> str:
    """``1.23 s``, ``4.56 ms``, ``7.9 us``; ``-`` for none."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{_three(seconds / factor)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def bytes_text(num_bytes: float | None) -> str:
    """``3.21 GiB``, ``512 KiB``, ``12 B``; ``-`` for none."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return "-"
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(num_bytes) >= 2**power:
            return f"{_three(num_bytes / 2**power)} {unit}"
    return f"{num_bytes:.0f} B"


def _three(number: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"


def count_text(number: float) -> str:
    """``1.24e9`` as ``1.24 G`` and the like, for parameters and FLOPs."""
    for factor, unit in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def percent_text(fraction: float) -> str:
    """``12.3%``."""
    return f"{100 * fraction:.3g}%"
