"""The plan: what every operator and parameter does on the mesh. Frozen values and their JSON; no costs, no torch.

A plan describes each repeated block once per *variant* (a differently sharded version of it): the first block of a
variant, its representative, is written out, the others point to it. :class:`Resolved` answers for every operator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.batching import at_batch, micro_batch_sizes
from autopar.errors import PlanFileError
from autopar.graph import BlockGroup, OpGraph
from autopar.layout import Layout, layout_text, parse_layout
from autopar.mesh import Mesh
from autopar.options import PRECISIONS, Precision
from autopar.staging import stage_graphs

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class OperatorPlan:
    """Layouts in which an operator reads its tensors and leaves its results; ``label`` says what each axis splits, ``form`` how
    it is computed where that is not the usual way (``strategies.choices.Strategy``)."""

    label: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    form: str = ""


@dataclass(frozen=True)
class ParameterPlan:
    """``use``: what the parameter's readers start from; ``storage``: how it rests between steps; ``zero``: 0 to 3.

    The two differ on the ZeRO axes only: there ``use`` has a partial gradient and ``storage`` is sharded. ``offload``: what
    rests, and its optimizer states, are in the host's memory.
    """

    use: Layout
    storage: Layout
    zero: int = 0
    offload: bool = False


@dataclass(frozen=True)
class StagePlan:
    """One stage on its mesh.

    ``sources`` gives the layouts of inputs, buffers and constants; ``shared`` the layout into which a value is converted
    once for a group of readers (``sharing.py`` names the groups); ``variants`` for each block group the variant of each
    block, counted from 0. Operators, parameters and shared conversions of a block are given for representatives only.
    ``recompute`` gives for each block group what each block computes again in backward: ``none``, ``selective`` or
    ``full``; blocks of one variant recompute alike. Of a stage of several, ``sources`` has the layouts of what it
    receives, and ``sent`` the layouts in which it hands values to the next stage.
    """

    mesh: Mesh
    operators: Mapping[str, OperatorPlan]
    parameters: Mapping[str, ParameterPlan]
    sources: Mapping[str, Layout]
    shared: Mapping[str, Layout]
    variants: Mapping[str, tuple[int, ...]]
    recompute: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sent: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How a model runs on a cluster.

    ``stages`` are in the order of the model; ``cuts`` names the first operator of each but the first
    (``staging.stage_graphs``). ``schedule`` is a name of ``cost_models.SCHEDULES``, which says which pipeline rank has
    which stages. Pipeline rank ``p`` of ``P`` is the ``p``-th of ``P`` equal runs of device ranks, unless ``rank_order``
    gives for each place the device rank that takes it. A step runs ``num_micro_batches``, whose sizes
    differ by ``micro_batch_unit`` samples at most (``batching.micro_batch_sizes``); each stage is planned for the largest.

    ``details`` is the report without its timings (see ``report.py``); ``timings`` are seconds spent planning, by phase,
    and are never saved: the same input gives the same file.
    """

    model: str
    num_devices: int
    graph_fingerprint: str
    cluster_fingerprint: str
    options: Mapping[str, Any]
    stages: tuple[StagePlan, ...]
    schedule: str = "single"
    num_micro_batches: int = 1
    cuts: tuple[str, ...] = ()
    batch_size: int = 0
    micro_batch_unit: int = 1
    rank_order: tuple[int, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def precision(self) -> Precision:
        """The types in which the model is to be traced for this plan."""
        name = self.options.get("precision", "model")
        if name not in PRECISIONS:
            raise PlanFileError(
                f"the plan is for precision {name!r}, which this version does not know; plan again with one of "
                f"{', '.join(PRECISIONS)}"
            )
        return PRECISIONS[name]

    @property
    def outputs(self) -> str:
        """Which of the model's outputs are to be traced for this plan: ``all``, or the ``loss``."""
        return str(self.options.get("outputs", "all"))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what the program depends on."""
        document = {"graph": self.graph_fingerprint, **self._execution()}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def _execution(self) -> dict[str, Any]:
        """What the program depends on, as JSON."""
        return {
            "schedule": self.schedule,
            "num_micro_batches": self.num_micro_batches,
            "batch_size": self.batch_size,
            "micro_batch_unit": self.micro_batch_unit,
            "cuts": list(self.cuts),
            "rank_order": list(self.rank_order),
            "stages": [_stage_json(stage) for stage in self.stages],
        }

    @property
    def micro_batch_size(self) -> int:
        """Samples of the largest micro-batch, over all devices."""
        return micro_batch_sizes(self.batch_size, self.num_micro_batches, self.micro_batch_unit)[0]

    @property
    def options_fingerprint(self) -> str:
        """SHA-256 of the options."""
        return hashlib.sha256(json.dumps(self.options, sort_keys=True).encode()).hexdigest()

    def report(self) -> dict[str, Any]:
        """The report as a JSON document; its schema is ``autopar.report.SCHEMA``."""
        return {**self.details, "timings": dict(self.timings)}

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON document, seconds of planning left out. ``checksum`` is of all the rest."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "num_devices": self.num_devices,
            "fingerprints": {
                "graph": self.graph_fingerprint,
                "cluster": self.cluster_fingerprint,
                "options": self.options_fingerprint,
            },
            "options": self.options,
            **self._execution(),
            "report": self.details,
        }
        return {**document, "checksum": _checksum(document)}

    def save(self, path: str | Path) -> None:
        """Write the plan: the same plan gives the same bytes."""
        text = json.dumps(self.to_json(), indent=1, sort_keys=True, allow_nan=False)
        temporary = Path(f"{path}.part")
        temporary.write_text(text + "\n")
        temporary.replace(path)

    @staticmethod
    def load(path: str | Path, graph: OpGraph | None = None) -> Plan:
        """Read a plan; with ``graph`` it must be a plan of that graph. Raises PlanFileError when it cannot be used."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise PlanFileError(f"plan file {path} cannot be read: {error.strerror}") from error
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanFileError(
                f"plan file {path} is damaged or cut off: {error.msg} at line {error.lineno} of {text.count(chr(10)) + 1}; "
                f"write it again with plan.save()"
            ) from None
        plan = Plan.from_json(document, str(path))
        if graph is not None:
            check_fingerprint(plan, graph, str(path))
        return plan

    @staticmethod
    def from_json(document: Any, origin: str = "plan") -> Plan:
        """The inverse of :meth:`to_json`."""
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise PlanFileError(
                f"{origin} has schema version {version!r}, this autopar reads version {SCHEMA_VERSION}; plan the model again"
            )
        try:
            plan = Plan(
                model=document["model"],
                num_devices=document["num_devices"],
                graph_fingerprint=document["fingerprints"]["graph"],
                cluster_fingerprint=document["fingerprints"]["cluster"],
                options=document["options"],
                stages=tuple(_stage_from_json(stage) for stage in document["stages"]),
                schedule=document["schedule"],
                num_micro_batches=document["num_micro_batches"],
                cuts=tuple(document["cuts"]),
                batch_size=document["batch_size"],
                micro_batch_unit=document["micro_batch_unit"],
                rank_order=tuple(document["rank_order"]),
                details=document["report"],
            )
            written, found = document["checksum"], _checksum({k: v for k, v in document.items() if k != "checksum"})
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise PlanFileError(
                f"{origin} lacks a part or has a wrong one: {error!r}; write it again with plan.save()"
            ) from error
        if written != found:
            raise PlanFileError(
                f"{origin} was changed after it was written: its checksum is {str(written)[:12]}, that of its contents "
                f"{found[:12]}; a changed plan may compute something else, so plan again, and force what you want with "
                "Parallelism"
            )
        return plan


def _checksum(document: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def check_fingerprint(plan: Plan, graph: OpGraph, origin: str = "the plan") -> None:
    """Raise PlanFileError when ``plan`` was made for another model than ``graph``."""
    if plan.graph_fingerprint != graph.fingerprint:
        raise PlanFileError(
            f"{origin} was made for another model: its graph is {plan.graph_fingerprint[:12]} ({plan.model}), this one is "
            f"{graph.fingerprint[:12]} ({graph.model}, batch {graph.batch_size}); plan this model, with these input sizes"
        )


def graphs_of(plan: Plan, graph: OpGraph) -> tuple[OpGraph, ...]:
    """The graph of each stage, at the size of the plan's largest micro-batch."""
    return stage_graphs(at_batch(graph, plan.micro_batch_size), plan.cuts)


class Resolved:
    """Answers for every operator, value and parameter of a graph what a stage's plan says of its representative."""

    def __init__(self, stage: StagePlan, graph: OpGraph) -> None:
        self.stage = stage
        self.graph = graph
        self._operator: dict[str, str] = {}
        self._value: dict[str, str] = {}
        for group in graph.block_groups:
            self._point(group, stage.variants.get(group.name, (0,) * len(group.blocks)))

    def _point(self, group: BlockGroup, variants: tuple[int, ...]) -> None:
        first: dict[int, int] = {}
        for index, variant in enumerate(variants):
            chosen = group.blocks[first.setdefault(variant, index)]
            block = group.blocks[index]
            self._value.update(zip(block.parameters, chosen.parameters, strict=True))
            for here, there in zip(block.operators, chosen.operators, strict=True):
                self._operator[here] = there
                outputs = (self.graph.operator_of[name].outputs for name in (here, there))
                self._value.update(zip(*outputs, strict=True))

    def representative_operator(self, operator: str) -> str:
        return self._operator.get(operator, operator)

    def representative_value(self, value: str) -> str:
        return self._value.get(value, value)

    def operator(self, operator: str) -> OperatorPlan:
        """The plan of an operator."""
        return self.stage.operators[self.representative_operator(operator)]

    def parameter(self, value: str) -> ParameterPlan:
        """The plan of a parameter, by its value id."""
        return self.stage.parameters[self.representative_value(value)]

    def layout(self, value: str) -> Layout:
        """The layout in which a value is first available."""
        producer = self.graph.producer_of.get(value)
        if producer is not None:
            return self.operator(producer.id).outputs[producer.outputs.index(value)]
        if self.graph.values[value].kind == "parameter":
            return self.parameter(value).use
        return self.stage.sources[value]

    def shared(self, value: str, group: str) -> Layout:
        """The layout into which ``value`` is converted for the sharing group ``group``."""
        return self.stage.shared[f"{self.representative_value(value)}{group}"]


def _layouts_json(layouts: tuple[Layout, ...]) -> list[str]:
    return [layout_text(layout) for layout in layouts]


def _where(plan: ParameterPlan) -> dict[str, bool]:
    """Said of parameters on the host only, so that plans without any read as before there were such."""
    return {"offload": True} if plan.offload else {}


def _form(plan: OperatorPlan) -> dict[str, str]:
    """Said where it is not the usual one."""
    return {"form": plan.form} if plan.form else {}


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "mesh": {"shape": list(stage.mesh.shape), "names": list(stage.mesh.names)},
        "operators": {
            name: {
                "label": plan.label,
                "inputs": _layouts_json(plan.inputs),
                "outputs": _layouts_json(plan.outputs),
                **_form(plan),
            }
            for name, plan in stage.operators.items()
        },
        "parameters": {
            name: {"use": layout_text(plan.use), "storage": layout_text(plan.storage), "zero": plan.zero, **_where(plan)}
            for name, plan in stage.parameters.items()
        },
        "sources": {name: layout_text(layout) for name, layout in stage.sources.items()},
        "shared": {name: layout_text(layout) for name, layout in stage.shared.items()},
        "variants": {name: list(variants) for name, variants in stage.variants.items()},
        "recompute": {name: list(modes) for name, modes in stage.recompute.items()},
        "sent": {name: layout_text(layout) for name, layout in stage.sent.items()},
    }


def _stage_from_json(document: Mapping[str, Any]) -> StagePlan:
    return StagePlan(
        mesh=Mesh(tuple(document["mesh"]["shape"]), tuple(document["mesh"]["names"])),
        operators={
            name: OperatorPlan(
                plan["label"], _read_layouts(plan["inputs"]), _read_layouts(plan["outputs"]), plan.get("form", "")
            )
            for name, plan in document["operators"].items()
        },
        parameters={
            name: ParameterPlan(
                parse_layout(plan["use"]), parse_layout(plan["storage"]), plan["zero"], plan.get("offload", False)
            )
            for name, plan in document["parameters"].items()
        },
        sources={name: parse_layout(layout) for name, layout in document["sources"].items()},
        shared={name: parse_layout(layout) for name, layout in document["shared"].items()},
        variants={name: tuple(variants) for name, variants in document["variants"].items()},
        recompute={name: tuple(modes) for name, modes in document["recompute"].items()},
        sent={name: parse_layout(layout) for name, layout in document["sent"].items()},
    )


def _read_layouts(words: list[str]) -> tuple[Layout, ...]:
    return tuple(parse_layout(word) for word in words)
