"""Starting local processes with torchrun, and what torchrun tells each of them.

The parent runs ``python -m torch.distributed.run`` on a module of this package, with one thread a process: many processes
on few cores slow each other down otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError


class LaunchError(AutoparError, RuntimeError):
    """The processes that torchrun started did not succeed."""


@dataclass(frozen=True)
class Rank:
    """This process among those that torchrun started."""

    index: int
    world_size: int

    @property
    def is_first(self) -> bool:
        return self.index == 0


def own_rank() -> Rank | None:
    """Where this process stands, None when torchrun did not start it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def torchrun(module: str, arguments: Sequence[str], num_processes: int, timeout_seconds: float | None = None) -> int:
    """Run ``python -m module arguments`` in ``num_processes`` local processes and return torchrun's exit code.

    Output of the processes is theirs: it goes to this process's own. Raises LaunchError when they take too long.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_processes), "-m", module, *arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        return subprocess.run(command, env=environment, timeout=timeout_seconds, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{num_processes} processes of {module} did not finish in {timeout_seconds:g} s") from error
