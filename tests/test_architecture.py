"""Who may import whom, and what may be used where: read from the sources, so that the layers stay what README's map says.

The rules are the tables below; :func:`violations` reads source texts against them. For each kind of rule a planted breach
shows that it can fail. Imports inside functions and under ``TYPE_CHECKING`` count: to know a type is to know its layer.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("autopar", "cost_models")
MAX_LINES = 500

# A layer imports only layers above it in this list, and itself. ``autopar`` is the package's own file: the public names.
LAYERS = (
    "cost_models",
    "autopar.runtime",
    "autopar.errors",
    "autopar.collection",
    "autopar.mesh",
    "autopar.options",
    "autopar.layout",
    "autopar.graph",
    "autopar.batching",
    "autopar.staging",
    "autopar.plans",
    "autopar.reshard",
    "autopar.gradients",
    "autopar.sharing",
    "autopar.strategies",
    "autopar.recompute",
    "autopar.micro_batches",
    "autopar.codegen",
    "autopar.solver",
    "autopar.costing",
    "autopar.forcing",
    "autopar.fitting",
    "autopar.search",
    "autopar.report",
    "autopar.tracing",
    "autopar.prober",
    "autopar.detection",
    "autopar.planner",
    "autopar.validation",
    "autopar.randomness",
    "autopar.initial",
    "autopar.simulation",
    "autopar.binding",
    "autopar.ranks",
    "autopar.parallel",
    "autopar.verifier",
    "autopar.launching",
    "autopar.profiler",
    "autopar",
    "autopar.references",
    "autopar.training",
    "autopar.running",
    "autopar.demo",
    "autopar.demo_rank",
    "autopar.cli",
    "autopar.__main__",
)

# Packages beside the standard library that a layer may import; a layer that is not here needs none, torch included.
EXTERNAL = {
    "cost_models": {"numpy", "networkx", "pynvml"},
    "autopar.runtime": {"torch"},
    "autopar.fitting": {"numpy"},
    "autopar.search": {"numpy"},
    "autopar.layout": {"numpy"},
    "autopar.strategies": {"networkx", "typing_extensions"},  # typing_extensions for annotations only
    "autopar.solver": {"numpy", "networkx", "ortools"},
    "autopar.costing": {"numpy"},
    "autopar.report": {"numpy", "jsonschema"},
    "autopar.tracing": {"torch"},
    "autopar.prober": {"torch"},
    "autopar.detection": {"torch"},
    "autopar.planner": {"numpy", "torch"},
    "autopar.validation": {"numpy", "torch"},
    "autopar.randomness": {"torch"},
    "autopar.initial": {"torch"},
    "autopar.simulation": {"torch"},
    "autopar.profiler": {"numpy", "torch"},
    "autopar.verifier": {"torch"},
    "autopar.ranks": {"torch"},
    "autopar.parallel": {"torch"},
    "autopar.references": {"torch"},
    "autopar.training": {"torch"},
    "autopar.running": {"torch"},
    "autopar.demo": {"torch", "transformers"},
    "autopar.demo_rank": {"torch"},
    "autopar.cli": {"rich"},
}

# What only some modules may import or use, whatever their layer.
ONLY_IN = {
    "autopar.cli": ("autopar.__main__",),
    "autopar.runtime": (
        "autopar.simulation",
        "autopar.profiler",
        "autopar.parallel",
        "autopar.verifier",
        "autopar.__init__",
    ),
    "cost_models": tuple(
        (
            "autopar.options autopar.costing autopar.search autopar.report autopar.detection "
            "autopar.planner autopar.validation autopar.binding autopar.profiler autopar.parallel autopar.verifier "
            "autopar.__init__ autopar.references autopar.running autopar.demo autopar.demo_rank autopar.cli"
        ).split()
    ),
    "importlib": ("autopar.__init__", "autopar.parallel", "autopar.verifier", "autopar.references"),
    "os.environ": ("autopar.runtime", "autopar.binding", "autopar.launching", "autopar.cli"),
    "os.getenv": ("autopar.runtime", "autopar.binding", "autopar.launching", "autopar.cli"),
    "torch.export": ("autopar.tracing",),
    "torch.testing": ("autopar.simulation",),
}

# The solver sees problems and never operators: errors are all of autopar that it knows.
ONLY_IMPORTS = {"autopar.solver": {"autopar.errors"}}

# torch's private names: each has one home, so that a new version of torch is a matter of that file.
PRIVATE_TORCH = {
    "torch.Tensor._make_wrapper_subclass": "autopar.runtime.pieces",
    "torch._C": "autopar.simulation",
    "torch._ops": "autopar.tracing",
    "torch._subclasses": "autopar.tracing",
    "torch.distributed.distributed_c10d": "autopar.simulation",
    "torch.distributed.pipelining": "autopar.runtime.stages",
    "torch.distributed.tensor._dtensor_spec": "autopar.runtime.host",
    "torch.ops._c10d_functional": "autopar.runtime.collectives",
    "torch.testing._internal": "autopar.simulation",
    "torch.utils._pytree": "autopar.tracing",
    "torch.utils._python_dispatch": "autopar.tracing.autocast",
}

MAY_PRINT = "autopar.cli"

# Files past MAX_LINES, each with its reason.
LONG_FILES: dict[str, str] = {}


def test_sources_keep_the_rules() -> None:
    found = violations(read_sources(PACKAGES))
    assert not found, "\n".join(found)


def test_no_file_is_long_without_a_reason() -> None:
    sources = read_sources((*PACKAGES, "tests", "examples"))
    found = long_files(sources)
    assert not found, "\n".join(found)
    stale = [path for path in LONG_FILES if not long_files({path: sources.get(path, "")}, reasons={})]
    assert not stale, f"no longer long, remove them from LONG_FILES: {stale}"


def test_tables_name_layers() -> None:
    assert set(EXTERNAL) | set(ONLY_IMPORTS) <= set(LAYERS)
    homes = [home for allowed in ONLY_IN.values() for home in allowed] + list(PRIVATE_TORCH.values())
    assert not [home for home in homes if not layer_of(home)]
    assert not unknown_homes(read_sources(PACKAGES))


def test_runtime_loads_nothing_else_of_ours() -> None:
    loaded = modules_after("import autopar.runtime")
    ours = {name for name in loaded if within(name, *PACKAGES) and not within(name, "autopar.runtime")}
    assert ours == {"autopar"}
    assert not {name for name in loaded if within(name, "ortools", "rich", "jsonschema", "transformers")}


def test_package_itself_loads_nothing() -> None:
    loaded = modules_after("import autopar; dir(autopar); autopar.__version__")
    assert {name for name in loaded if within(name, *PACKAGES)} == {"autopar"}
    assert not {name for name in loaded if within(name, "torch", "numpy", "ortools")}


def test_planning_from_a_graph_loads_no_torch() -> None:
    loaded = modules_after("import autopar.costing, autopar.solver, autopar.strategies, autopar.reshard, autopar.plans")
    assert "torch" not in loaded


def test_public_names_resolve_to_what_they_say() -> None:
    script = """
