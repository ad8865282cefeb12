"""A sample of the random programs; all of them: ``python -m tests.random_programs``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.random_programs.models import draw_recipe
from tests.random_programs.recipe import source
from tests.random_programs.running import PLANS_PER_MODEL, run_program
from tests.random_programs.shrinking import candidates, shrink

SAMPLE = range(2000, 2005)  # models that the documented run does not have


@pytest.mark.parametrize("model", SAMPLE)
def test_programs_of_a_random_model(model: int) -> None:
    for number in range(PLANS_PER_MODEL):
        row = run_program(model * PLANS_PER_MODEL + number)
        assert row["passed"], row
        assert row["operators"] >= 10


def test_the_same_seed_is_the_same_model() -> None:
    one, other = draw_recipe("7"), draw_recipe("7")
    assert one == other and source(one) == source(other)
    assert source(one) != source(draw_recipe("8"))


def test_a_failure_is_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault that any program with a certain operator has, little more than that operator is left."""
    recipe = draw_recipe("7")
    blamed = recipe.lines[len(recipe.lines) // 2].text

    def outcome(candidate, *plan):
        failed = any(line.text == blamed for line in candidate.lines)
        return {"passed": not failed, "kind": "wild", "stage": "run", "error": "a fault"}

    monkeypatch.setattr("tests.random_programs.shrinking.outcome", outcome)
    small, row = shrink(recipe, outcome(recipe), "7")
    assert row["error"] == "a fault" and any(line.text == blamed for line in small.lines)
    assert len(small.lines) <= 4 < len(recipe.lines), source(small)
    assert all(replace(each, seed="") != replace(recipe, seed="") for each in candidates(recipe))
