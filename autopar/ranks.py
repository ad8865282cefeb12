"""The processes that torchrun started, acting together: what one of them finds or fails at, all of them know."""

from __future__ import annotations

import atexit
import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar import errors
from autopar.binding import settle_process
from autopar.errors import AutoparError, InputError

Result = TypeVar("Result")


def join_group(device: torch.device | str | None) -> torch.device | None:
    """Start the default process group where torchrun started us and nobody has; this rank's device, None to be chosen
    later."""
    chosen = torch.device(device) if device is not None else None
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return chosen
    chosen = chosen or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type == "cuda":
        chosen = chosen if chosen.index is not None else torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(chosen)
    if chosen.type == "cpu":
        settle_process(torch.get_num_threads())
    # Plans travel over gloo also where tensors travel over NCCL, which would not wait for a long search.
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    atexit.register(_leave_group)
    return chosen


def _leave_group() -> None:
    """End the process group that we started, where the user's script has not."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_cpu(device: torch.device | None) -> bool:
    """Whether the ranks compute on CPUs, where ``device`` is this rank's, or not chosen yet."""
    if device is not None:
        return device.type == "cpu"
    return not (dist.is_initialized() and "nccl" in str(dist.get_backend()))


class Ranks:
    """The default process group's ranks, or this process alone."""

    def __init__(self) -> None:
        grouped = dist.is_initialized()
        self.size = dist.get_world_size() if grouped else 1
        self.rank = dist.get_rank() if grouped else 0

    def gather(self, value: Result) -> list[Result]:
        """The value of every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def together(self, action: Callable[[], Result]) -> Result:
        """Every rank's own result; where one fails, all raise."""
        result, failure = attempt(action)
        self.raise_any(failure)
        return result  # type: ignore[return-value]

    def raise_any(self, failure: Exception | None) -> None:
        """Raise this rank's failure, or that of the lowest rank that has one."""
        failures = self.gather(_described(failure))
        if failure is not None:
            raise failure
        for rank, described in enumerate(failures):
            if described is not None:
                raise _rebuilt(described, rank)

    def from_first(self, action: Callable[[], Result], read: Callable[[Any], Result]) -> Result:
        """Rank 0's result, sent as JSON and read by the others."""
        result, failure = attempt(action) if self.rank == 0 else (None, None)
        if self.size > 1:
            text = json.dumps(result.to_json()) if result is not None else ""  # type: ignore[attr-defined]
            sent: list[Any] = [text.encode(), _described(failure)]
            dist.broadcast_object_list(sent, src=0)
            if self.rank != 0:
                if sent[1] is not None:
                    raise _rebuilt(sent[1], 0)
                return read(json.loads(sent[0]))
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]

    def same(self, text: str, otherwise: str) -> None:
        """Raise on every rank unless all have the same text."""
        found = self.gather(hashlib.sha256(text.encode()).hexdigest())
        for rank, digest in enumerate(found):
            if digest != found[0]:
                raise InputError(
                    f"rank {rank} {otherwise} than rank 0 ({digest[:12]}, {found[0][:12]}): call parallelize() with "
                    "the same model, example inputs and versions of autopar and torch in every process"
                )


def attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The action's result, or its failure."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _described(failure: Exception | None) -> tuple[str, str] | None:
    return None if failure is None else (type(failure).__name__, str(failure))


def _rebuilt(described: tuple[str, str], rank: int) -> AutoparError:
    """Another rank's error: of its own class where that is one of ours."""
    name, message = described
    kind = getattr(errors, name.lstrip("_"), None)
    if isinstance(kind, type) and issubclass(kind, AutoparError):
        return kind(message)
    return AutoparError(f"rank {rank} failed: {name}: {message}")
