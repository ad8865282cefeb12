"""A failing program cut down: lines, outputs and losses left out, values made leaves, while it still fails in the same way.

What is left is the model of a kept test. A plan depends on the graph, so each candidate is tried under several.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.random_programs.drawing import Draw, Unfit
from tests.random_programs.models import Block, check_trains
from tests.random_programs.recipe import Leaf, Line, Recipe, without_dead
from tests.random_programs.running import outcome

PLANS_TRIED = 6
SMALLER: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2), (4,), (2, 3))

Failure = tuple[str, str]


def failure(row: dict[str, Any]) -> Failure:
    """What kind of failure a row is: its stage, and the beginning of the message or what was not equal."""
    if row.get("stage") == "verify":
        return "verify", "values" if "too large" in row["error"] else "collectives"
    return row.get("stage", ""), re.sub(r"[\w.]*\d[\w.]*", "#", row.get("error", ""))[:60]


def shrink(recipe: Recipe, row: dict[str, Any], plan_seed: str) -> tuple[Recipe, dict[str, Any]]:
    """The smallest recipe found that fails as ``row`` does, and its own row with the plan's seed, kind and mesh."""
    wanted, kind = failure(row), row.get("kind")
    best = {**row, "plan_seed": plan_seed, "shape": tuple(row["mesh"]) if "mesh" in row else None}
    shapes: list[Any] = [*[s for s in SMALLER if "mesh" in row], best["shape"]]
    progress = True
    while progress:
        progress = False
        for candidate in candidates(recipe):
            found = _fails(candidate, wanted, kind, shapes, plan_seed)
            if found is not None:
                recipe, best, progress = candidate, found, True
                break
    return recipe, best


def _fails(recipe: Recipe, wanted: Failure, kind: Any, shapes: list[Any], seed: str) -> dict[str, Any] | None:
    try:
        check_trains(recipe)
    except Exception:  # whatever a model that was cut at random may raise, it is not the failure looked for
        return None
    for shape in dict.fromkeys(shapes):
        for plan_seed in dict.fromkeys((seed, *map(str, range(PLANS_TRIED)))):
            row = outcome(recipe, plan_seed, kind, shape)
            if not row["passed"] and failure(row) == wanted:
                return {**row, "plan_seed": plan_seed, "shape": shape}
            if "kind" not in row:
                return None
    return None


def candidates(recipe: Recipe) -> Iterator[Recipe]:
    """Smaller recipes, the boldest first."""
    for name in recipe.losses:
        if len(recipe.losses) > 1:
            yield without_dead(replace(recipe, losses=tuple(n for n in recipe.losses if n != name)))
    for name in recipe.outputs:
        yield without_dead(replace(recipe, outputs=tuple(n for n in recipe.outputs if n != name)))
    yield from _with_leaves(recipe)
    for place, (name, body) in enumerate(recipe.bodies):
        if body.count > 2:
            bodies = list(recipe.bodies)
            bodies[place] = (name, replace(body, count=2))
            yield replace(recipe, bodies=tuple(bodies))


def _with_leaves(recipe: Recipe) -> Iterator[Recipe]:
    """A line left out, what it makes given instead; the last lines first, since most goes with them."""
    d = replayed(recipe)
    for index in reversed(range(len(recipe.lines))):
        line = recipe.lines[index]
        if set(line.makes) & set(recipe.losses):
            continue
        try:
            fresh = [_leaf(d, name) for name in line.makes]
        except Unfit:
            continue
        names = {leaf.name: f"self.{leaf.name}" for leaf in fresh if leaf.kind != "input"}
        lines = [other for place, other in enumerate(recipe.lines) if place != index]
        for name, written in names.items():
            lines = [_renamed(other, name, written) for other in lines]
        if any(name in recipe.outputs for name in names):
            continue
        yield without_dead(replace(recipe, lines=tuple(lines), leaves=(*recipe.leaves, *fresh)))
        for read in line.reads:  # or what it makes is what it reads
            if len(line.makes) == 1 and _alike(d, read, line.makes[0]):
                own = f"self.{read}" if read in {leaf.name for leaf in recipe.leaves if leaf.kind != "input"} else read
                changed = Line(f"{line.makes[0]} = {own}", (read,), line.makes)
                if changed.text != line.text:
                    yield without_dead(
                        replace(recipe, lines=(*recipe.lines[:index], changed, *recipe.lines[index + 1 :]))
                    )


def _alike(d: Draw, name: str, other: str) -> bool:
    if name.startswith(("p", "state")):
        return False
    one, two = d.here.get(name), d.here[other]
    return isinstance(one, torch.Tensor) and one.shape == two.shape and one.dtype == two.dtype


def _renamed(line: Line, name: str, written: str) -> Line:
    return replace(line, text=re.sub(rf"(?<![\w.]){name}\b", written, line.text))


def _leaf(d: Draw, name: str) -> Leaf:
    value = d.value(name).detach()
    shape = d.signs(name)
    if value.dtype == torch.float64:
        low, high = round(float(value.min()) - 0.01, 2), round(float(value.max()) + 0.01, 2)
        return Leaf(name, "input" if -1 in shape else "parameter", shape, "float64", low, high)
    if value.dtype in (torch.int64, torch.bool):
        dtype = "bool" if value.dtype == torch.bool else "int64"
        return Leaf(name, "input", shape, dtype, int(value.min()), int(value.max()) + 1)
    raise Unfit


def replayed(recipe: Recipe) -> Draw:
    """A recipe run again, line by line, so that its shapes are known."""
    d = Draw(random.Random(0), recipe.batch)
    for leaf in recipe.leaves:
        d.add(leaf)
    for name, body in recipe.bodies:
        for space in (d.here, d.other):
            setattr(space["self"], name, [Block(body, f"{name}{index}.") for index in range(body.count)])
    for line in recipe.lines:
        for space in (d.here, d.other):
            exec(line.text, {}, space)
    return d
