"""Loading a program's text, and what it says about its inputs and outputs."""

from __future__ import annotations

import itertools
import linecache
import types
from dataclasses import dataclass

import torch

from autopar.runtime.errors import ProgramError

_numbers = itertools.count()


@dataclass(frozen=True)
class Input:
    """A tensor that the program takes: its global shape for the planned batch, its layout, and which dim is the batch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    batch_dim: int | None = None


@dataclass(frozen=True)
class Output:
    """A tensor that the program returns, likewise."""

    name: str
    shape: tuple[int, ...]
    layout: str
    batch_dim: int | None = None


def load_program(source: str) -> types.ModuleType:
    """Run a program's text as a module of its own; every call gives a new one, with its own unbound mesh.

    Tracebacks and debuggers show the program's lines.
    """
    name = f"autopar_program_{next(_numbers)}"
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    module.__file__ = filename
    exec(compile(source, filename, "exec"), module.__dict__)
    missing = [
        wanted
        for wanted in ("mesh", "INPUTS", "OUTPUTS", "BATCH", "BATCH_MULTIPLE", "STAGES")
        if not hasattr(module, wanted)
    ]
    if missing:
        raise ProgramError(f"this is not a program of autopar: it does not define {', '.join(missing)}")
    return module
