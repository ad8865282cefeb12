"""Prices of a model's units on one mesh at one micro-batch size, as matrices that compose.

Enters: the short graph at a micro-batch size, a mesh on one kind of devices. Leaves: for weights (prices of memory), the
matrix of every unit of the *whole* model, and lower bounds of what any run of units costs in a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.costing import Costed
from autopar.costing.conversions import FloatArray
from autopar.fitting import gathered_bytes
from autopar.search.decoding import modes_of_run
from autopar.search.places import Chain
from autopar.search.units import Known, momentary_bytes, units_of
from autopar.solver.chain import ROUNDING, Elimination, Floats, Table

FEWEST_LEFT_OUT = 8  # like blocks that a walk may leave out: fewer are walked through


@dataclass(eq=False)
class Priced:
    """Units of the short graph under each mode of recomputation that is ``allowed``, priced when they are asked for.

    ``from_first``: only runs that begin with the first unit are of use; others cost infinity.
    """

    chain: Chain
    price: Callable[[str, Costed | None], Costed]
    allowed: tuple[str, ...]
    available_bytes: float
    from_first: bool = False
    _costed: dict[str, Costed] = field(default_factory=dict)
    _units: dict[str, list[Elimination]] = field(default_factory=dict)
    _known: Known = field(default_factory=Known)
    _eliminations: dict[int, Elimination] = field(default_factory=dict)  # by id of their units
    _momentary: list[float] = field(default_factory=list)  # least bytes held for a moment, by kind of unit
    _gathered: float = 0.0  # bytes that ZeRO-3 may hold of a block's parameters beside

    def units(self, mode: str) -> list[Elimination]:
        """The short graph's units in a mode; equal ones are one object."""
        if mode not in self._units:
            found = units_of(self._priced(mode), self.chain.short_starts, self._known)
            self._note_momentary()
            for unit in found:
                if id(unit) not in self._eliminations:
                    self._eliminations[id(unit)] = Elimination(unit)
            self._units[mode] = [self._eliminations[id(unit)] for unit in found]
            if len(self._units) == len(self.allowed):  # all that is needed of what is priced is in the units
                self._costed.clear()
                self._known = Known()
        return self._units[mode]

    def _note_momentary(self) -> None:
        if not self._momentary:
            costed = next(iter(self._costed.values()))
            self._momentary.extend(momentary_bytes(costed, self.chain.short_starts))
            self._gathered = gathered_bytes(costed)

    def _priced(self, mode: str) -> Costed:
        if mode not in self._costed:
            like = next(iter(self._costed.values()), None)
            self._costed[mode] = self.price(mode, like)
        return self._costed[mode]

    def budgets(self) -> FloatArray:
        """(starts, ends): the bytes that a stage of these units may keep: what is available less what it holds for a moment
        in any case."""
        self.units(self.plain)
        held = np.array([self._momentary[place.kind] for place in self.chain.places])
        count = len(held)
        result = np.full((count, count + 1), float(self.available_bytes))
        for start in range(count):
            result[start, start + 1 :] -= np.maximum.accumulate(held[start:])
        return result

    @property
    def gathered_bytes(self) -> float:
        """What a stage may hold for a moment beside, where memory is so short that it gathers parameters."""
        self.units(self.plain)
        return self._gathered

    def costs(self, weights: Floats, modes: Sequence[str] | None = None) -> Table:
        """(weights, starts, ends): the least weighted cost of every run of units, its ports free, less rounding.

        A block that lies in the run as a whole takes the mode of ``modes`` (by default all that are allowed) that suits it;
        of a block that is cut nothing is recomputed.
        """
        taken = [mode for mode in self.allowed if mode == self.plain or modes is None or mode in modes]
        starts = 1 if self.from_first else len(self.chain.places)
        found = _Run(self.chain, self._matrices(weights, taken), self.plain).costs(len(weights), starts)
        return np.asarray(found * np.float32(1 - rounding_of(self.chain)), dtype=np.float32)

    def modes(
        self, weights: Floats, runs: Sequence[tuple[int, int]]
    ) -> list[list[tuple[float, list[str]]]]:
        """For each run of units and each weight, the least cost and the mode of each block that the run has whole."""
        matrices = self._matrices(weights, self.allowed)
        places = self.chain.places
        return [
            [modes_of_run(places[start:end], matrices, self.plain, index) for index in range(len(weights))]
            for start, end in runs
        ]

    def fastest(self, weights: Floats) -> Table:
        """Costs where bytes do not count, so that nothing is recomputed."""
        return self.costs(weights, [self.plain])

    def leanest(self, weights: Floats) -> Table:
        """Costs where only bytes count, so that as much is recomputed as may be."""
        return self.costs(weights, self.allowed[-1:])

    @property
    def plain(self) -> str:
        """The mode of blocks that are cut."""
        return self.allowed[0]

    def _matrices(self, weights: Floats, modes: Sequence[str]) -> dict[str, list[Table]]:
        known: dict[int, Table] = {}
        found: dict[str, list[Table]] = {}
        for mode in modes:
            for unit in self.units(mode):
                if id(unit) not in known:
                    known[id(unit)] = unit.evaluate(weights)
            found[mode] = [known[id(unit)] for unit in self.units(mode)]
        return found