import importlib, pkgutil, autopar
for name in autopar.__all__:
    assert getattr(autopar, name) is not None, name
submodules = {module.name for module in pkgutil.iter_modules(autopar.__path__)}
assert not submodules & set(autopar.__all__), "a submodule would replace the public name"
for name in sorted(submodules - {"__main__", "cli", "demo_rank"}):
    importlib.import_module(f"autopar.{name}")
assert callable(autopar.plan) and callable(autopar.trace) and callable(autopar.verify) and callable(autopar.parallelize)
assert set(autopar.__all__) <= set(dir(autopar))
from autopar import *
try:
    autopar.nothing_like_it
except AttributeError as error:
    assert "nothing_like_it" in str(error)
else:
    raise AssertionError("an unknown name must raise AttributeError")
"""
    modules_after(script)


PLANTED: dict[str, tuple[dict[str, str], str]] = {
    "lower layer imports upper": (
        {"autopar/layout.py": "import autopar.planner"},
        "autopar.layout may not import autopar.planner",
    ),
    "layer order inside a function": (
        {"autopar/graph.py": "def f():\n    from autopar.costing import build"},
        "autopar.graph may not import autopar.costing",
    ),
    "relative import": (
        {"autopar/solver/ilp.py": "from ..graph import OpGraph"},
        "autopar.solver may not import autopar.graph",
    ),
    "solver sees options": (
        {"autopar/solver/search.py": "from autopar import options"},
        "autopar.solver may not import autopar.options",
    ),
    "cost models import autopar": (
        {"cost_models/memory.py": "import autopar.errors"},
        "cost_models may not import autopar.errors",
    ),
    "cost models import torch": ({"cost_models/memory.py": "import torch"}, "cost_models may not import torch"),
    "torch in a rule": (
        {"autopar/strategies/views.py": "from torch import nn"},
        "autopar.strategies may not import torch",
    ),
    "torch under TYPE_CHECKING": (
        {"autopar/reshard.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.fx"},
        "autopar.reshard may not import torch",
    ),
    "package by name": (
        {"autopar/verifier.py": "import importlib\nimportlib.import_module('ortools.sat')"},
        "autopar.verifier may not import ortools",
    ),
    "codegen sees costs": (
        {"autopar/codegen/emit.py": "from autopar.costing import build"},
        "autopar.codegen may not import autopar.costing",
    ),
    "codegen sees the solver": (
        {"autopar/codegen/emit.py": "from autopar.solver.problem import Problem"},
        "autopar.codegen may not import autopar.solver",
    ),
    "codegen sees cost models": ({"autopar/codegen/emit.py": "import cost_models"}, "cost_models is only for"),
    "runtime imports ours": (
        {"autopar/runtime/mesh.py": "from autopar.errors import InputError"},
        "autopar.runtime may not import autopar.errors",
    ),
    "runtime imports others'": ({"autopar/runtime/mesh.py": "import numpy"}, "autopar.runtime may not import numpy"),
    "costing imports runtime": (
        {"autopar/costing/x.py": "from autopar.runtime import Mesh"},
        "autopar.runtime is only for",
    ),
    "torch.export by import": ({"autopar/parallel.py": "from torch.export import export"}, "torch.export is only for"),
    "torch.export by attribute": (
        {"autopar/parallel.py": "import torch as t\nt.export.load('x')"},
        "torch.export is only for",
    ),
    "environment": ({"autopar/planner.py": "import os\nos.environ['A']"}, "os.environ is only for"),
    "private torch elsewhere": (
        {"autopar/parallel.py": "from torch.testing._internal import common_utils"},
        "torch.testing._internal is only for",
    ),
    "private torch by attribute": (
        {"autopar/runtime/mesh.py": "import torch\ntorch._C._autograd"},
        "torch._C is only for",
    ),
    "private torch without a home": ({"autopar/parallel.py": "import torch._dynamo"}, "torch._dynamo is private"),
    "cli is imported": ({"autopar/parallel.py": "from autopar.cli import main"}, "autopar.cli is only for"),
    "public face from inside": (
        {"autopar/verifier.py": "from autopar import plan"},
        "autopar.verifier may not import autopar",
    ),
    "print": ({"autopar/planner.py": "print('planned')"}, "print() is for the command line"),
    "module without a layer": ({"autopar/helpers.py": ""}, "autopar.helpers has no layer"),
    "cycle": (
        {
            "autopar/solver/a.py": "import autopar.solver.b",
            "autopar/solver/b.py": "def f():\n    from autopar.solver import a",
        },
        "import cycle: autopar.solver.a -> autopar.solver.b -> autopar.solver.a",
    ),
    "cycle through the package": (
        {
            "autopar/solver/__init__.py": "from autopar.solver.a import x",
            "autopar/solver/a.py": "from autopar.solver import y",
        },
        "import cycle: autopar.solver -> autopar.solver.a -> autopar.solver",
    ),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_violation_is_found(kind: str) -> None:
    sources, message = PLANTED[kind]
    found = violations(sources)
    assert len(found) == 1, found
    assert message in found[0]
    assert found[0].startswith(tuple(sources))


def test_planted_long_file_is_found() -> None:
    sources = {"autopar/mesh.py": "\n" * (MAX_LINES + 1), "autopar/graph.py": "\n" * MAX_LINES}
    assert long_files(sources) == [f"autopar/mesh.py: {MAX_LINES + 1} lines, more than {MAX_LINES}: split it"]
    assert not long_files(sources, reasons={"autopar/mesh.py": "a table"})


def test_what_is_allowed_is_not_found() -> None:
    sources = {
        "autopar/__init__.py": "from importlib import import_module\nfrom autopar.planner import plan",
        "autopar/codegen/emit.py": "from autopar import __version__, graph\nfrom autopar.graph import print_graph",
        "autopar/cli.py": "import os\nimport autopar\nprint(os.environ)",
        "autopar/__main__.py": "from autopar.cli import main",
        "autopar/tracing/capture.py": "import torch\ntorch.export.export",
        "autopar/solver/ilp.py": "import numpy as np\nfrom .problem import Problem\nfrom ortools import linear_solver",
        "autopar/solver/problem.py": "from autopar.errors import InputError",
    }
    assert violations(sources) == []


def read_sources(folders: tuple[str, ...]) -> dict[str, str]:
    """Source texts by path from the root of the repository."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def violations(sources: Mapping[str, str]) -> list[str]:
    """Breaches of the tables in these files of our packages, as ``path:line: what`` (cycles: as ``path: what``)."""
    found = []
    edges: dict[str, set[str]] = {}
    modules = {module_name(path): path for path in sources}
    for path, text in sources.items():
        module = module_name(path)
        tree = ast.parse(text, filename=path)
        if layer_of(module) in ("", "autopar") and module != "autopar":
            found.append(f"{path}:1: {module} has no layer: add it to LAYERS")
            continue
        references = list(references_of(tree, path))
        reasons = {
            (line, reason) for line, dotted, is_import in references for reason in breaches(module, dotted, is_import)
        }
        if not within(module, MAY_PRINT):
            prints = [node.lineno for node in ast.walk(tree) if is_print(node)]
            reasons |= {(line, "print() is for the command line: use logging") for line in prints}
        found += [f"{path}:{line}: {reason}" for line, reason in sorted(reasons)]
        targets = (nearest(dotted, modules) for _, dotted, is_import in references if is_import)
        edges[module] = {target for target in targets if target not in (None, module)}
    return found + [f"{modules[cycle[0]]}: import cycle: {' -> '.join(cycle)}" for cycle in cycles(edges)]


