"""A frame with its cuts in full: every stage solved, and the step simulated.

Enters: a frame, the ends of its stages. Leaves: an :class:`Evaluated` plan with its simulated step, or what it lacks.
Stages that are alike (same operators, micro-batches in flight, devices) are solved once. All boundaries between stages
have one *style*: on each axis of the mesh the batch is split, or the dim behind it, or nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costing import Prepared, prepare
from autopar.fitting import Solve
from autopar.graph import ITEM_BYTES, OpGraph, Value
from autopar.layout import REPLICATED, Cut, Layout, Shard, State, local_shape
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from autopar.search.bounds import stage_ranks
from autopar.search.space import ZERO_BUBBLE, Frame, kind_of
from autopar.search.stages import Aim, Site, Solved, StageSolver, storages_of, tied_parameters
from autopar.solver import Assignment
from autopar.staging import stage_graphs
from cost_models import CostModel, Hops, StageTimes, in_flight, step_seconds_only

Style = tuple[str, ...]  # for each axis: "batch", "next" or "whole"


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A frame's plan. ``step_seconds`` is infinite where some stage does not fit."""

    frame: Frame
    cuts: tuple[str, ...]
    style: Style
    graphs: tuple[OpGraph, ...]
    stages: tuple[Solved, ...]
    hops: Hops
    step_seconds: float

    @property
    def fits(self) -> bool:
        return all_fit(self.frame, self.stages)

    @property
    def peak_bytes(self) -> float:
        """On the fullest device, all of its stages together."""
        return max(rank_bytes(self))


def split_times(frame: Frame, stages: Sequence[Solved]) -> list[StageTimes]:
    """The stages' times as the runtime divides the backward pass in zero-bubble schedules: the first stage does all of it
    with the weights' part, and a stage that recomputes, or gathers parameters again, all of it with the inputs' part."""
    found = []
    for index, stage in enumerate(stages):
        times = stage.times
        back = times.backward_input_seconds + times.backward_weight_seconds
        if frame.schedule not in ZERO_BUBBLE:
            found.append(times)
        elif index == 0:
            found.append(replace(times, backward_input_seconds=0.0, backward_weight_seconds=back))
        elif stage.repeats:
            found.append(replace(times, backward_input_seconds=back, backward_weight_seconds=0.0))
        else:
            found.append(times)
    return found


def all_fit(frame: Frame, stages: Sequence[Solved]) -> bool:
    """Whether each stage fits, and what those of each pipeline rank keep on the host does together."""
    kept = [0.0] * frame.grid.num_ranks
    for rank, stage in zip(stage_ranks(frame), stages, strict=False):
        kept[rank] += stage.candidate.host_bytes / max(stage.candidate.host_available_bytes, 1.0)
    return all(stage.fits for stage in stages) and max(kept) <= 1.0 + 1e-9


def rank_bytes(evaluated: Evaluated) -> list[float]:
    """Peak bytes of each pipeline rank's devices."""
    found = [0.0] * evaluated.frame.grid.num_ranks
    for rank, stage in zip(stage_ranks(evaluated.frame), evaluated.stages, strict=True):
        found[rank] += stage.candidate.peak_bytes
    return found


