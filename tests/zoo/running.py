"""Entries run one after another, each in a process of its own: a crash, a hang or a lack of memory is a row, not the end.

Leaves: for every entry and plan a row, a JSON object: ``entry``, ``plan``, ``passed``, ``seconds``; the errors by kind;
``stage`` and ``error`` where something failed; ``whole``, operators computed whole with their part of the FLOPs; and
``tensor_share`` and ``tensor_whole`` under forced tensor parallelism.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.planner import plan_graph
from autopar.plans import Plan
from autopar.tracing import Traced, trace
from autopar.verifier import verify_traced
from tests.zoo.entries import Built, Collection
from tests.zoo.plans import PLANS, TENSOR
from tests.zoo.work import tensor_axes, work_of

TOLERANCE = 1e-9
MEMORY_BYTES = 12 * 2**30  # address space of an entry's process
STACKS_SECONDS = 0.5  # in which a process writes what its threads are at
NUM_SHOWN = 6  # operators computed whole that a row names
Row = dict[str, Any]


class _Failed(Exception):
    """Where a run ended: the stage, and the error that ended it."""

    def __init__(self, stage: str, error: Exception) -> None:
        super().__init__(stage)
        self.stage, self.error = stage, error


def run_entry(collection: Collection, entry: str, plans: Sequence[str], limit_seconds: float) -> Iterator[Row]:
    """A row for each of ``plans``. A plan that ends its process, or takes longer than the limit, does not end the others."""
    waiting = list(plans)
    while waiting:
        for row in _attended(collection, entry, waiting, limit_seconds):
            waiting.remove(row["plan"])
            yield row


def _attended(collection: Collection, entry: str, plans: Sequence[str], limit_seconds: float) -> Iterator[Row]:
    """Rows of one process, up to the plan that ends it."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+") as stacks:
        process = fork.Process(target=_child, args=(collection, entry, plans, send, stacks))
        process.start()
        send.close()
        try:
            for name in plans:
                start = time.perf_counter()
                if not receive.poll(limit_seconds):
                    row = _ended(entry, name, "limit", f"not done after {limit_seconds:.0f} s", start)
                    yield {**row, "stacks": _stacks(process, stacks)}
                    return
                try:
                    yield receive.recv()
                except EOFError:
                    process.join()
                    code = process.exitcode or 0
                    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    yield _ended(entry, name, "crash", f"the process ended with {ended}", start)
                    return
        finally:
            process.kill()
            process.join()


def _stacks(process: Any, written: IO[str]) -> list[str]:
    """What every thread of a process is at, the innermost call first."""
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(STACKS_SECONDS)
    written.seek(0)
    return written.read().splitlines()


def _ended(entry: str, name: str, stage: str, error: str, start: float) -> Row:
    seconds = time.perf_counter() - start
    return {"entry": entry, "plan": name, "passed": False, "stage": stage, "error": error, "seconds": seconds}


def _child(
    collection: Collection, entry: str, plans: Sequence[str], send: Connection, stacks: IO[str]
) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for row in rows_of(collection, entry, plans):
        send.send(row)


def rows_of(collection: Collection, entry: str, plans: Sequence[str]) -> Iterator[Row]:
    """A row for each plan, in this process."""
    try:
        built = _at("build", lambda: without_dropout(collection.build(entry)))
        traced: Traced = _at("trace", lambda: trace(*built))
    except _Failed as failed:
        for name in plans:
            yield {"entry": entry, "plan": name, "passed": False, "seconds": 0.0, **_reason(failed)}
        return
    for name in plans:
        start = time.perf_counter()
        row: Row = {"entry": entry, "plan": name}
        try:
            row |= _outcome(built, traced, name)
        except _Failed as failed:
            row |= {"passed": False, **_reason(failed)}
        yield {**row, "seconds": time.perf_counter() - start}


def without_dropout(built: Built) -> Built:
    """The model with its dropout modules switched off, those too that its config does not reach: what they draw on one
    device is not what they draw on several."""
    for module in built[0].modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return built


def _at(stage: str, work: Any) -> Any:
    try:
        return work()
    except Exception as error:
        raise _Failed(stage, error) from error


def _reason(failed: _Failed) -> Row:
    """The stage, the error in a line, whether it is one of autopar's own, and where it was raised."""
    error = failed.error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "stage": failed.stage,
        "error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:600],
        "clear": isinstance(error, AutoparError),
        "raised": f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}",
    }


def _outcome(built: Built, traced: Traced, name: str) -> Row:
    """Plan, run and compare."""
    wanted, graph = PLANS[name], traced.graph
    made: Plan = _at("plan", lambda: plan_graph(graph, wanted.cluster, wanted.options(graph), compare=False))
    work = work_of(made, graph)
    row: Row = {"axes": str(made.stages[0].mesh), "micro_batches": made.num_micro_batches, "stages": len(made.stages)}
    row["whole"] = dict(list(work.shares().items())[:NUM_SHOWN])
    row["whole_share"] = 1.0 - work.split_share
    if name == TENSOR:
        split = work_of(made, graph, tensor_axes(made))
        row["tensor_share"] = split.split_share
        row["tensor_whole"] = dict(list(split.shares().items())[:NUM_SHOWN])
    found = _at("run", lambda: verify_traced(built[0], traced, made, tolerance=TOLERANCE, count_collectives=True))
    row |= {measure.kind: measure.error for measure in found.measures}
    row["passed"] = found.passed
    if not found.passed:
        wrong = [str(measure) for measure in found.measures if not measure.passed]
        row |= {"stage": "compare", "error": "; ".join([*wrong, *(found.differences or ())])[:600]}
    return row
