"""Seconds spent planning, by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of phases; a phase inside another is taken off the outer one."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside as ``name``."""
        start = time.perf_counter()
        self._open.append(name)
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._open.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            if self._open:
                outer = self._open[-1]
                self.seconds[outer] = self.seconds.get(outer, 0.0) - spent
