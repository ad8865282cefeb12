"""Plans whose memory is predicted and measured: cases, their plans, and the allocations of a rank while it trains.

Measured is torch.profiler's record of the allocator, from before the parameters are made, over two steps of AdamW; gradients
are set to None between them, as training loops do, so the second step has the peak. The rank runs alone, in a process group
that sends nothing ("fake"): its tensors are those of a real run, whose values alone differ. (Over gloo, threads of its own
free what was sent: late, and unseen by the profiler.)
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.batching import at_batch, micro_batch_sizes
from autopar.codegen import generate
from autopar.costing import build, prepare
from autopar.costing.candidate import Candidate
from autopar.costing.operators import Role
from autopar.costing.setting import Setting
from autopar.fitting import candidate_of
from autopar.mesh import Mesh
from autopar.options import PRECISIONS, Parallelism, PlanOptions
from autopar.plans import Plan
from autopar.runtime import Engine, load_program
from autopar.solver import solve
from autopar.staging import stage_graphs
from autopar.tracing import Traced, trace
from cost_models import Cluster, CostModel, in_flight
from tests.support.pipelines import boundary_of, even_cuts, modes_of

SEQUENCE, HIDDEN, VOCABULARY, BATCH, LAYERS = 128, 256, 1000, 8, 4
NUM_DEVICES = 2
STEPS = 2


@dataclass(frozen=True)
class Case:
    """A plan for ``num_devices``: a mesh of them along ``axis``, or as many pipeline ranks of one device where it is empty."""

    family: str
    axis: str = ""
    schedule: str = "single"
    num_micro_batches: int = 1
    recompute: str = "none"
    zero: int = 0
    precision: str = "model"
    dropout: float = 0.0  # of GPT-2
    num_devices: int = NUM_DEVICES
    logits: str | None = None  # only the loss is wanted, and logits are whole or in chunks
    offload: str = "none"  # of a CPU process, whose host it is itself

    @property
    def num_stages(self) -> int:
        """As many as pipeline ranks."""
        return 1 if self.axis else self.num_devices

    def __str__(self) -> str:
        way = f"{self.axis}={self.num_devices}" if self.axis else f"{self.num_devices} stages {self.schedule}"
        zero = f" ZeRO-{self.zero}" if self.zero else ""
        types = "" if self.precision == "model" else f", {self.precision}"
        away = "" if self.offload == "none" else f", offload {self.offload}"
        drops = f", dropout {self.dropout}" if self.dropout else ""
        logits = f", logits {self.logits}" if self.logits else ""
        steps = f"{self.num_micro_batches} micro-batches, recompute {self.recompute}"
        return f"{self.family} {way}{zero}, {steps}{types}{drops}{logits}{away}"

    @property
    def options(self) -> PlanOptions:
        """What is forced of the plan of a stage."""
        parallelism = Parallelism(zero=self.zero, logits=self.logits)
        return PlanOptions(parallelism=parallelism, outputs="loss" if self.logits else "all", offload=self.offload)


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
DROPOUT_CASES = (
    Case("gpt2", "data", dropout=0.1),
    Case("gpt2", "data", num_micro_batches=4, zero=2, recompute="selective", dropout=0.1),
    Case("gpt2", "tensor", num_micro_batches=4, recompute="full", dropout=0.1),
)
OFFLOAD_CASES = (
    Case("gpt2", "data", num_micro_batches=4, zero=1, offload="optimizer"),
    Case("llama", "data", zero=3, offload="optimizer"),
    Case("gpt2", "data", precision="bfloat16", offload="optimizer"),
    Case("llama", schedule="1f1b", num_micro_batches=4, precision="bfloat16", offload="optimizer"),
)
MIXED_CASES = (
    Case("gpt2", "data", precision="bfloat16"),
    Case("gpt2", "data", num_micro_batches=4, zero=1, precision="bfloat16"),
    Case("gpt2", "data", num_micro_batches=4, zero=2, precision="bfloat16"),
    Case("llama", "data", num_micro_batches=4, zero=3, recompute="full", precision="bfloat16"),
    Case("llama", schedule="1f1b", num_micro_batches=4, precision="bfloat16"),
    Case("llama", "data", num_micro_batches=4, zero=1, precision="autocast"),
    Case("llama", "tensor", num_micro_batches=4, recompute="full", precision="autocast"),
)


@dataclass(frozen=True)
class Compared:
    """Bytes of one pipeline rank's devices: set aside by the planner, predicted, measured, and what was alive at the
    measured peak, by the operators around its allocation."""

    case: Case
    pipeline_rank: int
    set_aside_bytes: float
    predicted_bytes: float
    measured_bytes: int
    alive: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_bytes / self.measured_bytes


def compare(case: Case) -> list[Compared]:
    """Predict and measure a case on each of its pipeline ranks."""
    model, batch = make_model(case)
    traced = trace(model, batch, precision=PRECISIONS[case.precision], outputs=case.options.outputs)
    plan, candidates = planned(case, traced)
    source = generate(plan, traced.graph)
    found = []
    for rank, candidate in enumerate(candidates):
        peak, alive = measured(source, rank, traced, model, batch, case.num_devices)
        found.append(Compared(case, rank, candidate.peak_bytes, candidate.predicted_bytes, peak, alive))
    return found


def make_model(case: Case) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, with random parameters, and its batch: large enough for its tensors to dominate."""
    torch.manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE))
    model = _gpt2(case.dropout) if case.family == "gpt2" else _llama()
    return model.train(), {"input_ids": ids, "labels": ids.clone()}


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=4, vocab_size=VOCABULARY, n_positions=SEQUENCE, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return cast(nn.Module, GPT2LMHeadModel(config))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    return cast(nn.Module, LlamaForCausalLM(config))


