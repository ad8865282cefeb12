"""All measurements of a profile in order, on all ranks together: what is missing, within a budget, written as it goes.

Enters: :class:`Work`, the same on every rank. Leaves: the profile, on every rank. Only rank 0 reads and writes the file,
decides whether there is time for the next measurement, and takes the others' figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from autopar.profiler.collectives import Group, measure_collective, measure_overlap, slowest
from autopar.profiler.memory import measure_copy, measure_optimizer
from autopar.profiler.needs import GroupNeed, Needs, OperatorNeed
from autopar.profiler.operators import measure_operator
from autopar.profiler.timing import measuring_seconds
from autopar.profiler.whole import WHOLE_ROUNDS, measure_whole
from autopar.ranks import Ranks
from autopar.runtime.mesh import Mesh
from cost_models import Context, Curve, Machine, OperatorEntry, Overlap, Point, Profile
from cost_models.model import COPY

Result = TypeVar("Result")
Progress = Callable[[str], None]

SAVE_SECONDS = 2.0  # between writings of the file
WHOLE_SECONDS = 0.5  # for a share of the batch, if that is more rounds: a small model takes its first ones in cold caches
WHOLE_SHARE = 0.25  # of the budget, that the whole model may take
GROUPS_SHARE = 0.6  # of the budget, when no more collectives are begun


@dataclass(frozen=True)
class Work:
    """What is to be measured where. ``path``: the file that is kept up to date; what it has already is not measured again.
    ``budget_seconds``: for operators, after all else. ``timeout_seconds``: for one collective."""

    machine: Machine
    needs: Needs
    path: str | None
    budget_seconds: float
    timeout_seconds: float


class Session:
    """One rank's part of the measurements."""

    def __init__(self, work: Work, ranks: Ranks, device: torch.device, say: Progress) -> None:
        self.work, self.ranks, self.device, self.say = work, ranks, device, say
        known = ranks.gather(ranks.together(self._known))[0]
        self.profile: Profile = known if known is not None else Profile(work.machine)
        self._start = self._saved = time.monotonic()
        self._agreed_seconds = 0.0  # since the start, as rank 0 had it when all last heard of each other
        self._pace = 1.0  # measured over estimated seconds, of the last measurements more than of earlier ones
        self._whole_seconds: dict[str, tuple[float, ...]] = {}
        self._sharing = ranks.size if device.type == "cpu" else 1

    def run(self) -> Profile:
        """Measure what is missing; the profile, on every rank."""
        try:
            self._wholes()
            self._memory()
            for need in self.work.needs.groups:
                self._group(need)
            self._operators()
            self._contexts()
            finished = max(self.work.budget_seconds, self.profile.finished.get(self.work.needs.key, 0.0))
            self._keep(finished={**self.profile.finished, self.work.needs.key: finished})
        finally:
            self._save()
        self.profile = self.ranks.gather(self.profile)[0]
        return self.profile

    def _known(self) -> Profile | None:
        """What the file has already, on rank 0."""
        if self.ranks.rank or self.work.path is None or not Path(self.work.path).exists():
            return None
        found = Profile.load(self.work.path)
        found.check_machine(self.work.machine)
        return found

    # -- the whole model -------------------------------------------------------------------------------------------

    def _wholes(self) -> None:
        """The whole model, small shares of the batch first, as long as they take no more than their part of the budget."""
        for need in self.work.needs.wholes:
            rounds = self._rounds(WHOLE_SHARE * self.work.budget_seconds - self._agreed_seconds, need.estimated_seconds)
            if need.key in self.profile.contexts or not rounds:
                continue
            self.say(f"measuring {need.key}")
            measure = partial(measure_whole, need.graph, self.device, self._sharing, rounds)
            found = [took for took in self._all(measure) if took]
            if found:
                took = tuple(float(np.mean(seconds)) for seconds in zip(*found, strict=True))
                self._whole_seconds[need.key] = took
                self._note_pace(need.estimated_seconds, sum(took))

    def _rounds(self, left_seconds: float, estimated_seconds: float) -> int:
        """How many rounds of the whole model there is time for; 0 where there is not even for one that counts. The first one
        warms up."""
        seconds = max(self._pace * estimated_seconds, 1e-6)
        rounds = int(left_seconds / seconds) - 1
        return 0 if rounds < 1 else min(rounds, max(WHOLE_ROUNDS, int(WHOLE_SECONDS / seconds)))

    def _contexts(self) -> None:
        """What the whole model took, over the sum of its operators, where all that count were measured."""
        for need in self.work.needs.wholes:
            took = self._whole_seconds.get(need.key)
            entries = [self.profile.operators.get(key) for key in need.calls]
            if took is None or any(entry is None for entry in entries):
                continue
            ahead = sum(entry.forward_seconds for entry in entries if entry is not None)
            back = sum(entry.backward_seconds for entry in entries if entry is not None)
            context = Context(len(entries), took[0], took[1], ahead, back)
            self._keep(contexts={**self.profile.contexts, need.key: context})

    # -- copies and the optimizer ----------------------------------------------------------------------------------

    def _memory(self) -> None:
        needs = self.work.needs
        self.say("measuring copies and the optimizer's step")
        for size in missing_sizes(self.profile.memory.get(COPY), needs.sizes):
            self._keep_point("memory", COPY, self._all(partial(measure_copy, size, self.device, self._sharing)))
        name = f"{needs.optimizer} {needs.dtype}"
        missing = missing_sizes(self.profile.memory.get(name), needs.parameter_sizes)
        mesh = self._mesh() if missing and dist.is_initialized() else None
        for size in missing:
            points = self._all(
                partial(measure_optimizer, needs.optimizer, needs.dtype, size, self.device, mesh, self._sharing)
            )
            self._keep_point("memory", name, points)

    def _mesh(self) -> Any:
        """A DeviceMesh of all ranks, as the runtime makes one: its groups end with the process."""
        mesh = Mesh(data=self.ranks.size)
        mesh.bind(self.device)
        return mesh.device_mesh

    def _keep_point(self, part: str, key: str, points: Sequence[Point | None]) -> None:
        """Put the slowest rank's point on a curve."""
        point = slowest(points)
        if point is not None:
            curves = dict(getattr(self.profile, part))
            curves[key] = Curve((point,)) if key not in curves else curves[key].merged(Curve((point,)))
            self._keep(**{part: curves})

    # -- groups ----------------------------------------------------------------------------------------------------

    def _group(self, need: GroupNeed) -> None:
        """All kinds and sizes of collectives of some groups, and how one goes beside compute."""
        missing = {
            kind: missing_sizes(self.profile.collectives.get(f"{kind} {need.key}"), self.work.needs.sizes)
            for kind in need.kinds
        }
        overlaps = need.key not in self.profile.overlaps
        if not any(missing.values()) and not overlaps:
            return
        self.say(f"measuring collectives between {need}")
        group = Group(need, self.device, self.work.timeout_seconds, self.work.needs.computed_bytes)
        for kind, sizes in missing.items():
            for size in sizes:
                if self._agreed_seconds > GROUPS_SHARE * self.work.budget_seconds and size > self.work.needs.sizes[0]:
                    continue
                points = self._all(partial(measure_collective, group, kind, size, self._sharing))
                self._keep_point("collectives", f"{kind} {need.key}", points)
        if overlaps:
            found = [overlap for overlap in self._all(partial(measure_overlap, group)) if overlap is not None]
            if found:
                worst = Overlap(max(o.compute_slowdown for o in found), max(o.collective_slowdown for o in found))
                self._keep(overlaps={**self.profile.overlaps, need.key: worst})
        group.close()

    # -- operators -------------------------------------------------------------------------------------------------

    def _operators(self) -> None:
        """Those that are missing, in their order, as long as there is time. Which there is follows from what all ranks know."""
        missing = missing_operators(self.work.needs, self.profile)
        for number, need in enumerate(missing):
            expected = self._pace * measuring_seconds(need.estimated_seconds)
            if self._agreed_seconds + expected > self.work.budget_seconds:
                continue
            if number % 50 == 0:
                self.say(f"measuring operators, {number} of {len(missing)}")
            entry = _mean(self._all(partial(measure_operator, need, self.device, self._sharing)))
            if entry is None:
                self._keep(unmeasurable=tuple(sorted({*self.profile.unmeasurable, need.key})))
            else:
                self._note_pace(need.estimated_seconds, entry.forward_seconds + entry.backward_seconds)
                self._keep(operators={**self.profile.operators, need.key: entry})

    def _note_pace(self, estimated_seconds: float, took_seconds: float) -> None:
        if estimated_seconds > 1e-3:
            self._pace = 0.7 * self._pace + 0.3 * took_seconds / estimated_seconds

    # -- together --------------------------------------------------------------------------------------------------

    def _all(self, measure: Callable[[], Result]) -> list[Result]:
        """Every rank's measurement, begun together. One that fails ends its own rank: others may not come to hear of it."""
        found = self.ranks.gather((measure(), time.monotonic() - self._start))
        self._agreed_seconds = found[0][1]
        return [result for result, _ in found]

    def _keep(self, **parts: Any) -> None:
        self.profile = replace(self.profile, **parts)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        if self.ranks.rank == 0 and self.work.path is not None:
            self.profile.save(self.work.path)
            self._saved = time.monotonic()


