"""Loading a program's text, and what it says about its inputs and outputs."""

from __future__ import annotations

import itertools
import linecache
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis

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
    """A tensor that the program returns, likewise.

    ``combine`` says how the micro-batches' tensors make that of the batch: ``concatenate`` (along the batch dim), ``sum`` or
    ``same`` (each has it whole); by default what has a batch dim is concatenated, and the loss is a sum.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    batch_dim: int | None = None
    combine: str | None = None


@dataclass(frozen=True)
class Boundary:
    """A tensor that a stage hands to the next one: its global shape for the largest micro-batch, and its layout.

    ``batch_dims`` are the dims in proportion to the batch; a gradient comes back for it when ``requires_grad``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    batch_dims: tuple[int, ...] = ()
    requires_grad: bool = False


@dataclass(frozen=True)
class Stage:
    """One stage of a program of several.

    ``make()`` gives its module. ``forward`` of that takes what the stage before sends, in that order, and then the inputs
    named in ``takes``. It returns a tuple of the tensors that it ``sends``; the last stage a dict of the outputs named in
    ``outputs``; a stage that does both returns the tuple and the dict.
    """

    make: Callable[[], nn.Module]
    takes: tuple[str, ...] = ()
    sends: tuple[Boundary, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Count:
    """A number of labels that a mean over the whole batch divides by, found before the first micro-batch runs.

    ``make()`` gives a module without parameters that computes this rank's labels from the inputs named in ``takes``; those
    that are not ``ignore_index`` count. ``axes`` cut the labels, so that the number is summed over them.
    """

    name: str
    make: Callable[[], nn.Module]
    takes: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    ignore_index: int | None = -100


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