def planned(case: Case, traced: Traced) -> tuple[Plan, list[Candidate]]:
    """Each stage's best plan, solved on its own; stage k is on pipeline rank k."""
    graph = traced.graph
    cuts = even_cuts(graph, case.num_stages) if case.num_stages > 1 else ()
    role = cast(Role, case.axis or "data")
    mesh = Mesh((case.num_devices // case.num_stages,), (role,))
    unit = mesh.num_devices if role == "data" else 1
    size = micro_batch_sizes(graph.batch_size, case.num_micro_batches, unit)[0]
    graphs = stage_graphs(at_batch(graph, size), cuts)
    device = "H100-SXM" if case.offload == "none" else "CPU-core"
    model = CostModel(Cluster.homogeneous(num_nodes=case.num_stages, devices_per_node=mesh.num_devices, device=device))
    options = case.options
    boundary = {value: boundary_of(stage.values[value], mesh) for stage in graphs for value in stage.sent}
    flying = in_flight(case.schedule, case.num_stages, case.num_stages, case.num_micro_batches)
    found = []
    for index, (stage, count) in enumerate(zip(graphs, flying, strict=True)):
        ends = {value: boundary[value] for value in (*stage.received, *stage.sent)}
        setting = Setting(case.num_micro_batches, count, modes_of(stage, index, case.recompute), ends)
        costed = build(prepare(stage), mesh, (role,), model, options, setting)
        found.append(candidate_of(costed, solve(costed.problem), float("inf")))
    plan = Plan(
        model=graph.model,
        num_devices=case.num_devices,
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
    return plan, found


def measured(
    source: str,
    rank: int,
    traced: Traced,
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    world_size: int = NUM_DEVICES,
) -> tuple[int, dict[str, int]]:
    """The most bytes allocated at one time on device ``rank``, and what they are."""
    given = traced.inputs(batch)
    values = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    gc.collect()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine = Engine(load_program(source))
            engine.load(lambda name: values[name].detach())
            optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
            named = zip(engine.program.INPUTS, traced.graph.inputs, strict=True)
            inputs: dict[str, Any] = {entry.name: given[described.value] for entry, described in named}
            for _ in range(STEPS):
                engine.step(**inputs)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    results = profiled.profiler.kineto_results if profiled.profiler else None
    assert results is not None, "the profiler has run"
    return _peak(results.experimental_event_tree())


def _peak(tree: Sequence[Any]) -> tuple[int, dict[str, int]]:
    """The largest sum of what is allocated and not freed, and that by the names of the operators around it."""
    total = peak = 0
    alive: dict[int, tuple[int, str]] = {}
    most: dict[int, tuple[int, str]] = {}
    for _, size, pointer, name in sorted(_allocations(tree)):
        if size > 0:
            alive[pointer] = (size, name)
            total += size
        elif pointer in alive:
            total -= alive.pop(pointer)[0]
        if total > peak:
            peak, most = total, dict(alive)
    found: Counter[str] = Counter()
    for size, name in most.values():
        found[name] += size
    return peak, dict(found.most_common())


def _allocations(tree: Sequence[Any]) -> list[tuple[int, int, int, str]]:
    """(time, bytes, address, names of the operators around): bytes below 0 where it is freed."""
    found: list[tuple[int, int, int, str]] = []
    stack: list[tuple[Any, tuple[str, ...]]] = [(event, ()) for event in tree]
    while stack:
        event, around = stack.pop()
        if event.name == "[memory]":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.alloc_size, fields.ptr, "/".join(around[-3:])))
        stack.extend((child, (*around, event.name)) for child in event.children)
    return found
