"""Which pipeline rank has which stages, and which parameters and buffers: known to every rank without a message.

Every rank makes the modules of all stages, which costs nothing before their slots are allocated, and allocates those of its
own stages.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis, Mesh
from autopar.runtime.parameters import BufferSlot, ParameterSlot
from autopar.runtime.program import Stage

Slot = ParameterSlot | BufferSlot

V_SHAPED = ("zbv", "dualpipev")


@dataclass
class OwnStage:
    """A stage of this rank: its number, what the program says of it, and its module."""

    index: int
    description: Stage
    module: nn.Module


def place_of(schedule: str, stage: int, num_places: int) -> int:
    """The pipeline rank of a stage: in a loop, or there and back."""
    if schedule in V_SHAPED:
        return min(stage, 2 * num_places - 1 - stage)
    return stage % num_places


class Holdings:
    """The slots of a program by name; tied parameters and buffers of several stages once.

    ``described``: every slot of the program in the order of its stages, this rank's own where it has one. ``places``: the
    pipeline ranks that have it, that of its first stage first. ``twins`` and ``buffer_twins``: more slots of the same in
    other stages of this rank.
    """

    def __init__(self, program: types.ModuleType, mesh: Mesh, schedule: str) -> None:
        self._mesh = mesh
        self.described: dict[str, Slot] = {}
        self.places: dict[str, tuple[int, ...]] = {}
        self.slots: dict[str, ParameterSlot] = {}
        self.buffer_slots: dict[str, BufferSlot] = {}
        self.twins: list[ParameterSlot] = []
        self.buffer_twins: list[BufferSlot] = []
        self.stages: list[OwnStage] = []
        self._names: dict[str, str] = {}
        for index, entry in enumerate(program.STAGES):
            description = entry if isinstance(entry, Stage) else Stage(entry)
            place = place_of(schedule, index, mesh.stages.size)
            module = description.make()
            if place == mesh.stages.place:
                self.stages.append(OwnStage(index, description, module))
            self._describe(module, place, set())

    def _describe(self, module: nn.Module, place: int, here: set[str]) -> None:
        """Take up the slots of one stage."""
        for slot in module.modules():
            if not isinstance(slot, (ParameterSlot, BufferSlot)):
                continue
            for name in (slot.name, *slot.aliases):
                if name in here:
                    raise ProgramError(f"two slots of a stage are called {name!r}")
                if self._names.setdefault(name, slot.name) != slot.name:
                    raise ProgramError(f"{slot.name!r} is called {self._names[name]!r} in another stage")
                here.add(name)
            places = self.places.get(slot.name, ())
            self.places[slot.name] = places if place in places else (*places, place)
            if place == self._mesh.stages.place:
                self.described[slot.name] = self._adopt(slot)
            else:
                self.described.setdefault(slot.name, slot)

    def _adopt(self, slot: Slot) -> Slot:
        """Allocate a slot of this rank; the first of its name."""
        device = self._mesh.device
        if isinstance(slot, BufferSlot):
            first = self.buffer_slots.setdefault(slot.name, slot)
            slot.allocate(device, first if first is not slot else None)
            self.buffer_twins += [slot] if first is not slot else []
            return first
        if slot.name in self.slots:
            slot.allocate(device, self.slots[slot.name])
            self.twins.append(slot)
        else:
            slot.allocate(device)
            self.slots[slot.name] = slot
        return self.slots[slot.name]

    def all_slots(self) -> Iterator[ParameterSlot]:
        """This rank's parameter slots, twins included."""
        yield from self.slots.values()
        yield from self.twins

    def all_buffer_slots(self) -> Iterator[BufferSlot]:
        """This rank's buffer slots, twins included."""
        yield from self.buffer_slots.values()
        yield from self.buffer_twins

    def name_of(self, name: str) -> str:
        """The first name of the parameter or buffer that has this name."""
        own = self._names.get(name)
        if own is None:
            raise ProgramError(f"the program has no parameter or buffer {name!r}")
        return own

    def owner(self, name: str) -> int:
        """The pipeline rank of the first stage that has it."""
        return self.places[name][0]

    def ties(self) -> dict[str, Axis]:
        """Trainable parameters of several pipeline ranks, each with the axis of those ranks.

        All ranks must call this together: it makes process groups.
        """
        axes: dict[tuple[int, ...], Axis | None] = {}
        found: dict[str, Axis] = {}
        for name, places in self.places.items():
            slot = self.described[name]
            if len(places) == 1 or not isinstance(slot, ParameterSlot) or not slot.trainable:
                continue
            places = tuple(sorted(places))
            if places not in axes:
                axes[places] = self._mesh.part_of_stages(places)
            axis = axes[places]
            if axis is not None:
                found[name] = axis
        return found
