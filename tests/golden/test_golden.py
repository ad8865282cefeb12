"""The text of programs, byte for byte: a change of it is meant, and seen in review.

After a meant change: ``python -m tests.golden.update`` from the repository's root, then read the difference.
"""

from __future__ import annotations

import pytest

from tests.golden.cases import CASES
from tests.golden.update import path_of


@pytest.mark.parametrize("name", CASES)
def test_text_is_the_one_kept(name: str) -> None:
    kept = path_of(name)
    assert kept.exists(), f"{kept.name} is missing: run python -m tests.golden.update"
    assert CASES[name]() == kept.read_text(), f"{kept.name} differs: if that is meant, run python -m tests.golden.update"


def test_no_text_is_left_over() -> None:
    kept = {path.stem for path in path_of("any").parent.glob("*.txt")}
    assert kept == set(CASES)
