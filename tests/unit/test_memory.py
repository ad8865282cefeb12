"""The predicted peak of a plan's memory against the allocations of a rank that runs it.

Two of the twelve plans are tried here; all of them, as in ``python -m tests.benchmarks.bench_memory``, with

    pytest -m slow tests/unit/test_memory.py
"""

from __future__ import annotations

import pytest

from autopar.costing.kept import KeptBytes
from autopar.tracing import trace
from tests.support.memory import CASES, DROPOUT_CASES, OFFLOAD_CASES, Case, compare, make_model, planned

MOST_OVER, MOST_UNDER = 0.10, 0.03
QUICK = (CASES[2], CASES[10])


def assert_predicted(case: Case) -> None:
    for found in compare(case):
        assert 1 - MOST_UNDER <= found.ratio <= 1 + MOST_OVER, (found.case, found.pipeline_rank, found.ratio)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_predicted_peak_is_that_of_the_allocator(case: Case) -> None:
    assert_predicted(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *DROPOUT_CASES, *OFFLOAD_CASES], ids=str)
def test_the_predicted_peak_is_that_of_the_allocator_for_all_plans(case: Case) -> None:
    assert_predicted(case)


def test_a_change_between_runs_is_kept_for_every_micro_batch_in_flight() -> None:
    """What is sent between two runs that are computed again is in neither of them: it is made once, and kept."""
    case = Case("gpt2", "tensor", num_micro_batches=4, recompute="selective")
    model, batch = make_model(case)
    _, (candidate,) = planned(case, trace(model, batch))
    costed, choices = candidate.costed, candidate.assignment.choices
    assert choices is not None
    runs = KeptBytes(costed.prepared, costed.setting).run_of
    changes = zip(costed.problem.edges, costed.edges_made, costed.edges_forward, costed.edges_reader, strict=True)
    found = 0
    for edge, made, forward, reader in changes:
        pair = choices[edge.source], choices[edge.target]
        run = runs.get(reader[0]) if isinstance(reader, tuple) else None
        if run is not None and made is not None and made[pair] and forward is not None and forward[pair]:
            assert edge.memory_bytes is not None
            assert edge.memory_bytes[0][pair] == made[pair] * costed.setting.in_flight, reader
            found += 1
    assert found, "the plan has such changes"
