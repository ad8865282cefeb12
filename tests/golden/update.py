"""Write the kept texts anew: ``python -m tests.golden.update`` from the repository's root; names after it choose some."""

from __future__ import annotations

import sys
from pathlib import Path


def path_of(name: str) -> Path:
    """The file that keeps a case's text."""
    return Path(__file__).parent / f"{name}.txt"


def main(names: list[str]) -> None:
    """Write the texts of the cases named, or of all."""
    from tests.golden.cases import CASES

    for name in names or CASES:
        path_of(name).write_text(CASES[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
