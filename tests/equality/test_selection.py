"""Covering selections of the grids: every model, every mesh, every kind of plan; every schedule and every way to recompute."""

import pytest

from autopar.recompute import MODES
from tests.equality.cases import MESHES, MODELS, PLANS, Case, all_cases, run, selection
from tests.equality.pipelines import (
    BATCHES,
    SCHEDULES,
    SPREADS,
    PipelineCase,
    all_pipelines,
    pipeline_selection,
    run_pipeline,
)
from tests.equality.pipelines import MODELS as IN_STAGES


@pytest.mark.parametrize("case", selection(), ids=str)
def test_program_equals_one_device(case: Case) -> None:
    verification, _ = run(case)
    verification.require()
    assert verification.differences == (), "collectives were counted"


@pytest.mark.parametrize("case", pipeline_selection(), ids=str)
def test_pipeline_equals_one_device(case: PipelineCase) -> None:
    verification, plan = run_pipeline(case)
    verification.require()
    assert verification.differences == (), "collectives were counted"
    assert len(plan.stages) == case.num_stages and plan.schedule == case.schedule


@pytest.mark.slow
@pytest.mark.parametrize("case", list(all_cases()), ids=str)
def test_whole_grid(case: Case) -> None:
    run(case)[0].require()


@pytest.mark.slow
@pytest.mark.parametrize("case", list(all_pipelines()), ids=str)
def test_whole_grid_of_pipelines(case: PipelineCase) -> None:
    run_pipeline(case)[0].require()


def test_selection_covers_the_grid() -> None:
    chosen = selection()
    assert {case.model for case in chosen} == set(MODELS)
    assert {case.mesh for case in chosen} == set(MESHES)
    assert {case.plan for case in chosen} == set(PLANS)


def test_selection_covers_the_grid_of_pipelines() -> None:
    chosen = pipeline_selection()
    assert {case.model for case in chosen} == set(IN_STAGES) and {case.num_ranks for case in chosen} == set(BATCHES)
    assert {(case.schedule, case.spread) for case in chosen} == {(s, spread) for s in SCHEDULES for spread in SPREADS}
    assert {(case.spread, case.recompute) for case in chosen} == {
        (spread, mode) for spread in SPREADS for mode in MODES
    }