def rounding_of(chain: Chain) -> float:
    """By what part sums along a chain may be too large: those of a unit, and half of the last place for each unit added."""
    return ROUNDING + chain.num_units * float(np.finfo(np.float32).eps) / 2


@dataclass(frozen=True)
class _Reached:
    """The least cost of getting from a start to the end of a unit, by weight and state, for each mode of the open block."""

    by_mode: Mapping[str, Table]
    whole: bool  # whether the open block began after the start

    def least(self) -> Table:
        arrays = list(self.by_mode.values())
        found = arrays[0]
        for array in arrays[1:]:
            if array is not found:
                found = np.minimum(found, array)
        return found


class _Run:
    """Walks along a chain from every start. Starts that the same kinds follow share the walk as far as that goes."""

    def __init__(self, chain: Chain, matrices: Mapping[str, list[Table]], plain: str) -> None:
        self.chain, self.places, self.matrices, self.plain = chain, chain.places, matrices, plain
        self.modes = list(matrices)
        self.keys = [place.key for place in chain.places]

    def costs(self, num_weights: int, num_starts: int) -> Table:
        """From each of the first ``num_starts`` units."""
        if num_starts == 1:
            return self._from_first(num_weights)
        count = len(self.places)
        result = np.full((num_weights, count, count + 1), np.inf, dtype=np.float32)
        walked: dict[object, tuple[int, list[_Reached]]] = {}
        for start in range(num_starts):
            base, path = walked.get(self.keys[start], (start, []))
            shared = self._common(base, start) if path else 0
            if shared:
                result[:, start, start + 1 : start + shared + 1] = result[:, base, base + 1 : base + shared + 1]
                reached = path[shared - 1]
            else:
                reached = self._at(start, num_weights)
            own = path[:shared]
            for unit in range(start + shared, count):
                reached = self._through(reached, unit)
                own.append(reached)
                result[:, start, unit + 1] = self._ending(reached, unit)
            walked.setdefault(self.keys[start], (start, own))
        return result

    def _from_first(self, num_weights: int) -> Table:
        """From the first unit alone. Where a block added as much to every state, each like block that follows adds that again:
        what leads from one end of a block to the next is monotone, and adds to all states what is added to all before it."""
        count = len(self.places)
        result = np.full((num_weights, count, count + 1), np.inf, dtype=np.float32)
        reached, unit = self._at(0, num_weights), 0
        ends: dict[int, Table] = {}
        while unit < count:
            reached = self._through(reached, unit)
            result[:, 0, unit + 1] = self._ending(reached, unit)
            if self.places[unit].closes:
                ends[unit] = reached.least()
                size, times = self.chain.repeats.get(unit, (0, 0))
                added = _added(ends[unit - size], ends[unit]) if times >= FEWEST_LEFT_OUT else None
                if added is not None:
                    shifts = np.arange(1, times + 1) * added[:, None]
                    block = result[:, 0, unit + 2 - size : unit + 2]
                    result[:, 0, unit + 2 : unit + 2 + times * size] = (
                        block[:, None] + shifts[:, :, None]
                    ).reshape(num_weights, -1)
                    after = (ends[unit] + shifts[:, -1:]).astype(np.float32)
                    unit += times * size
                    reached, ends[unit] = _Reached(dict.fromkeys(self.modes, after), True), after
            unit += 1
        return result

    def _common(self, base: int, start: int) -> int:
        """How many units from both starts are of the same kinds."""
        count = len(self.keys) - start
        for length in range(count):
            if self.keys[base + length] != self.keys[start + length]:
                return length
        return count

    def _at(self, start: int, num_weights: int) -> _Reached:
        states = self.matrices[self.plain][self.places[start].kind].shape[1]
        free = np.zeros((num_weights, states), dtype=np.float32)
        place = self.places[start]
        return _Reached(dict.fromkeys(self.modes, free), place.opens)

    def _through(self, reached: _Reached, unit: int) -> _Reached:
        place = self.places[unit]
        by_mode, whole = reached.by_mode, reached.whole
        if place.opens:
            by_mode, whole = dict.fromkeys(self.modes, reached.least()), True
        taken = self.modes if whole and place.block is not None else [self.plain]
        after = {m: (by_mode[m][:, :, None] + self.matrices[m][place.kind]).min(axis=1) for m in taken}
        if place.closes:
            after = dict.fromkeys(self.modes, _Reached(after, whole).least())
        return _Reached(after, whole)

    def _ending(self, reached: _Reached, unit: int) -> Table:
        """The cost of a run that ends with this unit."""
        last = reached.least() if self.places[unit].closes else reached.by_mode[self.plain]
        return np.asarray(last.min(axis=1))


def _added(before: Table, after: Table) -> Floats | None:
    """By weight, by how much ``after`` is above ``before``, (weights, states), in every state, less a rounding width. None
    where it is more in some states than in others."""
    finite = np.isfinite(after)
    if (finite != np.isfinite(before)).any() or not finite.any(axis=1).all():
        return None
    wide = after.astype(np.float64)
    differences = np.subtract(wide, before, out=np.full(wide.shape, np.nan), where=finite)
    rounding = np.finfo(np.float32).eps * np.abs(wide, where=finite, out=np.zeros(wide.shape)).max(axis=1)
    least, most = np.nanmin(differences, axis=1), np.nanmax(differences, axis=1)
    return None if (most - least > 2 * rounding).any() else np.asarray(least - rounding)
