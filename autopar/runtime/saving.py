"""Saving and loading with torch.distributed.checkpoint (DCP), from any plan to any other plan on any number of ranks.

A DTensor cannot say where the pieces of a fused or unevenly nested dim lie, and DCP would write them to wrong places
without an error. So DCP is given a :class:`~autopar.runtime.pieces.Piece` for every tensor: something of the whole's shape
of which this rank has the rectangles that its slot lists (:meth:`ParameterSlot.chunks`). DCP writes a rectangle that many
ranks have once, and when loading copies what overlaps. The folder is an ordinary DCP checkpoint:

===========================================  ======================================================================
key                                          what
===========================================  ======================================================================
``transformer.wte.weight``                   a parameter or persistent buffer, whole, under the model's own name
``optimizer.state.<parameter>.<name>``       an optimizer's state, such as ``exp_avg`` or ``step``
``optimizer.groups``                         the optimizer's class and the options and parameter names of its groups
``training.num_steps``                       how many steps were made, which random numbers follow from
===========================================  ======================================================================

A checkpoint is written aside and moved into its folder when it is complete; ``.metadata`` arrives last and marks the
end.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from autopar.runtime import collectives
from autopar.runtime.errors import ProgramError
from autopar.runtime.layouts import Word, changes
from autopar.runtime.mesh import Mesh
from autopar.runtime.parameters import BufferSlot, ParameterSlot, local_of
from autopar.runtime.pieces import Slot, piece_of

GROUPS = "optimizer.groups"
STATE = "optimizer.state."
NUM_STEPS = "training.num_steps"

_METADATA = ".metadata"  # DCP writes it last
_PART = ".part"  # sub-folder in which a checkpoint is written


# -- parameters and buffers ------------------------------------------------------------------------------------------


def state_dict(slots: Sequence[Slot]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, to be given to ``torch.distributed.checkpoint.save`` or ``load``."""
    return {slot.name: piece_of(slot) for slot in _saved(slots)}


def _saved(slots: Sequence[Slot]) -> Iterator[Slot]:
    """The slots that a checkpoint has: not what is recomputed, and nothing without elements."""
    for slot in slots:
        if slot.shape.numel() and not (isinstance(slot, BufferSlot) and not slot.persistent):
            yield slot


def full_state_dict(
    slots: Sequence[Slot], mesh: Mesh, *, all_ranks: bool = False, owners: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Whole tensors on the CPU under all of the model's own names, as ``model.load_state_dict`` wants them.

    On rank 0 only, other ranks get an empty dict, unless ``all_ranks``. All ranks must call this together. One tensor
    at a time is whole on the ranks' devices. With several pipeline ranks ``slots`` are those of all stages, and
    ``owners`` says which pipeline rank gives each of them.
    """
    found: dict[str, Tensor] = {}
    wanted = all_ranks or mesh.rank == 0
    receives = all_ranks or mesh.position == mesh.ranks.index(0) % mesh.size
    for slot in slots:
        if isinstance(slot, BufferSlot) and not slot.persistent:
            continue
        owner = mesh.stages.place if owners is None else owners[slot.name]
        if owner == mesh.stages.place:
            whole = whole_tensor(slot, mesh)
        elif receives:
            whole = torch.empty(slot.shape, dtype=slot.dtype, device=mesh.device)
        else:
            continue
        if owners is not None and receives:
            with _uncounted(mesh):
                whole = collectives.broadcast_in_place(whole.contiguous(), mesh.stages, owner)
        if wanted:
            copy = whole.detach().to("cpu", copy=True)
            found.update(dict.fromkeys((slot.name, *slot.aliases), copy))
    return found


@contextmanager
def _uncounted(mesh: Mesh) -> Iterator[None]:
    """What is sent for a checkpoint is not part of a step."""
    ledger, mesh.ledger = mesh.ledger, None
    try:
        yield
    finally:
        mesh.ledger = ledger


@torch.no_grad()
def whole_tensor(slot: Slot, mesh: Mesh, tensor: Tensor | None = None) -> Tensor:
    """``tensor``, laid out like the slot's piece at rest (by default that piece), gathered whole on every rank."""
    local = (slot.local if tensor is None else local_of(tensor)).to(mesh.device)
    replicated = (Word("R"),) * len(mesh.axes)
    rest = tuple(word if word.kind == "S" else Word("R") for word in slot.rest)
    with _uncounted(mesh):
        for change in changes(rest, replicated, slot.shape, mesh):
            local = change.forward(local)
    return local


# -- saving ----------------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    slots: Sequence[Slot],
    mesh: Mesh,
    optimizer: torch.optim.Optimizer | None = None,
    num_steps: int = 0,
) -> None:
    """Write parameters, persistent buffers, the number of steps made and, if given, the optimizer's states to ``folder``.
    All ranks call this together.

    A checkpoint that is there already is replaced once the new one is complete; other files in the folder are left
    alone. Raises :class:`ProgramError` on every rank when one of them fails.
    """
    folder = Path(folder)
    content: dict[str, Any] = {**state_dict(slots), NUM_STEPS: num_steps}
    problem = None
    try:
        content |= _optimizer_content(slots, optimizer) if optimizer is not None else {}
    except ProgramError as error:
        problem = str(error)
    _agree(mesh, problem)
    if optimizer is not None and mesh.stages.size > 1:
        content[GROUPS] = _joined_groups(content[GROUPS], mesh)
    part = folder / _PART
    _on_first_rank(mesh, lambda: _start_empty(folder, part))
    with _explained(f"the checkpoint cannot be written to {folder}", mesh):
        dcp.save(
            content,
            storage_writer=dcp.FileSystemWriter(part),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not mesh.has_groups,
        )
    _on_first_rank(mesh, lambda: _move_in(folder, part))


