"""profile(): measure what the plans of a model need, with the processes that torchrun started or with our own.

Reads top to bottom as things happen: trace; find what is needed; measure it, here or in processes on this machine.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autopar.detection import gathered_cluster, machine_of
from autopar.errors import InputError
from autopar.launching import LaunchError, own_rank, torchrun
from autopar.options import PRECISIONS, PlanOptions
from autopar.profiler.needs import needs_of
from autopar.profiler.session import Session, Work, is_complete
from autopar.ranks import Ranks, is_cpu, join_group
from autopar.tracing import trace
from cost_models import Cluster, Profile, ProfileError

if TYPE_CHECKING:
    from torch import nn

Progress = Callable[[str], None]

BUDGET_SECONDS = 120.0
TIMEOUT_SECONDS = 60.0
WORK_FILE, PROFILE_FILE, ERROR_FILE = "work.pickle", "profile.json", "error.txt"


def profile(
    model: nn.Module,
    cluster: Cluster | None = None,
    example_inputs: Any = None,
    *,
    path: str | Path | None = None,
    options: PlanOptions | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    batch_dims: Mapping[str, int | None] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure the operators, collectives and optimizer steps that the plans of ``model`` on ``cluster`` need.

    Under torchrun all processes call this together, and ``cluster`` may be left out: it is what they find. Otherwise
    ``cluster`` is of processes on this machine, which are started for it. ``path``: a profile that is kept up to date while
    measuring; what it has already is not measured again, so that an interrupted profile is resumed. ``budget_seconds``:
    for all measurements, those of operators last; what is then missing is estimated. ``timeout_seconds``: for one
    collective.

    Raises InputError (a cluster that is not these devices), ProfileError (the file is of another machine or damaged, a
    collective does not end), TraceError.

    >>> profile = autopar.profile(model, autopar.Cluster.local(2), batch, path="profile.json")
    >>> plan = autopar.plan(model, autopar.Cluster.local(2), batch, profile=profile)
    """
    say = progress or (lambda message: None)
    chosen = options or PlanOptions()
    rank = own_rank()
    device = join_group(None) if rank is not None else None
    if cluster is None:
        if rank is None:
            raise InputError("cluster= is left out and torchrun did not start this process: give Cluster.local(...)")
        cluster = gathered_cluster(Ranks().gather, is_cpu(device))
    policy = PRECISIONS[chosen.precision]
    graph = trace(model, example_inputs, batch_dims=batch_dims, loss_fn=loss_fn, precision=policy, outputs=chosen.outputs).graph
    work = Work(
        machine_of(cluster),
        needs_of(graph, cluster, chosen),
        None if path is None else str(Path(path).resolve()),
        budget_seconds,
        timeout_seconds,
    )
    if rank is not None:
        _check_size(cluster, rank.world_size)
        return measure_here(work, device, say)
    return _measured_by_processes(work, cluster, say)


def _check_size(cluster: Cluster, num_ranks: int) -> None:
    if cluster.num_devices != num_ranks:
        raise InputError(
            f"the cluster has {cluster.num_devices} devices and torchrun started {num_ranks} processes: start one for each "
            "device, or leave cluster= out"
        )


def measure_here(work: Work, device: torch.device | None, say: Progress) -> Profile:
    """This process's part, together with all of its group."""
    if is_cpu(device):
        torch.set_num_threads(work.machine.threads)
    chosen = device or torch.device("cpu")
    return Session(work, Ranks(), chosen, say).run()


def _measured_by_processes(work: Work, cluster: Cluster, say: Progress) -> Profile:
    """Start a process for each device of this machine, and read what they have measured."""
    if len(cluster.nodes) > 1:
        raise InputError(
            f"{cluster.name} has {len(cluster.nodes)} nodes: start the profile with torchrun on all of them, so that links "
            "between them are measured, too"
        )
    if work.path is not None and Path(work.path).exists():
        known = Profile.load(work.path)
        known.check_machine(work.machine)
        if is_complete(work, known):
            say(f"{work.path} has everything")
            return known
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as name:
        folder = Path(name)
        (folder / WORK_FILE).write_bytes(pickle.dumps(work))
        say(f"starting {cluster.num_devices} processes")
        code = torchrun("autopar.profiler.process", [name], cluster.num_devices)
        error = folder / ERROR_FILE
        if error.exists():
            raise ProfileError(error.read_text(encoding="utf-8"))
        if code:
            raise LaunchError(f"the measuring processes failed with exit code {code}; their messages are above")
        return Profile.load(folder / PROFILE_FILE)


def run_process(folder: Path, say: Progress) -> int:
    """One of the processes that measure for another: 0, or 1 with the reason in the folder."""
    work: Work = pickle.loads((folder / WORK_FILE).read_bytes())
    device = join_group("cpu" if work.machine.kind == "cpu" else None)
    try:
        found = measure_here(work, device, say if dist.get_rank() == 0 else lambda message: None)
    except ProfileError as error:
        with (
            suppress(FileExistsError),
            (folder / ERROR_FILE).open("x", encoding="utf-8") as file,
        ):  # the first one counts
            file.write(str(error))
        return 1
    if dist.get_rank() == 0:
        found.save(folder / PROFILE_FILE)
    return 0
