"""The JSON of a profile: written the same for equal profiles, read with every value checked.

    {"kind": "autopar profile", "schema_version": 1,
     "machine": {"device": "AMD EPYC", "kind": "cpu", "devices_per_node": [2], "threads": 1, "cores": 2,
                 "torch_version": "2.13.0"},
     "operators": {"aten.gelu.default(float32[8,64]g) -> float32[8,64]": {"forward_seconds": 5e-6, ...}},
     "collectives": {"all_reduce size=2 stride=1 groups=1 per_node=2": [[1024, 1e-4, 0.05, 15], ...]},
     "memory": {"copy": [[1024, 2e-6, 0.02, 9], ...]},
     "overlaps": {"size=2 stride=1 groups=1 per_node=2": {"compute_slowdown": 1.5, "collective_slowdown": 1.7}},
     "contexts": {"GPT2LMHeadModel 1f2e, batch 4": {"num_operators": 120, "forward_seconds": 0.1, ...}},
     "unmeasurable": ["mylib.solve.default(float32[8,8]g) -> float32[8]"],
     "finished": {"GPT2LMHeadModel 9a1c...": 120.0},
     "runs": [{"plan": "1f2e...", "predicted_seconds": 0.2, "measured_seconds": 0.21, "num_steps": 10}]}

A point of a curve is [bytes, seconds, spread, rounds].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, TypeVar

from cost_models.errors import ProfileError
from cost_models.measurements import Context, Curve, Machine, OperatorEntry, Overlap, Point, Run

SCHEMA_VERSION = 1
KIND = "autopar profile"
PARTS = ("machine", "operators", "collectives", "memory", "overlaps", "contexts", "unmeasurable", "finished", "runs")
AGAIN = "measure again with 'autopar profile'"

DataclassEntry = OperatorEntry | Overlap | Context | Run
Entry = TypeVar("Entry", Machine, OperatorEntry, Overlap, Context, Run)


def profile_to_json(
    machine: Machine,
    operators: Mapping[str, OperatorEntry],
    collectives: Mapping[str, Curve],
    memory: Mapping[str, Curve],
    overlaps: Mapping[str, Overlap],
    contexts: Mapping[str, Context],
    unmeasurable: Sequence[str],
    finished: Mapping[str, float],
    runs: Sequence[Run],
) -> str:
    """JSON text: one entry a line, so that two profiles can be compared as text."""
    parts = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "machine": asdict(machine),
        "operators": {key: _plain(entry) for key, entry in operators.items()},
        "collectives": {key: _points(curve) for key, curve in collectives.items()},
        "memory": {key: _points(curve) for key, curve in memory.items()},
        "overlaps": {key: _plain(overlap) for key, overlap in overlaps.items()},
        "contexts": {key: _plain(context) for key, context in contexts.items()},
        "unmeasurable": list(unmeasurable),
        "finished": {key: float(seconds) for key, seconds in finished.items()},
        "runs": [_plain(run) for run in runs],
    }
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(part)}" for name, part in parts.items()) + "\n}\n"


def _plain(entry: DataclassEntry) -> dict[str, Any]:
    """The fields of a dataclass, with whole numbers as floats where they are annotated so: equal entries have equal text."""
    return {
        one.name: float(getattr(entry, one.name)) if one.type == "float" else getattr(entry, one.name)
        for one in fields(entry)
    }


def _points(curve: Curve) -> list[list[float]]:
    return [[float(point.num_bytes), float(point.seconds), float(point.spread), point.count] for point in curve.points]


def _lines(part: object) -> str:
    """A part's text with one entry a line."""
    if isinstance(part, dict) and part and not isinstance(next(iter(part.values())), (str, int, float)):
        rows = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in part.items()]
        return "{\n" + ",\n".join(rows) + "\n}"
    return json.dumps(part, allow_nan=False)