def breaches(module: str, dotted: str, is_import: bool) -> Iterator[str]:
    """What is wrong with a module importing, or using, the dotted name: at most one thing."""
    here = "autopar.__init__" if module == "autopar" else module
    private = next((name for name in PRIVATE_TORCH if within(dotted, name)), None)
    limit = next((name for name in ONLY_IN if within(dotted, name)), None)
    if private is not None:
        if not within(here, PRIVATE_TORCH[private]):
            yield f"{private} is only for {PRIVATE_TORCH[private]}"
    elif within(dotted, "torch") and any(
        part.startswith("_") and not part.endswith("__") for part in dotted.split(".")
    ):
        yield f"{dotted} is private: give it a home in PRIVATE_TORCH or do without it"
    elif limit is not None and not within(here, limit, *ONLY_IN[limit]):
        yield f"{limit} is only for {', '.join(ONLY_IN[limit])}"
    elif is_import and not may_import(layer_of(module), dotted):
        yield f"{layer_of(module)} may not import {layer_of(dotted) or dotted.partition('.')[0]}"


def may_import(layer: str, dotted: str) -> bool:
    """Whether the order of the layers and the packages that they need let a layer import this name."""
    target = layer_of(dotted)
    if not target:
        package = dotted.partition(".")[0]
        return package in sys.stdlib_module_names or package in EXTERNAL.get(layer, ())
    if target == layer or dotted == "autopar.__version__":
        return True
    return LAYERS.index(target) < LAYERS.index(layer) and target in ONLY_IMPORTS.get(layer, {target})


