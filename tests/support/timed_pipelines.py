"""Steps of pipelines measured in two processes over gloo, and the seconds that their stages take alone.

Enters: plans of a small GPT-2. Leaves: seconds of each plan's steps, :class:`Measured`, or of each stage, ``StageTimes``.
One of the two processes: ``-m tests.support.timed_pipelines --folder FOLDER`` under torchrun.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.codegen import generate
from autopar.graph import ITEM_BYTES, OpGraph
from autopar.launching import torchrun
from autopar.plans import Plan, graphs_of
from autopar.runtime import Engine, ParameterSlot, load_program
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.stages import RunnableStage
from cost_models import StageTimes
from cost_models.parts import Device

NUM_RANKS = 2
ROUNDS = 5
WARM_UP_STEPS = 2
SHORT_SECONDS = 0.2  # a step that takes less is run several times, to warm up and to be timed
DISTURBED = 0.05  # a step in which a process waits for a core for a larger part of the time is run again
QUIET_SECONDS = 0.15  # without other work, before a step is run
GIVES_WAY = 10  # niceness from which other work gives way to ours


@dataclass(frozen=True)
class Size:
    """Of the model and its batch."""

    layers: int = 8
    hidden: int = 256
    sequence: int = 128
    batch: int = 16

    def __str__(self) -> str:
        return f"GPT-2 of {self.layers} blocks of {self.hidden}, {self.batch} samples of {self.sequence} tokens"


# -- the model and its plans -------------------------------------------------------------------------------------------


def make_model(size: Size) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model with the same values in every process, and its batch."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=size.layers, n_embd=size.hidden, n_head=max(1, size.hidden // 64), vocab_size=1000,
        n_positions=size.sequence, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    ids = torch.randint(3, config.vocab_size, (size.batch, size.sequence))
    return cast(nn.Module, GPT2LMHeadModel(config)).train(), {"input_ids": ids, "labels": ids.clone()}


def sent_bytes(plan: Plan, graph: OpGraph) -> list[int]:
    """What each stage but the last hands to the next for a micro-batch."""
    return [
        sum(int(np.prod(stage.values[v].shape)) * ITEM_BYTES[stage.values[v].dtype] for v in stage.sent)
        for stage in graphs_of(plan, graph)[:-1]
    ]


# -- what every process does -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """One plan's part on this rank, with its optimizer."""

    engine: Engine
    optimizer: torch.optim.Optimizer

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        """The loss of one whole step."""
        loss = self.engine.step(**batch)
        self.optimizer.step()
        self.engine.zero_grad()
        return float(loss)


def training(source: str, model: nn.Module) -> Training:
    """The program with the model's values."""
    values = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    engine = Engine(load_program(source))
    engine.load(lambda name: values[name].detach())
    return Training(engine, torch.optim.AdamW(engine.parameters(), lr=1e-4))


def stages_of(engine: Engine) -> list[RunnableStage]:
    """The stages of this rank, as the schedule runs them."""
    runner = engine._runner
    assert isinstance(runner, Pipeline), "a pipeline has several stages"
    return runner._stages


def slower(device: Device, factor: float) -> Device:
    """The device with everything taking ``factor`` times as long."""
    return replace(
        device,
        name=f"{device.name}, slowed",
        peak_flops={dtype: flops / factor for dtype, flops in device.peak_flops.items()},
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second / factor,
        launch_seconds=device.launch_seconds * factor,
    )


def slow_down(given: Training, factor: float) -> None:
    """Have this rank sleep after each action, so that it takes ``factor`` times as long."""
    for stage in stages_of(given.engine):
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, name, _slowed(getattr(stage, name), factor))
    setattr(given.optimizer, "step", _slowed(given.optimizer.step, factor))  # noqa: B010


def _slowed(action: Callable[..., Any], factor: float) -> Callable[..., Any]:
    def slowed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = action(*args, **kwargs)
        time.sleep((factor - 1) * (time.perf_counter() - start))
        return result

    return slowed


