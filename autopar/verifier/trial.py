"""One step of a program on many ranks, with all that it computes brought together: threads here, or gloo processes.

Enters: a :class:`Trial`. Leaves: a :class:`TrialResult` for each rank, on the CPU. Processes exchange files in a
temporary folder and find each other through one of them, so that no port is needed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime import Engine, ParameterSlot, load_program
from autopar.simulation import run_ranks

PieceOf = tuple[tuple[int, ...], Tensor]  # where it starts in the whole tensor, and its values


@dataclass(frozen=True)
class Trial:
    """A program's text, the whole state by name, the global batch by the program's input names, and of AdamW the learning
    rate and the epsilon."""

    source: str
    state: dict[str, Tensor]
    inputs: dict[str, Tensor]
    learning_rate: float
    epsilon: float


@dataclass(frozen=True)
class TrialResult:
    """What one rank has: whole outputs before the step, the loss, its pieces of gradients (absent ones as zeros) and of
    parameters after a step of AdamW, buffers, and bytes sent in the step by (kind, axis)."""

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, list[PieceOf]]
    parameters: dict[str, list[PieceOf]]
    buffers: dict[str, Tensor]
    sent: dict[tuple[str, str], int]


class TrialError(AutoparError, RuntimeError):
    """A process of a trial failed or did not finish."""


def run_rank(trial: Trial) -> TrialResult:
    """One rank's part; the default process group is there unless the program has one rank only."""
    engine = Engine(load_program(trial.source))
    engine.load(trial.state.__getitem__)
    inputs: dict[str, Any] = dict(trial.inputs)
    outputs = {name: value.detach().clone() for name, value in engine.forward(**inputs).items()}
    engine.load(trial.state.__getitem__)  # the forward pass has moved the statistics of batch norms
    engine.set_ledger(True)
    loss_before = engine.step(**inputs).clone()  # the loss may be a parameter, which the optimizer's step changes
    sent = engine.ledger.totals() if engine.ledger is not None else {}
    engine.set_ledger(False)
    gradients = {name: _gradient_pieces(slot) for name, slot in engine.slots.items()}
    torch.optim.AdamW(engine.parameters(), lr=trial.learning_rate, eps=trial.epsilon).step()
    return TrialResult(
        outputs=outputs,
        loss=loss_before,
        gradients=gradients,
        parameters={name: _pieces(slot, None) for name, slot in engine.slots.items()},
        buffers={name: value.clone() for name, value in engine.named_buffers()},
        sent=sent,
    )


def _gradient_pieces(slot: ParameterSlot) -> list[PieceOf]:
    gradient = slot.storage.grad
    return _pieces(slot, torch.zeros_like(slot.local) if gradient is None else gradient)


def _pieces(slot: ParameterSlot, tensor: Tensor | None) -> list[PieceOf]:
    return [(chunk.offsets, chunk.tensor.clone()) for chunk in slot.chunks(tensor)]


def run_in_threads(trial: Trial, num_ranks: int, timeout_seconds: float) -> list[TrialResult]:
    """All ranks as threads of this process."""
    return run_ranks(num_ranks, lambda rank: run_rank(trial), timeout_seconds=timeout_seconds)


def run_in_processes(trial: Trial, num_ranks: int, timeout_seconds: float) -> list[TrialResult]:
    """All ranks as processes of this machine over gloo, one thread each.

    Raises :class:`TrialError` with the end of what the first failing process wrote; the others are ended.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-trial-") as name:
        folder = Path(name)
        torch.save(trial.__dict__, folder / "trial")
        code = "import sys; sys.path[:] = sys.argv[4:]; from autopar.verifier.trial import main; main(*sys.argv[1:4])"
        processes = []
        try:
            for rank in range(num_ranks):
                with (folder / f"log{rank}").open("wb") as log:
                    command = [sys.executable, "-c", code, name, str(rank), str(num_ranks), *sys.path]
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            _wait(processes, folder, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [TrialResult(**torch.load(folder / f"result{rank}", weights_only=True)) for rank in range(num_ranks)]


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_seconds: float) -> None:
    end = time.monotonic() + timeout_seconds
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            rank = failed[0]
            written = (folder / f"log{rank}").read_text(errors="replace").strip()
            raise TrialError(
                f"process {rank} of {len(processes)} failed with exit code {codes[rank]}:\n{written[-3000:]}"
            )
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise TrialError(f"processes {running} of {len(processes)} did not finish in {timeout_seconds:g} s")
        time.sleep(0.02)


def main(folder_name: str, rank: str, num_ranks: str) -> None:
    """A process of :func:`run_in_processes`."""
    folder = Path(folder_name)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=int(rank), world_size=int(num_ranks))
    result = run_rank(Trial(**torch.load(folder / "trial", weights_only=True, mmap=True)))
    torch.save(result.__dict__, folder / f"result{rank}")
    dist.barrier()
    dist.destroy_process_group()
