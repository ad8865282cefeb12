"""A covering selection of the grid: every model, every mesh, every kind of plan."""

import pytest

from tests.equality.cases import MESHES, MODELS, PLANS, Case, all_cases, run, selection


@pytest.mark.parametrize("case", selection(), ids=str)
def test_program_equals_one_device(case: Case) -> None:
    verification, _ = run(case)
    verification.require()
    assert verification.differences == (), "collectives were counted"


@pytest.mark.slow
@pytest.mark.parametrize("case", list(all_cases()), ids=str)
def test_whole_grid(case: Case) -> None:
    run(case)[0].require()


def test_selection_covers_the_grid() -> None:
    chosen = selection()
    assert {case.model for case in chosen} == set(MODELS)
    assert {case.mesh for case in chosen} == set(MESHES)
    assert {case.plan for case in chosen} == set(PLANS)