def measure_here(folder: Path, size: Size, slowed: float, minutes: float) -> None:
    """One of the two processes: all programs of the folder in turn; rank 0 writes what it has measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, batch = make_model(size)
    trainings = [training(path.read_text(), model) for path in sorted(folder.glob("*.py"))]
    if dist.get_rank() == 1 and slowed > 1:
        for each in trainings:
            slow_down(each, slowed)
    hops = {size: _message_seconds(size) for size in json.loads((folder / "sizes.json").read_text())}
    losses = [each.step(batch) for each in trainings for _ in range(WARM_UP_STEPS)][::WARM_UP_STEPS]
    timed = in_rounds([partial(each.step, batch) for each in trainings], ROUNDS, minutes)
    if dist.get_rank() == 0:
        document = {"losses": losses, "hops": hops, **timed}
        (folder / "measured.json").write_text(json.dumps(document))
    dist.barrier()
    dist.destroy_process_group()


def in_rounds(steps: Sequence[Callable[[], object]], rounds: int, minutes: float) -> dict[str, Any]:
    """Run the steps one after the other in every round. By name: the ``seconds`` of each by round, the part of every one that
    was spent ``waiting`` for a core, and the machine's ``loads``."""
    seconds: list[list[float]] = [[] for _ in steps]
    waiting: list[float] = []
    loads, patience = [], Patience(minutes)
    for _ in range(rounds):
        loads.append(os.getloadavg()[0])
        for step, found in zip(steps, seconds, strict=True):
            took, waited = _least_disturbed(step, patience)
            found.append(took)
            waiting.append(waited)
    return {"seconds": seconds, "waiting": waiting, "loads": loads}


class Patience:
    """Waits for moments without other work on the machine, until a time is over: then what comes is taken."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def wait(self) -> None:
        """Until nothing else has run for a moment."""
        quiet = 0.0
        while quiet < QUIET_SECONDS and not self.is_over:
            time.sleep(QUIET_SECONDS / 3)
            quiet = 0.0 if _others_run() else quiet + QUIET_SECONDS / 3


def _others_run() -> bool:
    """Whether some other process has a core, or wants one, and does not give way (Linux)."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if state == "R" and int(fields[15]) < GIVES_WAY and path.parent.name != str(os.getpid()):
            return True
    return False


def _least_disturbed(step: Callable[[], object], patience: Patience) -> tuple[float, float]:
    """Seconds of a step of all ranks, and the part of it that the rank waited which waited longest for a core."""
    found: list[tuple[float, float]] = []
    is_over = False
    while not found or (found[-1][0] > DISTURBED and not is_over):
        if dist.get_rank() == 0:
            patience.wait()
        times = _times(step)  # the memory of other plans' steps is not that of this one's: a step of training follows its like
        dist.barrier()
        start, before = time.perf_counter(), _waited_seconds()
        for _ in range(times):
            step()
        dist.barrier()
        seconds = time.perf_counter() - start
        said = torch.tensor([(_waited_seconds() - before) / seconds, patience.is_over], dtype=torch.float64)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        is_over = bool(said[1])
        found.append((float(said[0]), seconds / times))
    least, seconds = min(found)
    return seconds, least