class Evaluator:
    """Evaluates plans of one model on one cluster."""

    def __init__(
        self, cost_model: CostModel, options: PlanOptions, solve: Solve, like: Evaluator | None = None
    ) -> None:
        """``like``: another of the same model, whose reading of it is used again."""
        self.cost_model, self.options, self.solve = cost_model, options, solve
        self._prepared: dict[object, Prepared] = like._prepared if like else {}
        self._solved: dict[object, tuple[OpGraph, Solved]] = {}
        self._solvers: dict[object, StageSolver] = {}
        self._structures: dict[int, tuple[OpGraph, object]] = {}  # by identity, with what has it
        self._unlimited: dict[object, dict[tuple[int, ...], Assignment]] = {}  # of stages alike, whatever is in flight

    def note(self, graph: OpGraph, like: Prepared | None = None) -> None:
        """Read a graph that will be priced; ``like`` as for :func:`prepare`."""
        if id(graph) not in self._prepared:
            self._prepared[id(graph)] = prepare(graph, like)

    def styles(self, frame: Frame) -> list[Style]:
        """The styles of boundaries that may be tried; the batch split over every axis first."""
        if frame.num_stages == 1:
            return [("whole",) * len(frame.grid.mesh_shape)]
        ways = [
            ("batch", "whole") if role == "data" else ("whole", "next") if role == "tensor" else ("batch", "whole", "next")
            for role in frame.grid.roles
        ]
        return list(itertools.product(*ways))

    def best_style(self, frame: Frame, middle: OpGraph | None) -> Style:
        """The style in which ``middle``, a typical stage at the frame's micro-batch size, is fastest."""
        styles = self.styles(frame)
        if middle is None or len(styles) == 1:
            return styles[0]
        mesh = frame.grid.mesh
        seconds: dict[Style, float] = {}
        known: dict[object, float] = {}
        for style in styles:
            boundary = {
                value: boundary_layout(middle.values[value], style, mesh) for value in (*middle.received, *middle.sent)
            }
            key = tuple(boundary.values())
            if key not in known:
                solver = self._solver(middle, self._site(frame, mesh, 0, 1, 1.0), boundary, {})
                known[key] = solver.unlimited().candidate.assignment.cost_seconds
            seconds[style] = known[key]
        return min(styles, key=lambda style: seconds[style])

    def evaluate(
        self,
        frame: Frame,
        graph: OpGraph,
        cuts: Sequence[str],
        style: Style,
        to_beat_seconds: float = math.inf,
        enough_seconds: float = 0.0,
        wanted: Sequence[tuple[int, ...]] | None = None,
        near: Sequence[float | None] | None = None,
    ) -> Evaluated:
        """The plan of one frame with these cuts. ``graph``: the whole model at the frame's micro-batch size.

        A stage that takes ``to_beat_seconds`` or more ends the evaluation; a step of ``enough_seconds`` is good enough.
        ``wanted``: for each stage the numbers of blocks in each mode of recomputation that should suit it; ``near``: the
        seconds that a byte is expected to be worth there.
        """
        enough_seconds = enough_seconds if frame.num_stages == 1 else 0.0
        graphs = stage_graphs(graph, cuts)
        mesh = frame.grid.mesh
        boundary = {
            value: boundary_layout(graph.values[value], style, mesh) for stage in graphs for value in stage.sent
        }
        flying = in_flight(frame.schedule, frame.grid.num_ranks, frame.num_stages, frame.num_micro_batches)
        storage = self._common_storage(frame, graphs, mesh, boundary, flying)
        solved: list[Solved] = []
        shares = self._shares(frame, graphs, mesh, boundary, flying, storage)
        for stage, rank, count, share in zip(graphs, stage_ranks(frame), flying, shares, strict=True):
            site = self._site(frame, mesh, rank, count, share)
            at = len(solved)
            aim = Aim(to_beat_seconds, enough_seconds, wanted[at] if wanted else None, near[at] if near else None)
            found = self._stage(stage, site, _at(stage, boundary), _within(stage, storage), aim)
            solved.append(found)
            if found.candidate.stage is None or found.candidate.assignment.cost_seconds >= to_beat_seconds:
                break
            parameters = found.candidate.stage.parameters
            storage.update((v, frozenset([parameters[v].storage])) for v in storage if v in parameters)
        hops = self._hops(frame, graphs, boundary, mesh)
        step = math.inf
        if len(solved) == len(graphs) and all_fit(frame, solved):
            times = split_times(frame, solved)
            step = step_seconds_only(frame.schedule, times, hops, frame.grid.num_ranks, frame.num_micro_batches)
        return Evaluated(frame, tuple(cuts), style, graphs, tuple(solved), hops, step)

    def unlimited(self, frame: Frame, graph: OpGraph) -> Evaluated:
        """The plan of a frame of one stage, whether it fits or not."""
        mesh = frame.grid.mesh
        stage = self._solver(graph, self._site(frame, mesh, 0, 1, 1.0), {}, {}).unlimited()
        step = stage.candidate.assignment.cost_seconds
        return Evaluated(frame, (), self.styles(frame)[0], (graph,), (stage,), Hops((), ()), step)

    def _site(self, frame: Frame, mesh: Mesh, rank: int, flying: int, share: float) -> Site:
        first = frame.grid.order[rank] * mesh.num_devices
        available = self.cost_model.min_device_memory_bytes(self.options.memory_margin, first, mesh.num_devices)
        return Site(mesh, frame.grid.roles, first, frame.num_micro_batches, flying, available * share)

    def _shares(
        self,
        frame: Frame,
        graphs: Sequence[OpGraph],
        mesh: Mesh,
        boundary: Mapping[str, Layout],
        flying: Sequence[int],
        storage: Mapping[str, frozenset[Layout]],
    ) -> list[float]:
        """The part of its device's memory that each stage may fill: all of it, or, of stages on one rank, in proportion to
        what they would fill without a limit."""
        ranks = stage_ranks(frame)
        if len(graphs) == frame.grid.num_ranks:
            return [1.0] * len(graphs)
        free = []
        for stage, rank, count in zip(graphs, ranks, flying, strict=True):
            site = replace(self._site(frame, mesh, rank, count, 1.0), available_bytes=math.inf)
            here = self._stage(stage, site, _at(stage, boundary), _within(stage, storage), Aim())
            free.append(here.candidate.peak_bytes)
        totals = [sum(size for size, other in zip(free, ranks, strict=True) if other == rank) for rank in ranks]
        return [size / total for size, total in zip(free, totals, strict=True)]

    def _common_storage(
        self,
        frame: Frame,
        graphs: Sequence[OpGraph],
        mesh: Mesh,
        boundary: Mapping[str, Layout],
        flying: Sequence[int],
    ) -> dict[str, frozenset[Layout]]:
        """The layouts in which all stages that hold a tied parameter can keep it."""
        tied = tied_parameters(graphs)
        found: dict[str, frozenset[Layout]] = {}
        for stage, rank, count in zip(graphs, stage_ranks(frame), flying, strict=True):
            mine = [value for value in tied if value in stage.values]
            if not mine:
                continue
            solver = self._solver(stage, self._site(frame, mesh, rank, count, 1.0), _at(stage, boundary), {})
            costed = solver.costed((len(solver.blocks), 0, 0))
            for value, storages in storages_of(costed, mine).items():
                found[value] = found.get(value, storages) & storages
        return found

    def _solver(
        self, graph: OpGraph, site: Site, boundary: Mapping[str, Layout], storage: Mapping[str, frozenset[Layout]]
    ) -> StageSolver:
        tied = tuple(sorted(storage.items(), key=lambda item: item[0]))
        key = (id(graph), replace(site, available_bytes=0.0), tuple(boundary.values()), tied)
        if key not in self._solvers:
            self.note(graph)
            where = self._where(replace(site, in_flight=1, available_bytes=0.0))
            unlimited = self._unlimited.setdefault((self._structure_of(graph), where, *key[2:]), {})
            self._solvers[key] = StageSolver(
                self._prepared[id(graph)], site, self.cost_model, self.options, self.solve, boundary, storage, unlimited
            )
        return self._solvers[key].within(site.available_bytes)

    def _stage(
        self,
        graph: OpGraph,
        site: Site,
        boundary: Mapping[str, Layout],
        storage: Mapping[str, frozenset[Layout]],
        aim: Aim,
    ) -> Solved:
        tied = tuple(sorted(storage.items(), key=lambda item: item[0]))
        key = (self._structure_of(graph), self._where(site), tuple(boundary.values()), tied, aim.wanted)
        known = self._solved.get(key)
        if known is None:
            solver = self._solver(graph, site, boundary, storage)
            known = self._solved[key] = (graph, solver.best(aim))
        like, solved = known
        return solved if like is graph else _renamed(solved, like, graph)

    def _structure_of(self, graph: OpGraph) -> object:
        """See :func:`_structure`. No other stage is like a whole model, which is known by itself (``_prepared`` keeps it)."""
        if not graph.received and not graph.sent:
            return id(graph)
        if id(graph) not in self._structures:
            self._structures[id(graph)] = graph, _structure(graph)
        return self._structures[id(graph)][1]

    def _where(self, site: Site) -> object:
        return replace(site, first_rank=0), kind_of(self.cost_model.cluster, site.first_rank, site.mesh.num_devices)

    def _hops(
        self, frame: Frame, graphs: Sequence[OpGraph], boundary: Mapping[str, Layout], mesh: Mesh
    ) -> Hops:
        ranks = stage_ranks(frame)
        ahead: list[float] = []
        back: list[float] = []
        for index in range(len(graphs) - 1):
            sizes = [0.0, 0.0]
            for value in graphs[index].sent:
                described = graphs[index].values[value]
                elements = float(math.prod(local_shape(described.shape, boundary[value], mesh.shape)))
                num_bytes = elements * ITEM_BYTES[described.dtype]
                sizes[0] += num_bytes
                sizes[1] += num_bytes if described.requires_grad else 0.0
            runs = [frame.grid.order[ranks[index + step]] * mesh.num_devices for step in (0, 1)]
            for found, num_bytes in zip((ahead, back), sizes, strict=True):
                found.append(self.cost_model.hop_seconds(runs[0], runs[1], mesh.num_devices, num_bytes))
        return Hops(tuple(ahead), tuple(back))