def missing_sizes(known: Curve | None, sizes: Sequence[int]) -> list[int]:
    """The sizes that a curve has no point of."""
    have = {point.num_bytes for point in known.points} if known is not None else set()
    return [size for size in sizes if size not in have]


def missing_operators(needs: Needs, profile: Profile) -> list[OperatorNeed]:
    """The operators that have not been measured, and may be."""
    tried = {*profile.operators, *profile.unmeasurable}
    return [need for need in needs.operators if need.key not in tried]


def is_complete(work: Work, profile: Profile) -> bool:
    """Whether nothing is left to measure within the budget: it was spent before, or all is there."""
    if profile.finished.get(work.needs.key, -1.0) >= work.budget_seconds:
        return True
    needs = work.needs
    curves = [(profile.memory.get(COPY), needs.sizes)]
    curves.append((profile.memory.get(f"{needs.optimizer} {needs.dtype}"), needs.parameter_sizes))
    curves += [
        (profile.collectives.get(f"{kind} {group.key}"), needs.sizes) for group in needs.groups for kind in group.kinds
    ]
    return not missing_operators(needs, profile) and not any(missing_sizes(curve, sizes) for curve, sizes in curves)


def _mean(entries: Sequence[OperatorEntry | None]) -> OperatorEntry | None:
    """The ranks' measurements of one operator together; they compute at the same time, and wait for each other later."""
    found = [entry for entry in entries if entry is not None]
    if not found:
        return None
    return replace(
        found[0],
        forward_seconds=float(np.mean([entry.forward_seconds for entry in found])),
        backward_seconds=float(np.mean([entry.backward_seconds for entry in found])),
        spread=max(entry.spread for entry in found),
    )