def parse_profile(text: str) -> dict[str, Any]:
    """Read JSON text: the fields of a profile by name.

    Raises:
        ProfileError: says where, what was found, and what to do.
    """
    data = _decoded(text)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ProfileError(
            f'this is not a profile: it has no "kind": "{KIND}"; give a file that \'autopar profile\' wrote'
        )
    version = data.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ProfileError(f"schema_version is {version!r} and this version reads {SCHEMA_VERSION}: {AGAIN}")
    known = {"kind", "schema_version", *PARTS}
    if set(data) != known:
        missing, strange = sorted(known - set(data)), sorted(set(data) - known)
        raise ProfileError(f"the profile lacks {missing} and has {strange}, which are not known here: {AGAIN}")
    return {
        "machine": _entry("machine", Machine, data["machine"]),
        "operators": {key: _entry(key, OperatorEntry, value) for key, value in _named(data, "operators").items()},
        "collectives": {key: _curve(key, value) for key, value in _named(data, "collectives").items()},
        "memory": {key: _curve(key, value) for key, value in _named(data, "memory").items()},
        "overlaps": {key: _entry(key, Overlap, value) for key, value in _named(data, "overlaps").items()},
        "contexts": {key: _entry(key, Context, value) for key, value in _named(data, "contexts").items()},
        "unmeasurable": tuple(_checked("unmeasurable", "str", key) for key in _listed(data, "unmeasurable")),
        "finished": {key: _number(key, value) for key, value in _named(data, "finished").items()},
        "runs": tuple(_entry(f"runs[{index}]", Run, value) for index, value in enumerate(_listed(data, "runs"))),
    }


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ProfileError(f"the profile is nested too deeply to be one: {AGAIN}") from error
    except json.JSONDecodeError as error:
        ends_early = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated")
        cut = "; the file seems to be cut off" if ends_early else ""
        raise ProfileError(
            f"the profile is not JSON: {error.msg} at line {error.lineno} column {error.colno}{cut}; {AGAIN}"
        ) from error


def _named(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = data[name]
    if not isinstance(found, dict):
        raise ProfileError(f"{name} is {type(found).__name__}, not an object: {AGAIN}")
    return found


def _listed(data: Mapping[str, Any], name: str) -> list[Any]:
    found = data[name]
    if not isinstance(found, list):
        raise ProfileError(f"{name} is {type(found).__name__}, not a list: {AGAIN}")
    return found


def _entry(where: str, cls: type[Entry], value: Any) -> Entry:
    """A dataclass from its JSON, every field checked by its annotation."""
    if not isinstance(value, dict):
        raise ProfileError(f"{where} is {value!r}, not an object: {AGAIN}")
    names = {one.name: one for one in fields(cls)}
    wrong = sorted(set(value) ^ set(names))
    if wrong and any(name not in names or names[name].default is MISSING for name in wrong):
        raise ProfileError(f"{where}: {', '.join(wrong)} is missing or not known here: {AGAIN}")
    made: dict[str, Any] = {}
    for name, item in value.items():
        made[name] = _checked(f"{where}: {name}", str(names[name].type), item)
    return cls(**made)


def _checked(where: str, kind: str, item: Any) -> Any:
    if kind == "str":
        if not isinstance(item, str):
            raise ProfileError(f"{where} is {item!r}, not text: {AGAIN}")
        return item
    if kind == "tuple[int, ...]":
        if not isinstance(item, list):
            raise ProfileError(f"{where} is {item!r}, not a list of numbers: {AGAIN}")
        return tuple(int(_number(where, each)) for each in item)
    number = _number(where, item)
    return int(number) if kind == "int" else number


def _number(where: str, item: Any) -> float:
    if isinstance(item, bool) or not isinstance(item, (int, float)) or not math.isfinite(item) or item < 0:
        raise ProfileError(f"{where} is {item!r}, not a number of 0 or more: {AGAIN}")
    return float(item)


def _curve(where: str, value: Any) -> Curve:
    if not isinstance(value, list) or any(not isinstance(point, list) or len(point) != 4 for point in value):
        raise ProfileError(f"{where} is no list of points [bytes, seconds, spread, rounds]: {AGAIN}")
    points = [[_number(where, item) for item in point] for point in value]
    try:
        return Curve(tuple(Point(size, seconds, spread, int(count)) for size, seconds, spread, count in points))
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}; {AGAIN}") from error
