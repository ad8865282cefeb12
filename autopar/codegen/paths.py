"""Module paths as words of a program: the short forms that still tell them apart, and runs of numbered ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def listed(paths: Sequence[str], place_of: Mapping[str, tuple[str, int]]) -> str:
    """``h.0 ... h.3, h.7``: consecutive blocks of one group together. ``place_of``: a path's group and place in the model."""
    found: list[list[str]] = []
    for path in sorted(paths, key=lambda path: place_of[path][1]):
        group, at = place_of[path]
        if found and place_of[found[-1][-1]] == (group, at - 1):
            found[-1].append(path)
        else:
            found.append([path])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} ... {run[-1]}" for run in found)


def short(path: str) -> str:
    """The last parts of a path, from the last one that is a name."""
    parts = path.split(".")
    start = max((at for at, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(parts[start:])


def shortened(paths: Sequence[str], least: int = 2) -> dict[str, str]:
    """The shortest endings, of so many parts at least, that tell paths apart."""
    found = {}
    for path in paths:
        parts = path.split(".")
        for length in range(min(least, len(parts)), len(parts) + 1):
            tail = parts[-length:]
            alone = sum(other.split(".")[-length:] == tail for other in paths) == 1
            if (alone and not tail[0].isdigit()) or length == len(parts):
                found[path] = ".".join(tail)
                break
    return found


def numbered(paths: Sequence[str]) -> tuple[str, list[int] | None, str]:
    """``a.3.b``, ``a.4.b`` -> ``a.``, [3, 4], ``.b``; None for the numbers when the paths are not of that form."""
    rows = [path.split(".") for path in paths]
    differing = [at for at in range(len(rows[0])) if len({row[at] if at < len(row) else "" for row in rows}) > 1]
    if len(differing) == 1 and len({len(row) for row in rows}) == 1:
        at = differing[0]
        numbers = [int(row[at]) for row in rows if row[at].isdigit()]
        if numbers == list(range(numbers[0], numbers[0] + len(rows))) if numbers else False:
            before, after = ".".join(rows[0][:at]), ".".join(rows[0][at + 1 :])
            return (f"{before}." if before else ""), numbers, (f".{after}" if after else "")
    return "", None, ""
