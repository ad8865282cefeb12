"""Cores of its own for each CPU process of a host, threads that let each other finish, and memory that is kept.

Enters: what torchrun tells a process of its place on the host. Leaves: the process bound to its share of the cores, under the
scheduling policy for computations, and keeping what it has freed. Without that, on Linux, a step takes more than its parts:

* After a collective the scheduler wakes a process on the core of the one whose message it waited for, and leaves both there:
  one computes, the other waits. MPI launchers bind processes to cores for the same reason.
* gloo sends from one thread and polls its sockets in another, which only tries the connection's lock and polls again while the
  first one holds it (``Pair::handleEvents`` in gloo/transport/tcp/pair.cc; its epoll is level-triggered). Where the second
  one, woken by the answer, takes the core of the first one, it spins for a whole time slice (3 to 4 ms). Under
  ``SCHED_BATCH`` a thread that wakes does not interrupt one that runs (sched(7)).
* glibc gives large blocks back to the system when they are freed, and the next step has them cleared again page by page.

A small GPT-2 on two cores took 1.1 to 1.6 s a step under tensor parallelism and 1.2 s under ZeRO-3 without this, 0.74 s and
0.81 s with it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from cost_models.detection import given_cores

# mallopt(3): the parameters' numbers in malloc.h, and the highest threshold that glibc itself would come to.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 2**25
KEPT_BYTES = 2**29


def settle_process(num_threads: int) -> None:
    """Keep what is freed, and bind the calling thread, and those that it starts from now on, to this process's share of the
    host's cores.

    Called before gloo starts its threads. Threads stay as they are where the host's processes have less than ``num_threads``
    cores each, where torchrun did not start this process, where somebody has bound it already or chosen another policy, or
    where the system forbids it or is not Linux.
    """
    keep_freed_memory()
    place, count = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if place is None or count is None or not hasattr(os, "SCHED_BATCH"):
        return
    given = given_cores()
    cores = own_cores(sorted(given), int(place), int(count))
    is_bound = os.sched_getaffinity(os.getppid()) != given  # torchrun's agent has what it was given for all of us
    if len(cores) < num_threads or is_bound or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    with suppress(OSError):  # a container may forbid it
        os.sched_setaffinity(0, cores)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def own_cores(cores: Sequence[int], place: int, count: int) -> Sequence[int]:
    """The share of process ``place`` among ``count``: neighbouring cores, as many for each.

    >>> own_cores([0, 1, 2, 3, 4], 1, 2)
    [2, 3]
    """
    share = len(cores) // count
    return cores[place * share : (place + 1) * share]


def keep_freed_memory() -> None:
    """Have this process use freed memory again instead of giving it back to the system (glibc), up to its end."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