def _at(graph: OpGraph, boundary: Mapping[str, Layout]) -> dict[str, Layout]:
    """The layouts at a stage's own ends."""
    return {value: boundary[value] for value in (*graph.received, *graph.sent)}


def _within(graph: OpGraph, storage: Mapping[str, frozenset[Layout]]) -> dict[str, frozenset[Layout]]:
    """What is said of a stage's own parameters."""
    return {value: layouts for value, layouts in storage.items() if value in graph.values}


def boundary_layout(value: Value, style: Style, mesh: Mesh) -> Layout:
    """The layout in which a value crosses a boundary."""
    batch = value.batch_dims[0] if value.batch_dims else None
    states: list[State] = []
    parts: dict[int, int] = {}
    for word, size in zip(style, mesh.shape, strict=True):
        dim = None if batch is None or word == "whole" else batch if word == "batch" else batch + 1
        if dim is None or dim >= len(value.shape) - (word == "next") or value.shape[dim] < parts.get(dim, 1) * size:
            states.append(REPLICATED)
        else:
            parts[dim] = parts.get(dim, 1) * size
            states.append(Shard(dim, Cut.plain(value.shape[dim])))
    return tuple(states)


def _structure(graph: OpGraph) -> tuple[object, ...]:
    """What two stages must have in common to be solved as one: operators and how they are joined, whatever their names."""
    numbers: dict[str, int] = {}

    def number(value: str) -> int:
        return numbers.setdefault(value, len(numbers))

    operators = tuple(
        (op.target, _plain(op.args), _plain(op.kwargs), tuple(map(number, op.inputs)), tuple(map(number, op.outputs)))
        for op in graph.operators
    )
    ends = (tuple(map(number, graph.received)), tuple(map(number, graph.sent)), graph.loss is None)
    values = [graph.values[value] for value in numbers if value]
    kinds = tuple((value.shape, value.dtype, value.kind, value.requires_grad) for value in values)
    kept = tuple((number(parameter.value), parameter.trainable, parameter.master) for parameter in graph.parameters)
    blocks = tuple(tuple(len(block.operators) for block in group.blocks) for group in graph.block_groups)
    return operators, ends, kinds, kept, blocks