def references_of(tree: ast.Module, path: str) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, whether it is an import) of all that is imported, and of the attributes used of it."""
    local: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                local[alias.asname or top] = alias.name if alias.asname else top
                yield node.lineno, alias.name, True
        elif isinstance(node, ast.ImportFrom):
            origin = origin_of(node, path)
            for alias in node.names:
                local[alias.asname or alias.name] = f"{origin}.{alias.name}"
                yield node.lineno, f"{origin}.{alias.name}", True
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := dotted_name(node, local)) is not None:
            yield node.lineno, dotted, False
        elif isinstance(node, ast.Call) and dotted_name(node.func, local) == "importlib.import_module":
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value, True


def origin_of(node: ast.ImportFrom, path: str) -> str:
    """The module that ``from ... import`` names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = path.removesuffix(".py").split("/")[: -node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def dotted_name(node: ast.expr, local: Mapping[str, str]) -> str | None:
    """``t.export.export`` with ``import torch as t`` -> ``torch.export.export``; None if it does not start at an import."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in local:
        return None
    return ".".join([local[node.id], *reversed(parts)])


def is_print(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether this is a call of print."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """One cycle for each back edge met in a depth-first walk, as the names along it with the first again at the end."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(trail: list[str]) -> None:
        for target in sorted(edges.get(trail[-1], ())):
            if target in trail:
                found.append([*trail[trail.index(target) :], target])
            elif target not in done:
                walk([*trail, target])
        done.add(trail[-1])

    for start in sorted(edges):
        if start not in done:
            walk([start])
    return found


def long_files(sources: Mapping[str, str], reasons: Mapping[str, str] = LONG_FILES) -> list[str]:
    """Files over MAX_LINES without a reason."""
    sizes = {path: len(text.splitlines()) for path, text in sources.items() if path not in reasons}
    return [
        f"{path}: {size} lines, more than {MAX_LINES}: split it" for path, size in sizes.items() if size > MAX_LINES
    ]


def unknown_homes(sources: Mapping[str, str]) -> list[str]:
    """Homes of private names that are no module or package of ours."""
    modules = {module_name(path) for path in sources}
    return [home for home in PRIVATE_TORCH.values() if home not in modules]


def module_name(path: str) -> str:
    """``autopar/solver/__init__.py`` -> ``autopar.solver``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer_of(dotted: str) -> str:
    """The layer that a module, or a name in it, belongs to; empty for a stranger. What has none is the public face's."""
    return max((layer for layer in LAYERS if within(dotted, layer)), key=len, default="")


def nearest(dotted: str, modules: Mapping[str, str]) -> str | None:
    """The module of ours that an import reaches: the longest beginning of the name that is one."""
    parts = dotted.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    found = next((name for name in names if name in modules), None)
    return None if found == "autopar" and dotted == "autopar.__version__" else found


def within(name: str, *parents: str) -> bool:
    """Whether a dotted name is one of the parents or lies inside one."""
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def modules_after(script: str) -> set[str]:
    """Names in ``sys.modules`` after a script, in a fresh interpreter."""
    command = [sys.executable, "-c", f"{script}\nimport sys\nsys.stdout.write('\\n'.join(sys.modules))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())
