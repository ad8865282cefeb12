"""Recomputation: a part of a stage whose inside is computed again in backward instead of being kept.

:func:`checkpoint` is ``torch.utils.checkpoint`` without reentrance, with two differences. The second run goes to the end of
the part, so that it sends what the first one sent, whatever autograd has kept of it. And it sees the micro-batch of the
first one (``mesh.batch``, ``mesh.share``, ``mesh.draws``), although the mesh may be at another one by then. Parameters under
ZeRO-3 that a part calls are gathered again by its second run and live until backward has used them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from autopar.runtime.mesh import Mesh

_OF_A_MICRO_BATCH = ("batch", "share", "draws")  # what a mesh says of the micro-batch that runs


class Run(threading.local):
    """What this thread runs now: simulated ranks are threads of one process."""

    mesh: Mesh | None = None
    num_recomputed = 0


_run = Run()


@contextmanager
def running(mesh: Mesh) -> Iterator[None]:
    """While active, :func:`checkpoint` keeps what ``mesh`` says of the micro-batch."""
    before = _run.mesh
    _run.mesh = mesh
    try:
        yield
    finally:
        _run.mesh = before


def num_recomputed() -> int:
    """How many parts this thread has run so far that will be computed again."""
    return _run.num_recomputed


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose inside is computed again in backward. Without gradients it is just called."""
    if not torch.is_grad_enabled():
        return function(*args)
    if torch.compiler.is_compiling():
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)
    _run.num_recomputed += 1
    mesh = _run.mesh

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _as_now(mesh) if mesh is not None else nullcontext()

    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, early_stop=False, context_fn=contexts)


def _as_now(mesh: Mesh) -> AbstractContextManager[None]:
    """A context in which the mesh says of the micro-batch what it says now."""
    kept = {name: value for name, value in vars(mesh).items() if name in _OF_A_MICRO_BATCH}
    return _restored(mesh, kept)


@contextmanager
def _restored(mesh: Mesh, kept: dict[str, Any]) -> Iterator[None]:
    before = {name: value for name, value in vars(mesh).items() if name in _OF_A_MICRO_BATCH}
    vars(mesh).update(kept)
    try:
        yield
    finally:
        vars(mesh).update(before)