def _times(step: Callable[[], object]) -> int:
    """Warm up; how often the step is run so that it takes long enough, the same on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    step()
    times = torch.tensor(SHORT_SECONDS / (time.perf_counter() - start))
    dist.all_reduce(times)
    count = max(1, math.ceil(float(times) / NUM_RANKS))
    for _ in range(count - 1):
        step()
    return count


def _waited_seconds() -> float:
    """How long the main thread has been ready to run without a core to run on (Linux); those of gloo's are ours too."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def _message_seconds(num_bytes: int, repeats: int = 15) -> float:
    """Half of a round trip between the two ranks."""
    message = torch.zeros(num_bytes // 4)
    first = dist.get_rank() == 0
    found = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        for sends in (first, not first):
            if sends:
                dist.send(message, 1 - dist.get_rank())
            else:
                dist.recv(message, 1 - dist.get_rank())
        found.append((time.perf_counter() - start) / 2)
    return statistics.median(found)


@dataclass(frozen=True)
class Measured:
    """Seconds of each plan by round, the machine's load at each round, the part of each step spent waiting for a core, and
    seconds of messages by bytes."""

    seconds: list[list[float]]
    losses: list[float]
    loads: list[float]
    waiting: list[float]
    hops: dict[int, float]

    @property
    def medians(self) -> list[float]:
        return [statistics.median(found) for found in self.seconds]

    @property
    def noise(self) -> str:
        """In what circumstances it was measured."""
        disturbed = sum(waited > DISTURBED for waited in self.waiting)
        return (
            f"While measuring, the load of the machine was {min(self.loads):.1f} to {max(self.loads):.1f}, of which these "
            f"processes make 2; {disturbed} of {len(self.waiting)} steps were disturbed for more than {DISTURBED:.0%}, "
            f"the median step for {statistics.median(self.waiting):.1%}."
        )


def measure(plans: Sequence[Plan], graph: OpGraph, size: Size, minutes: float, slowed: float = 1.0) -> Measured:
    """All plans in turn in two processes; they must agree on the loss."""
    with tempfile.TemporaryDirectory(prefix="bench-schedules-") as name:
        folder = Path(name)
        for index, plan in enumerate(plans):
            (folder / f"{index:03d}.py").write_text(generate(plan, graph))
        sizes = sorted({num_bytes for plan in plans for num_bytes in sent_bytes(plan, graph)})
        (folder / "sizes.json").write_text(json.dumps(sizes))
        own = ["--folder", name, "--slow-down", str(slowed), "--patience", str(minutes)]
        if torchrun("tests.support.timed_pipelines", [*own, *_flags(size)], NUM_RANKS):
            sys.exit("the measuring processes failed")
        document = json.loads((folder / "measured.json").read_text())
    found = Measured(**{**document, "hops": {int(key): value for key, value in document["hops"].items()}})
    spread = max(found.losses) - min(found.losses)
    assert spread < 1e-4, f"the plans compute losses that differ by {spread:.1e}"
    return found


def _flags(size: Size) -> list[str]:
    return [text for name, value in asdict(size).items() for text in (f"--{name}", str(value))]


# -- what stages take --------------------------------------------------------------------------------------------------


def profiled(source: str, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> list[StageTimes]:
    """Seconds of every stage, one rank after the other in this process: in a group that sends nothing, a rank runs alone."""
    found: dict[int, StageTimes] = {}
    for rank in range(NUM_RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
        try:
            given = training(source, model)
            for stage in stages_of(given.engine):
                _receive_noise(stage)
            given.step(batch)
            timed = {stage.stage_index: _timed(stage) for stage in stages_of(given.engine)}
            optimizers = {stage.stage_index: _optimizer_of(stage) for stage in stages_of(given.engine)}
            for _ in range(WARM_UP_STEPS):
                given.engine.step(**batch)
                for index, optimizer in optimizers.items():
                    _run_timed(optimizer.step, timed[index]["once"])
                given.engine.zero_grad()
        finally:
            dist.destroy_process_group()
        found.update((index, _stage_times(seconds)) for index, seconds in timed.items())
    return [found[index] for index in sorted(found)]


def _receive_noise(stage: RunnableStage) -> None:
    """Have what is received be numbers of an ordinary size, since nothing arrives."""
    empty = stage._empty
    setattr(stage, "_empty", lambda *args: empty(*args).normal_(std=1e-2))  # noqa: B010


def _optimizer_of(stage: RunnableStage) -> torch.optim.Optimizer:
    slots = [slot for slot in stage.own.module.modules() if isinstance(slot, ParameterSlot)]
    return torch.optim.AdamW(list({id(slot.storage): slot.storage for slot in slots}.values()), lr=1e-4)


def _timed(stage: RunnableStage) -> dict[str, list[float]]:
    """Have a stage note the seconds of each of its actions from now on."""
    noted: dict[str, list[float]] = defaultdict(list)
    actions = {name: getattr(stage, f"{name}_one_chunk") for name in ("forward", "backward", "backward_weight")}
    for name, action in actions.items():
        def timed(*args: Any, action: Any = action, name: str = name, **kwargs: Any) -> Any:
            return _run_timed(lambda: action(*args, **kwargs), noted[name])

        setattr(stage, f"{name}_one_chunk", timed)
    return noted


def _run_timed(action: Callable[[], Any], seconds: list[float]) -> Any:
    start = time.thread_time()  # it only computes, and others may want the core too
    result = action()
    seconds.append(time.thread_time() - start)
    return result


def _stage_times(noted: Mapping[str, list[float]]) -> StageTimes:
    typical = {name: statistics.median(seconds) for name, seconds in noted.items()}
    weight = typical.get("backward_weight", 0.0)
    return StageTimes(typical["forward"], typical["backward"], weight, typical["once"])


# -- the command -------------------------------------------------------------------------------------------------------


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options for the sizes of the model."""
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value)


def size_of(arguments: argparse.Namespace) -> Size:
    """What is given for them."""
    return Size(**{name: getattr(arguments, name) for name in asdict(Size())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--slow-down", type=float, default=1.0)
    parser.add_argument("--patience", type=float, default=0.0)
    add_sizes(parser)
    arguments = parser.parse_args()
    measure_here(arguments.folder, size_of(arguments), arguments.slow_down, arguments.patience)


if __name__ == "__main__":
    main()
