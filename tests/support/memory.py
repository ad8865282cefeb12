"""Plans whose memory is predicted and measured: cases, the prediction by pipeline rank, and a profiled training step.

Measured is torch.profiler's record of the allocator, from before the parameters are made, over two steps of AdamW:
gradients are set to None between them, as training loops do, so the second has the peak.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from autopar.batching import at_batch, micro_batch_sizes
from autopar.codegen import generate
from autopar.costing import Costed, build, prepare
from autopar.costing.candidate import Candidate
from autopar.costing.setting import Setting
from autopar.fitting import candidate_of
from autopar.options import Parallelism, PlanOptions
from autopar.plans import Plan
from autopar.runtime import Engine, load_program
from autopar.solver import solve
from autopar.staging import stage_graphs
from autopar.tracing import Traced, trace
from cost_models import Cluster, CostModel, in_flight
from tests.support.pipelines import _boundary, _modes, even_cuts

SEQUENCE, HIDDEN, VOCABULARY = 128, 256, 1000
AXES = {"data": ("data",), "tensor": ("tensor",)}


@dataclass(frozen=True)
class Case:
    """A plan for two devices: a mesh of two along ``axis``, or two pipeline ranks with one device each where it is empty."""

    family: str
    axis: str = ""
    schedule: str = "single"
    num_micro_batches: int = 1
    recompute: str = "none"
    zero: int = 0
    layers: int = 4
    batch: int = 8

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return 1 if self.axis else 2

    def __str__(self) -> str:
        way = f"{self.axis}=2 zero={self.zero}" if self.axis else f"{self.schedule} of 2 stages"
        return f"{self.family} {way}, {self.num_micro_batches} micro-batches, recompute={self.recompute}"


CASES = (
    Case("gpt2", "data"),
    Case("gpt2", "data", num_micro_batches=4, zero=1),
    Case("gpt2", "data", num_micro_batches=4, zero=2, recompute="selective"),
    Case("llama", "data", zero=3),
    Case("llama", "data", num_micro_batches=4, zero=3, recompute="full"),
    Case("gpt2", "tensor"),
    Case("llama", "tensor", num_micro_batches=4, recompute="selective"),
    Case("gpt2", "tensor", recompute="full"),
    Case("gpt2", schedule="gpipe", num_micro_batches=4),
    Case("llama", schedule="1f1b", num_micro_batches=4),
    Case("gpt2", schedule="1f1b", num_micro_batches=4, recompute="full"),
    Case("llama", schedule="gpipe", num_micro_batches=4, recompute="selective"),
)


def make_model(case: Case) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, with random parameters, and its batch."""
    torch.manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (case.batch, SEQUENCE))
    model = _gpt2(case.layers) if case.family == "gpt2" else _llama(case.layers)
    return model.train(), {"input_ids": ids, "labels": ids.clone()}


def _gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=HIDDEN, n_head=4, vocab_size=VOCABULARY, n_positions=SEQUENCE, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@dataclass(frozen=True, eq=False)
class Planned:
    """A case's plan with the candidate of each stage; stage k is on pipeline rank k."""

    plan: Plan
    source: str
    candidates: tuple[Candidate, ...]


def planned(case: Case, traced: Traced) -> Planned:
    """Each stage's best plan, solved on its own."""
    graph = traced.graph
    num_stages = case.num_ranks
    cuts = even_cuts(graph, num_stages) if num_stages > 1 else ()
    from autopar.mesh import Mesh

    mesh = Mesh((2,), AXES[case.axis]) if case.axis else Mesh((1,), ("data",))
    unit = 2 if case.axis == "data" else 1
    size = micro_batch_sizes(graph.batch_size, case.num_micro_batches, unit)[0]
    graphs = stage_graphs(at_batch(graph, size), cuts)
    model = CostModel(Cluster.homogeneous(num_nodes=case.num_ranks, devices_per_node=mesh.num_devices))
    options = PlanOptions(parallelism=Parallelism(zero=case.zero))
    boundary = {value: _boundary(stage.values[value], mesh) for stage in graphs for value in stage.sent}
    flying = in_flight(case.schedule, case.num_ranks, num_stages, case.num_micro_batches)
    found = []
    for index, (stage, count) in enumerate(zip(graphs, flying, strict=True)):
        modes = _modes(stage, index, case.recompute)
        ends = {value: boundary[value] for value in (*stage.received, *stage.sent)}
        setting = Setting(case.num_micro_batches, count, modes, ends)
        found.append(_candidate(build(prepare(stage), mesh, mesh.names, model, options, setting)))
    plan = Plan(
        model=graph.model,
        num_devices=2,
        graph_fingerprint=graph.fingerprint,
        cluster_fingerprint=model.cluster.fingerprint(),
        options=options.to_json(),
        stages=tuple(candidate.stage for candidate in found if candidate.stage is not None),
        schedule=case.schedule,
        num_micro_batches=case.num_micro_batches,
        cuts=tuple(cuts),
        batch_size=graph.batch_size,
        micro_batch_unit=unit,
    )
    return Planned(plan, generate(plan, graph), tuple(found))


def _candidate(costed: Costed) -> Candidate:
    return candidate_of(costed, solve(costed.problem), float("inf"))


@dataclass(frozen=True)
class Live:
    """What is allocated at the peak: bytes by (operators around the allocation, inner last)."""

    peak_bytes: int
    kinds: Mapping[str, int]


STEPS = 2


def measured(source: str, traced: Traced, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Live:
    """The allocation peak of this process while it trains."""
    given = traced.inputs(batch)
    values = {name: tensor.detach() for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))}
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiled:
        engine = Engine(load_program(source))
        engine.load(values.__getitem__)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
        inputs = {named.name: given[entry.value] for named, entry in zip(engine.program.INPUTS, traced.graph.inputs, strict=True)}
        for _ in range(STEPS):
            with torch.profiler.record_function("STEP"):
                engine.step(**inputs)
            with torch.profiler.record_function("OPTIMIZER"):
                optimizer.step()
            optimizer.zero_grad()
    return _peak(profiled.profiler.kineto_results.experimental_event_tree())


def _peak(tree: Sequence[Any]) -> Live:
    """From the allocations of an event tree."""
    events: list[tuple[int, int, int, str]] = []
    stack = [(event, ()) for event in tree]
    while stack:
        event, around = stack.pop()
        if event.name == "[memory]":
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.alloc_size, fields.ptr, "/".join(around[-3:])))
        else:
            shapes = ""
            stack.extend((child, (*around, event.name + shapes)) for child in event.children)
    total = peak = 0
    alive: dict[int, tuple[int, str]] = {}
    best: dict[int, tuple[int, str]] = {}
    events.sort(key=lambda event: event[0])
    for _, size, pointer, name in events:
        if size > 0:
            alive[pointer] = (size, name)
        elif pointer in alive:
            size = -alive.pop(pointer)[0]
        else:
            continue
        total += size
        if total > peak:
            peak, best = total, dict(alive)
    kinds: Counter[str] = Counter()
    for size, name in best.values():
        kinds[f"{size:>9} {name}"] += size
    return Live(peak, dict(kinds.most_common()))
