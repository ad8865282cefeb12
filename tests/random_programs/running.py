"""One random program: drawn, traced, planned, generated, run on simulated ranks, and compared with the plain model."""

from __future__ import annotations

import re
import time
from collections import Counter
from functools import lru_cache
from typing import Any

from torch import nn

from autopar.codegen import generate
from autopar.graph import check
from autopar.plans import Plan, graphs_of
from autopar.runtime.steps import PAIRS
from autopar.tracing import Traced, trace
from autopar.verifier import verify_traced
from tests.random_programs.models import draw_recipe
from tests.random_programs.plans import draw_plan
from tests.random_programs.recipe import Recipe, build

PLANS_PER_MODEL = 4
TIMEOUT_SECONDS = 120.0


def model_seed(seed: int) -> str:
    """Of which model a program is: tracing costs as much as the rest, so each has several plans."""
    return str(seed // PLANS_PER_MODEL)


def run_program(seed: int) -> dict[str, Any]:
    """The row of program ``seed``: whether it is equal, what is wrong where not, and what it exercised."""
    start = time.perf_counter()
    row: dict[str, Any] = {"seed": seed}
    try:
        row |= outcome(drawn(model_seed(seed)), str(seed))
    except Exception as error:
        row |= {"passed": False, "stage": "draw", "error": f"{type(error).__name__}: {error}"[:2000]}
    return {**row, "seconds": round(time.perf_counter() - start, 2)}


def outcome(
    recipe: Recipe, plan_seed: str, kind: str | None = None, shape: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """What becomes of a model under a random plan (``draw_plan``)."""
    stage = "trace"
    row: dict[str, Any] = {"passed": False}
    try:
        model, traced = prepared(recipe)
        stage = "plan"
        kind, plan = draw_plan(traced.graph, plan_seed, kind, shape)
        row |= {"kind": kind, "mesh": list(plan.stages[0].mesh.shape), "operators": len(traced.graph.operators)}
        stage = "generate"
        text = generate(plan, traced.graph)
        row |= exercised(plan, traced, text)
        stage = "run"
        found = verify_traced(model, traced, plan, count_collectives=True, timeout_seconds=TIMEOUT_SECONDS)
        row |= {"passed": found.passed, "errors": {m.kind: m.error for m in found.measures}}
        if not found.passed:
            row |= {"stage": "verify", "error": str(found)[:2000]}
    except Exception as error:
        row |= {"stage": stage, "error": f"{type(error).__name__}: {error}"[:2000]}
    return row


@lru_cache(maxsize=2)
def drawn(seed: str) -> Recipe:
    """The model of a seed."""
    return draw_recipe(seed)


@lru_cache(maxsize=2)
def prepared(recipe: Recipe) -> tuple[nn.Module, Traced]:
    """The model of a recipe, and its trace."""
    model, inputs, dims = build(recipe)
    traced = trace(model, inputs, batch_dims=dims)
    check(traced.graph)
    return model, traced


def exercised(plan: Plan, traced: Traced, text: str) -> dict[str, Any]:
    """Operators by target, (target, letter) pairs that were split, steps of layout changes in the text, storage levels."""
    targets = Counter(operator.target for operator in traced.graph.operators)
    letters: set[str] = set()
    zero: set[int] = set()
    for stage, graph in zip(plan.stages, graphs_of(plan, traced.graph), strict=True):
        for name, chosen in stage.operators.items():
            words = {re.sub(r"\[.*?\]", "", word) for word in chosen.label.split()}
            letters.update(f"{graph.operator_of[name].target} {word}" for word in words if word != "R")
        zero.update(parameter.zero for parameter in stage.parameters.values())
    steps = [name for name in PAIRS if re.search(rf"\b{name}\(", text)]
    modes = {mode for stage in plan.stages for group in stage.recompute.values() for mode in group}
    return {
        "targets": dict(targets), "letters": sorted(letters), "steps": steps, "zero": sorted(zero),
        "recompute": sorted(modes), "num_stages": len(plan.stages), "micro_batches": plan.num_micro_batches,
    }  # fmt: skip
