"""The lines that change a value's layout: one runtime function a line, with what it sends beside it."""

from __future__ import annotations

import math

from autopar.codegen import text
from autopar.codegen.local_sizes import cuts_of
from autopar.codegen.scope import Scope
from autopar.codegen.statements import Change
from autopar.graph import ITEM_BYTES, Value
from autopar.layout import Layout, Shard
from autopar.mesh import Mesh
from autopar.reshard import Step, step_traffic, steps


def change_lines(
    change: Change, source: str, name: str, value: Value, mesh: Mesh, scope: Scope, indent: int
) -> list[str]:
    """``name = step(source, mesh.axis, ...)`` for each step."""
    lines: list[str] = []
    current = change.source
    for step in steps(change.source, change.target):
        after = (*current[: step.axis], step.target, *current[step.axis + 1 :])
        arguments = ", ".join(
            [source, text.axis_text(mesh, step.axis), *_places(step, current, after, value, mesh, scope)]
        )
        code = f"{name} = {scope.runtime(step.name)}({arguments})"
        lines += text.line(code, indent, _comment(step, current, value, mesh, change.flows))
        source, current = name, after
    return lines


def _places(step: Step, before: Layout, after: Layout, value: Value, mesh: Mesh, scope: Scope) -> list[str]:
    """The dim of a step and how it is cut, where that is not evenly."""
    if isinstance(step.source, Shard) and isinstance(step.target, Shard):
        splits = [
            _split(before, step.source.dim, step.axis, value, mesh, scope),
            _split(after, step.target.dim, step.axis, value, mesh, scope),
        ]
        named = [
            f"{word}={split}" for word, split in zip(("source_split", "target_split"), splits, strict=True) if split
        ]
        return [str(step.source.dim), str(step.target.dim), *named]
    for state, layout in ((step.source, before), (step.target, after)):
        if isinstance(state, Shard):
            split = _split(layout, state.dim, step.axis, value, mesh, scope)
            return [str(state.dim), *([f"split={split}"] if split else [])]
    return []


def _split(layout: Layout, dim: int, axis: int, value: Value, mesh: Mesh, scope: Scope) -> str | None:
    """The name of the split of a dim; None where the pieces along ``axis`` are equal, contiguous and innermost."""
    cutting = [other for other, state in enumerate(layout) if isinstance(state, Shard) and state.dim == dim]
    parts = math.prod(mesh.shape[other] for other in cutting)
    plain = all(state.cut.is_plain for state in layout if isinstance(state, Shard) and state.dim == dim)
    if plain and value.shape[dim] % parts == 0 and axis == cutting[-1]:
        return None
    return scope.split(value.shape[dim], cuts_of(layout, dim, scope))


def _comment(step: Step, before: Layout, value: Value, mesh: Mesh, flows: bool) -> str:
    """``P -> R; all-reduce 12.6 MB``."""
    comment = f"{text.word(step.source)} -> {text.word(step.target)}"
    if mesh.shape[step.axis] == 1:
        return comment
    ahead, back = step_traffic(step, before, value.shape, mesh.shape, ITEM_BYTES[value.dtype])
    if ahead:
        comment += f"; {ahead.kind.replace('_', '-')} {text.megabytes(ahead.num_bytes)}"
    if back and flows:
        comment += f"; backward: {back.kind.replace('_', '-')} {text.megabytes(back.num_bytes)}"
    return comment
