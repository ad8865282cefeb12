"""Which cores a process binds itself to, under which policy, and when it leaves both alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import binding
from autopar.binding import own_cores, settle_process

ROOT = Path(__file__).resolve().parents[2]
SETTLED = """
import json, os, sys, threading
from autopar.binding import settle_process
from cost_models.detection import num_cores
before = num_cores()
settle_process(1)
found = []
thread = threading.Thread(target=lambda: found.append([sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0)]))
thread.start()
thread.join()
json.dump([*found[0], before, num_cores()], sys.stdout)
"""


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3]]),
        ([4, 5, 6, 7], 4, [[4], [5], [6], [7]]),
        ([0, 1], 3, [[], [], []]),
    ],
)
def test_shares_are_apart_and_equal(cores: list[int], count: int, shares: list[list[int]]) -> None:
    assert [own_cores(cores, place, count) for place in range(count)] == shares


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared out")
def test_threads_that_follow_have_the_cores_and_the_policy() -> None:
    given = sorted(os.sched_getaffinity(0))
    environment = {**os.environ, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", SETTLED], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    cores, policy, before, after = json.loads(ran.stdout)
    assert cores == own_cores(given, 1, 2) and policy == os.SCHED_BATCH
    assert before == after, "the machine has as many cores as before"


def faults(prepared: str) -> int:
    """Pages that the system hands out for an array that is made again and again."""
    code = f"""
import resource
import numpy as np
from autopar.binding import keep_freed_memory
{prepared}
np.ones(2**21)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    made, beside = np.ones(2**21), np.ones(2**21)
    del made, beside
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    return int(
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )


def test_freed_memory_is_used_again() -> None:
    assert faults("keep_freed_memory()") < 0.5 * faults("")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is asked of the system, by the first of two processes on four cores."""
    calls: list[object] = []
    monkeypatch.setattr(binding, "given_cores", lambda: frozenset(range(4)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append(list(cores)))
    monkeypatch.setattr(os, "sched_setscheduler", lambda pid, policy, parameters: calls.append(policy))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return calls


def test_enough_cores(asked: list[object]) -> None:
    settle_process(2)
    assert asked == [[0, 1], os.SCHED_BATCH]


def test_more_threads_than_cores(asked: list[object]) -> None:
    settle_process(3)
    assert asked == []


def test_more_processes_than_cores(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    settle_process(1)
    assert asked == []


def test_not_started_by_torchrun(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK")
    settle_process(1)
    assert asked == []


def test_bound_by_somebody_else(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    parents = {os.getppid(): {0, 1, 2, 3, 4, 5, 6, 7}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: parents.get(pid, set(range(4))))
    settle_process(1)
    assert asked == []


def test_another_policy_is_kept(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_FIFO)
    settle_process(1)
    assert asked == []


def test_a_container_that_forbids_it(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int, policy: int, parameters: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    settle_process(1)
    assert asked == [[0, 1]]