def _plain(tree: object) -> str:
    """An argument tree without the names of its tensors."""
    if isinstance(tree, tuple):
        return f"({','.join(_plain(item) for item in tree)})"
    return "ref" if type(tree).__name__ == "Ref" else repr(tree)


def _renamed(solved: Solved, like: OpGraph, graph: OpGraph) -> Solved:
    """The solution of one stage in the names of another that is alike."""
    names: dict[str, str] = {}
    for ours, theirs in zip(like.operators, graph.operators, strict=True):
        names[ours.id] = theirs.id
        names.update(zip((*ours.inputs, *ours.outputs), (*theirs.inputs, *theirs.outputs), strict=True))
    groups = {ours.name: theirs.name for ours, theirs in zip(like.block_groups, graph.block_groups, strict=True)}
    stage = solved.candidate.stage
    if stage is None:
        return solved

    def key(name: str) -> str:
        value, bar, rest = name.partition("|")
        return f"{names.get(value, value)}{bar}{rest}"

    renamed = replace(
        stage,
        operators={key(name): plan for name, plan in stage.operators.items()},
        parameters={key(name): plan for name, plan in stage.parameters.items()},
        sources={key(name): layout for name, layout in stage.sources.items()},
        shared={key(name): layout for name, layout in stage.shared.items()},
        sent={key(name): layout for name, layout in stage.sent.items()},
        variants={groups[name]: variants for name, variants in stage.variants.items()},
        recompute={groups[name]: modes for name, modes in stage.recompute.items()},
    )
    return replace(solved, candidate=replace(solved.candidate, stage=renamed))