def _start_empty(folder: Path, part: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ProgramError(f"{folder} is a file: a checkpoint is a folder, give the path of a new or an old one")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _move_in(folder: Path, part: Path) -> None:
    """Replace the checkpoint in ``folder`` by the one in ``part``; in between there is none, never a mixture of two."""
    (folder / _METADATA).unlink(missing_ok=True)
    for old in folder.glob("__*.distcp"):
        old.unlink()
    for new in sorted(part.iterdir()):
        if new.name != _METADATA:
            new.replace(folder / new.name)
    (part / _METADATA).replace(folder / _METADATA)
    shutil.rmtree(part)


def _optimizer_content(slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's states and options under their keys."""
    names = _slots_by_parameter(slots)
    content: dict[str, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [_slot_of(parameter, names) for parameter in group["params"]]
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append({"params": [slot.name for slot in members], **options})
        for parameter, slot in zip(group["params"], members, strict=True):
            for name, value in optimizer.state.get(parameter, {}).items():
                content[f"{STATE}{slot.name}.{name}"] = _state_content(slot, name, value)
    content[GROUPS] = {"class": type(optimizer).__name__, "groups": groups}
    return content


def _joined_groups(own: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The groups of an optimizer with the parameters of all pipeline ranks, each of which has its own in it."""
    everyone: list[Any] = [None] * mesh.num_ranks
    dist.all_gather_object(everyone, own)
    groups: list[dict[str, Any]] = []
    for said in everyone:
        for at, group in enumerate(said["groups"]):
            if at == len(groups):
                groups.append({**group, "params": []})
            groups[at]["params"] += [name for name in group["params"] if name not in groups[at]["params"]]
    return {"class": own["class"], "groups": groups}


def _state_content(slot: ParameterSlot, name: str, value: Any) -> Any:
    """A state as DCP takes it: a piece where it has the parameter's shape, else the value itself, equal on all
    ranks."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == slot.shape and slot.shape:
        return piece_of(slot, value)
    if value.dim() == 0:
        return local_of(value)
    raise ProgramError(
        f"the optimizer's state {name!r} of {slot.name} has the shape {tuple(value.shape)}, the parameter "
        f"{tuple(slot.shape)}: only scalars and states of the parameter's shape can be put together from shards; "
        "use an optimizer that works element by element, such as AdamW"
    )


def _slots_by_parameter(slots: Sequence[Slot]) -> dict[int, ParameterSlot]:
    return {id(slot.storage): slot for slot in slots if isinstance(slot, ParameterSlot)}


def _slot_of(parameter: Tensor, slots: Mapping[int, ParameterSlot]) -> ParameterSlot:
    if id(parameter) not in slots:
        raise ProgramError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not this program's: build it on "
            "parallel.parameters(), and anew after parallelize()"
        )
    return slots[id(parameter)]


# -- loading ---------------------------------------------------------------------------------------------------------


def load(
    folder: str | Path, slots: Sequence[Slot], mesh: Mesh, optimizer: torch.optim.Optimizer | None = None
) -> int | None:
    """Read into the slots, and if given into the optimizer, what :func:`save` wrote, whatever the plan was then. Returns the
    number of steps made before, None where the checkpoint does not say.

    All ranks call this together. States that the optimizer does not have yet are made. Raises :class:`ProgramError` on
    every rank, with nothing changed, when there is no checkpoint, or names are missing, or shapes differ.
    """
    folder = Path(folder)
    content: dict[str, Any] = {}
    problem, states = None, _States({}, [])
    try:
        metadata = _read_metadata(folder)
        content = {key: piece_of(slot) for key, slot in _keys(slots, metadata, folder).items()}
        if NUM_STEPS in metadata.state_dict_metadata:
            content[NUM_STEPS] = 0
        if optimizer is not None:
            states = _wanted_states(slots, optimizer, metadata, folder)
            content |= states.content
    except ProgramError as error:
        problem = str(error)
    _agree(mesh, problem)
    with _explained(f"the checkpoint in {folder} cannot be read", mesh):
        dcp.load(
            content,
            storage_reader=dcp.FileSystemReader(folder),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not mesh.has_groups,
        )
    for slot in slots:
        if isinstance(slot, ParameterSlot):
            slot.invalidate()
    if optimizer is not None:
        _put_states(optimizer, states, content)
    return content.get(NUM_STEPS)


def _read_metadata(folder: Path) -> Metadata:
    if not (folder / _METADATA).is_file():
        reason = "does not exist" if not folder.exists() else "has no checkpoint, or one whose writing did not finish"
        raise ProgramError(f"{folder} {reason}: give a folder that save() wrote")
    try:
        return dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise ProgramError(
            f"the checkpoint in {folder} is damaged ({type(error).__name__}: {error}): use another one"
        ) from error


def _keys(slots: Sequence[Slot], metadata: Metadata, folder: Path) -> dict[str, Slot]:
    """The slots to load by their keys: their names, or another of their names where another tied one was saved.

    An error lists all that the checkpoint lacks, or has in another shape.
    """
    entries = metadata.state_dict_metadata
    found: dict[str, Slot] = {}
    missing, differing = [], []
    for slot in _saved(slots):
        key = next((name for name in (slot.name, *slot.aliases) if name in entries), None)
        if key is None:
            missing.append(slot.name)
            continue
        found[key] = slot
        entry = entries[key]
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else "no tensor"
        if size != tuple(slot.shape):
            differing.append(f"{slot.name} {size} there, {tuple(slot.shape)} here")
    if missing:
        there = [key for key in entries if key != NUM_STEPS and not key.startswith("optimizer.")]
        raise ProgramError(
            f"the checkpoint in {folder} lacks {_listed(missing)} of this model's {len(found) + len(missing)} tensors; "
            f"it has {_listed(there)}: load it into the model that it was saved from"
        )
    if differing:
        raise ProgramError(
            f"the checkpoint in {folder} has tensors of other shapes ({_listed(differing)}): load it into a model "
            "of the same sizes"
        )
    return found


class _States:
    """Optimizer states to be read: by key what DCP fills, and where each of them belongs."""

    def __init__(self, content: dict[str, Any], places: list[tuple[Tensor, str, str, Any]]) -> None:
        self.content = content
        self.places = places  # parameter, name of the state, key, the tensor that is filled (None: an object is read)


def _wanted_states(
    slots: Sequence[Slot], optimizer: torch.optim.Optimizer, metadata: Metadata, folder: Path
) -> _States:
    entries = metadata.state_dict_metadata
    if GROUPS not in entries:
        raise ProgramError(f"the checkpoint in {folder} has no optimizer states: load it without optimizer=")
    by_parameter = _slots_by_parameter(slots)
    by_name: dict[str, list[str]] = {}
    parameter_names = {name for slot in slots for name in (slot.name, *slot.aliases)}
    for key in entries:
        if key.startswith(STATE):
            parameter, _, name = key.removeprefix(STATE).rpartition(".")
            if parameter in parameter_names:
                by_name.setdefault(parameter, []).append(name)
    states = _States({GROUPS: {}}, [])
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            slot = _slot_of(parameter, by_parameter)
            saved_as = next((name for name in (slot.name, *slot.aliases) if name in by_name), slot.name)
            for name in by_name.get(saved_as, []):
                key = f"{STATE}{saved_as}.{name}"
                target = _state_target(slot, optimizer.state.get(parameter, {}).get(name), entries, key, on_device)
                states.content[key] = _state_content(slot, name, target)
                states.places.append((parameter, name, key, target))
    return states


def _state_target(
    slot: ParameterSlot, present: Any, entries: Mapping[str, Any], key: str, on_device: bool
) -> Tensor | None:
    """The tensor to fill: the one that the optimizer has, or a new one; None where the state is no tensor."""
    entry = entries[key]
    if isinstance(entry, BytesStorageMetadata):
        return None
    size = tuple(entry.size)
    if size and size != tuple(slot.shape):
        raise ProgramError(
            f"the optimizer's state {key} has the shape {size} in the checkpoint, the parameter {tuple(slot.shape)}"
        )
    if isinstance(present, Tensor) and tuple(present.shape) == size:
        return present
    dtype = entry.properties.dtype
    if not size and (slot.shape or key.endswith(".step")):
        return torch.zeros((), dtype=dtype, device=slot.local.device if on_device else "cpu")
    saved_parameter = next((entries[name] for name in (slot.name, *slot.aliases) if name in entries), None)
    if saved_parameter is not None and dtype == saved_parameter.properties.dtype:
        dtype = slot.dtype  # a state that followed its parameter's type follows it here, too
    return torch.zeros_like(slot.storage, dtype=dtype, requires_grad=False)


@torch.no_grad()
def _put_states(optimizer: torch.optim.Optimizer, states: _States, content: Mapping[str, Any]) -> None:
    """Give the optimizer what was read: states, and the options of its groups."""
    _put_options(optimizer, states, content[GROUPS])
    fresh: dict[Tensor, dict[str, Any]] = {}
    for parameter, name, key, target in states.places:
        fresh.setdefault(parameter, {})[name] = target if target is not None else content[key]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if parameter in fresh:
                optimizer.state[parameter] = fresh[parameter]


def _put_options(optimizer: torch.optim.Optimizer, states: _States, saved: Mapping[str, Any]) -> None:
    """The saved options of each group, found by the names of its parameters where groups are not the same."""
    groups = saved["groups"]
    if len(groups) == len(optimizer.param_groups):
        chosen = list(groups)
    elif len(groups) == 1:
        chosen = list(groups) * len(optimizer.param_groups)
    else:
        return  # regrouped: the options given now stand
    for group, options in zip(optimizer.param_groups, chosen, strict=True):
        group.update({name: value for name, value in options.items() if name != "params" and name in group})


# -- all ranks together ----------------------------------------------------------------------------------------------


def _agree(mesh: Mesh, problem: str | None) -> None:
    """Raise on every rank what any rank found, the lowest rank's message."""
    problems: list[str | None] = [problem]
    if mesh.has_groups:
        problems = [None] * mesh.num_ranks
        dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise ProgramError(found)


def _on_first_rank(mesh: Mesh, action: Callable[[], None]) -> None:
    """Do it on rank 0 while the others wait; its failure is everyone's."""
    problem = None
    if mesh.rank == 0:
        try:
            action()
        except (OSError, ProgramError) as error:
            problem = str(error)
    _agree(mesh, problem)


@contextmanager
def _explained(what: str, mesh: Mesh) -> Iterator[None]:
    """DCP's own errors (which it raises on every rank) as ours, and its remark about single processes left out."""
    try:
        with warnings.catch_warnings():
            if not mesh.has_groups:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Pipeline ranks have other parameters than each other, and read those.
            warnings.filterwarnings("ignore", message="Detected mismatched keys")
            yield
    except dcp.CheckpointException as error:
        failures = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
        raise ProgramError(f"{what}: {failures}") from error


def _listed(names: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
