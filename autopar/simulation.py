"""Many ranks in one process: a thread each, over torch's threaded process group, with real values on the CPU.

For tests and for verifying plans larger than the machine. torch offers this for its own tests only; this module is the one
place that touches it. Its group has no messages from rank to rank: while a simulation runs, a :class:`Mail` gives it some,
so that torch's own send, recv, isend, irecv and batch_isend_irecv work. Random number generators are shared by the ranks:
seed and draw before, or use a generator per rank.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import multi_threaded_pg

from autopar.errors import AutoparError

Result = TypeVar("Result")

_GRACE_SECONDS = 5.0  # for ranks to leave after another one failed


class SimulationError(AutoparError, RuntimeError):
    """Simulated ranks did not come to an end in time."""


class Mail:
    """Messages under way, each by (group, source, destination, tag) and its number among those of the same four."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._messages: dict[tuple[Any, ...], Tensor] = {}
        self._numbers: Counter[tuple[Any, ...]] = Counter()

    def send(self, address: tuple[Any, ...], tensor: Tensor) -> None:
        """Leave a copy for the receiver."""
        with self._arrived:
            self._messages[self._numbered("sent", address)] = tensor.detach().clone()
            self._arrived.notify_all()

    def receive(self, address: tuple[Any, ...], tensor: Tensor) -> Callable[[], None]:
        """A function that waits for the next message and copies it into ``tensor``."""
        with self._arrived:
            key = self._numbered("received", address)

        def wait() -> None:
            with self._arrived:
                self._arrived.wait_for(lambda: key in self._messages or _is_over())
                if key not in self._messages:
                    raise SystemExit
                message = self._messages.pop(key)
            if message.shape != tensor.shape or message.dtype != tensor.dtype:
                raise SimulationError(
                    f"a message of {tuple(message.shape)} {message.dtype} was received as {tuple(tensor.shape)} {tensor.dtype}"
                )
            tensor.detach().copy_(message)

        return wait

    def wake(self) -> None:
        """Have all waiting ranks look whether the simulation is over."""
        with self._arrived:
            self._arrived.notify_all()

    def _numbered(self, way: str, address: tuple[Any, ...]) -> tuple[Any, ...]:
        number = self._numbers[way, address]
        self._numbers[way, address] += 1
        return (*address, number)


class _Message(dist.Work):
    """The handle of one message; a sent one is done at once."""

    def __init__(self, receive: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._receive = receive

    def wait(self, timeout: Any = None) -> bool:
        receive, self._receive = self._receive, None
        if receive is not None:
            receive()
        return True

    def is_completed(self) -> bool:
        return self._receive is None


def _is_over() -> bool:
    return multi_threaded_pg.ProcessLocalGroup._terminate.is_set()


def run_ranks(
    world_size: int,
    function: Callable[..., Result],
    *args: Any,
    timeout_seconds: float = 120.0,
) -> list[Result]:
    """Call ``function(rank, *args)`` on every rank, each in its own thread with its own default process group.

    Returns the results by rank. When a rank raises, the others are ended and the exception is re-raised with a note that
    names the rank (the first to fail). Ranks that wait for each other longer than ``timeout_seconds`` raise
    :class:`SimulationError`. ``torch.distributed`` must not be initialised in the calling thread.
    """
    if world_size < 1:
        raise SimulationError(f"at least one rank is needed, not {world_size}")
    if dist.is_initialized():
        raise SimulationError("torch.distributed is initialised already: simulated ranks need a process of their own")
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []
    with _threaded_groups():
        store = dist.HashStore()
        threads = [
            threading.Thread(
                target=_rank_main,
                args=(rank, world_size, store, function, args, results, failures),
                name=f"simulated rank {rank}",
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        stuck = _join(threads, failures, timeout_seconds)
    if failures:
        rank, error = failures[0]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised by simulated rank {rank} of {world_size}")
        raise error
    if stuck:
        raise SimulationError(
            f"ranks {stuck} of {world_size} did not finish in {timeout_seconds:g} s: a collective that not all ranks issue?"
        )
    return results


def _rank_main(
    rank: int,
    world_size: int,
    store: dist.Store,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    results: list[Any],
    failures: list[tuple[int, BaseException]],
) -> None:
    """The life of one rank."""
    try:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        # Backward must run in this thread, where the rank's groups are.
        with torch.autograd.set_multithreading_enabled(False):
            results[rank] = function(rank, *args)
    except SystemExit:
        pass  # how the threaded group ends the ranks that wait for one that failed
    except BaseException as error:
        failures.append((rank, error))
        _end_all(error)
    finally:
        # Not destroy_process_group: ranks that failed cannot take part in anything. The world is this thread's own.
        _forget_groups()


def _end_all(error: BaseException | None) -> None:
    """Have every rank that waits for another one leave."""
    group: Any = multi_threaded_pg.ProcessLocalGroup
    group.exception_handle(error)
    mail = getattr(group, "mail", None)
    if mail is not None:
        mail.wake()


def _send(group: Any, tensors: list[Tensor], destination: int, tag: int) -> _Message:
    group.mail.send((group.pg_name, group.rank(), destination, tag), tensors[0])
    return _Message()


def _receive(group: Any, tensors: list[Tensor], source: int, tag: int) -> _Message:
    return _Message(group.mail.receive((group.pg_name, source, group.rank(), tag), tensors[0]))


def _forget_groups() -> None:
    """Unregister this thread's groups, so that the next simulation starts from nothing."""
    world = distributed_c10d._world
    for name in list(world.pg_names.values()):
        torch._C._distributed_c10d._unregister_process_group(name)
    if hasattr(multi_threaded_pg.ThreadLocalWorld._world, "world"):
        del multi_threaded_pg.ThreadLocalWorld._world.world


def _join(threads: list[threading.Thread], failures: list[Any], timeout_seconds: float) -> list[int]:
    """Wait for the threads; the ranks that are still waiting for others when the time is over, or after a failure."""
    end = time.monotonic() + timeout_seconds
    for thread in threads:
        while thread.is_alive() and not failures and time.monotonic() < end:
            thread.join(0.05)
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        _end_all(None)
        end = time.monotonic() + _GRACE_SECONDS
        for rank in stuck:
            threads[rank].join(max(0.0, end - time.monotonic()))
    return stuck


@contextmanager
def _threaded_groups() -> Iterator[None]:
    """Install the threaded process group and restore everything afterwards."""
    threaded: Any = multi_threaded_pg  # its barrier is replaced, which a type checker would not have
    barrier = threaded._store_based_barrier
    isolates = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    num_threads = torch.get_num_threads()
    multi_threaded_pg.ProcessLocalGroup.reset()
    multi_threaded_pg._install_threaded_pg()
    threaded._store_based_barrier = _barrier
    group = threaded.ProcessLocalGroup
    group.mail, group.send, group.recv = Mail(), _send, _receive
    isolates(True)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        isolates(False)
        threaded._store_based_barrier = barrier
        del group.mail, group.send, group.recv
        multi_threaded_pg._uninstall_threaded_pg()
        if not any(thread.name.startswith("simulated rank") and thread.is_alive() for thread in threading.enumerate()):
            multi_threaded_pg.ProcessLocalGroup.reset()


def _barrier(rank: int, store: dist.Store, name: str, world_size: int, timeout: timedelta) -> None:
    """As torch's own barrier through the store, but left at once when another rank has failed."""
    del rank, timeout
    key = f"barrier:{name}"
    arrived = store.add(key, 1)
    while arrived < world_size:
        if _is_over():
            raise SystemExit
        time.sleep(0.0005)
        arrived = store.add(key, 0)
