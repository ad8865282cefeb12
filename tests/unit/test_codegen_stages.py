"""Programs of several stages and micro-batches, with recomputation: they compute what the model computes and send what the
ledger says, on simulated ranks, and read well."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar.batching import at_batch
from autopar.codegen import generate, ledger, text
from autopar.codegen.bodies import computed_again, function_body
from autopar.codegen.ledger import Entry, totals
from autopar.codegen.stages import parts, rank_of_stage
from autopar.codegen.statements import Again, Change, Compute
from autopar.errors import InputError
from autopar.graph import OpGraph
from autopar.layout import SUMMED_GRADIENT, Cut, Shard
from autopar.mesh import Mesh
from autopar.options import Parallelism
from autopar.plans import ParameterPlan, Plan
from autopar.runtime import Engine, ParameterSlot, load_program
from autopar.simulation import run_ranks
from autopar.tracing import Traced, trace
from tests.support.models import ZOO, cross_entropy, gpt2
from tests.support.pipelines import even_cuts, pipeline_plan, random_pipeline
from tests.support.random_plans import random_plan
from tests.support.running import run_program, values_of

Batch = dict[str, torch.Tensor]
UNET_CUTS = ("middle.first:conv2d", "up.1.first:conv2d")
FLOAT32_INSIDE = ("gpt2", "llama", "t5")  # norms or losses in float32 whatever the model's type


def make(name: str, size: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, batch = ZOO[name](size)
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


@cache
def traced(name: str, size: int = 8) -> Traced:
    return trace(*make(name, size), loss_fn=cross_entropy if name == "mlp" else None)


def cuts_of(name: str, num_stages: int, size: int = 8) -> tuple[str, ...]:
    return UNET_CUTS if name == "unet" else even_cuts(traced(name, size).graph, num_stages)


def planned(name: str, num_stages: int, mesh: tuple[int, ...], *args: Any, size: int = 8, **options: Any) -> Plan:
    return pipeline_plan(traced(name, size).graph, cuts_of(name, num_stages, size), mesh, *args, **options)


def run(plan: Plan, name: str, size: int) -> list[tuple[torch.Tensor, dict[str, Any], dict[tuple[str, str], int]]]:
    """Loss, gradients as (offsets, piece), and bytes sent, of every rank after a step."""
    found = traced(name, size)
    source = generate(plan, found.graph)
    model, batch = make(name, size)
    values, given = values_of(model), found.inputs(batch)

    def rank_main(rank: int) -> tuple[torch.Tensor, dict[str, Any], dict[tuple[str, str], int]]:
        engine = Engine(load_program(source))
        engine.load(values.__getitem__)
        engine.set_ledger(True)
        named = zip(engine.program.INPUTS, found.graph.inputs, strict=True)
        inputs: dict[str, Any] = {entry.name: given[value.value] for entry, value in named}
        loss = engine.step(**inputs)
        assert engine.ledger is not None
        sent = {key: num_bytes for key, num_bytes in engine.ledger.totals().items() if num_bytes}
        gradients = {
            parameter: [(c.offsets, c.tensor.clone()) for c in engine.slot(parameter).chunks(tensor.grad)]
            for parameter, tensor in engine.named_parameters()
            if tensor.grad is not None
        }
        return loss, gradients, sent

    return run_ranks(plan.num_devices, rank_main) if plan.num_devices > 1 else [rank_main(0)]


def compare(plan: Plan, name: str, size: int = 8) -> None:
    """Loss and gradients are the plain model's on every rank, every gradient is on some; bytes are the ledger's."""
    model, batch = make(name, size)
    loss = cross_entropy(model(batch["x"]), batch) if name == "mlp" else model(**batch)["loss"]
    loss.backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    tolerance = 1e-6 if name in FLOAT32_INSIDE else 1e-10
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    ran = run(plan, name, size)
    for found, gradients, _ in ran:
        assert abs(found - loss) <= tolerance * abs(loss)
        for parameter, pieces in gradients.items():
            for offsets, piece in pieces:
                places = tuple(slice(at, at + length) for at, length in zip(offsets, piece.shape, strict=True))
                torch.testing.assert_close(piece, wanted[parameter][places], rtol=0, atol=tolerance * largest)
    assert {parameter for _, gradients, _ in ran for parameter in gradients} == set(wanted)
    devices = plan.stages[0].mesh.num_devices
    for rank, first in enumerate((plan.rank_order or range(plan.num_devices))[::devices]):
        assert ran[first][2] == totals(ledger(plan, traced(name, size).graph, rank)), f"pipeline rank {rank}"


@pytest.mark.parametrize(
    ("name", "num_stages", "mesh", "schedule", "recompute"),
    [
        ("gpt2", 1, (2, 2), "single", "selective"),
        ("gpt2", 2, (2, 2), "1f1b", ("selective", "full")),
        ("llama", 4, (2,), "interleaved_1f1b", "selective"),
        ("t5", 3, (2,), "1f1b", "full"),
        ("vit", 4, (1,), "zbv", "full"),
        ("moe", 2, (2,), "gpipe", "selective"),
        ("unet", 3, (2,), "1f1b", "none"),
        ("mlp", 2, (2,), "1f1b", "none"),
    ],
)
def test_program_computes_what_the_model_computes(
    name: str, num_stages: int, mesh: tuple[int, ...], schedule: str, recompute: str | tuple[str, ...]
) -> None:
    compare(planned(name, num_stages, mesh, schedule, 4, recompute), name)


@pytest.mark.parametrize(("name", "zero", "recompute"), [("gpt2", 3, "selective"), ("gpt2", 3, "full"), ("bert", 2, "full")])
def test_parameters_at_rest_in_pieces(name: str, zero: int, recompute: str) -> None:
    plan = planned(name, 2, (2,), "1f1b", 2, recompute, Parallelism(zero=zero))
    assert any(kept.zero == zero for stage in plan.stages for kept in stage.parameters.values())
    compare(plan, name)


def in_pieces(plan: Plan, graph: OpGraph, zero: int) -> Plan:
    """The plan with every parameter that it replicates over its one axis sharded there between steps."""

    def kept(value: str, parameter: ParameterPlan) -> ParameterPlan:
        if parameter.use != (SUMMED_GRADIENT,):
            return parameter
        return ParameterPlan(parameter.use, (Shard(0, Cut.plain(graph.values[value].shape[0])),), zero)

    return replace(
        plan, stages=tuple(replace(s, parameters={v: kept(v, p) for v, p in s.parameters.items()}) for s in plan.stages)
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_all_parameters_at_rest_in_pieces(zero: int, recompute: str) -> None:
    plan = in_pieces(planned("gpt2", 2, (2,), "1f1b", 2, recompute), traced("gpt2").graph, zero)
    compare(plan, "gpt2")


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_micro_batches_of_two_sizes(recompute: str) -> None:
    plan = planned("bert", 2, (2,), "1f1b", 3, recompute, size=14, unit=2)
    assert plan.micro_batch_size == 6
    compare(plan, "bert", 14)


@pytest.mark.parametrize(
    ("name", "num_stages", "mesh", "seed"),
    [("gpt2", 2, (2, 2), 2), ("moe", 2, (2,), 7), ("unet", 3, (2,), 8), ("bert", 2, (3,), 5)],
)
def test_random_plans(name: str, num_stages: int, mesh: tuple[int, ...], seed: int) -> None:
    cuts = cuts_of(name, num_stages)
    axes = Mesh(mesh, ("data", "tensor")[: len(mesh)])
    compare(random_pipeline(traced(name).graph, cuts, axes, seed, num_micro_batches=4), name)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_new_statistics_of_batch_norm_are_noted_once(recompute: str) -> None:
    plan = planned("resnet", 2, (2,), "gpipe", 1, recompute)
    model, batch = make("resnet", 8)
    source, values, given = generate(plan, traced("resnet").graph), values_of(model), traced("resnet").inputs(batch)

    def rank_main(rank: int) -> dict[str, torch.Tensor]:
        engine = Engine(load_program(source))
        engine.load(values.__getitem__)
        inputs: dict[str, Any] = {entry.path: given[entry.value] for entry in traced("resnet").graph.inputs}
        engine.step(**inputs)
        return {name: tensor.clone() for name, tensor in engine.named_buffers()}

    found: dict[str, torch.Tensor] = {}
    for buffers in run_ranks(plan.num_devices, rank_main):
        found |= buffers
    model(**batch)
    wanted = dict(model.named_buffers())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


class Positions(nn.Module):
    """Blocks that make tensors of the batch's size themselves."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Embedding(5, 6)
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids = torch.arange(5, device=x.device).unsqueeze(0).expand(x.shape[0], -1)
            ones = torch.ones(x.shape[0], 1, 1, device=x.device, dtype=x.dtype)
            result: torch.Tensor = x + self.down(self.up(x + self.position(ids)).tanh() * ones)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Positions.Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_sizes_of_the_batch_are_those_of_the_micro_batch_computed_again(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ZOO, "positions", lambda size: (Positions(), {"x": torch.randn(size, 5, 6)}))
    plan = planned("positions", 2, (2,), "1f1b", 3, recompute, size=14, unit=2)
    assert "mesh.batch = x.shape[0]" in generate(plan, traced("positions", 14).graph)
    compare(plan, "positions", 14)


class Tensordot(nn.Module):
    """A parameter in an operator with a rule and in tensordot, which has none and copies what is out of order."""

    def __init__(self, sizes: tuple[int, ...], dims: tuple[list[int], list[int]]) -> None:
        super().__init__()
        self.sizes, self.dims = sizes, dims
        self.weight, self.factor = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(4, 2, 8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = nn.functional.linear(x, self.weight)
        y = (x.view(-1, 4, 2, 1) * self.factor).sum((1, 2))
        z = torch.tensordot(x.view(-1, *self.sizes), self.factor, dims=self.dims)
        return {"loss": y.tanh().square().mean() + z.sin().square().mean()}


@pytest.mark.parametrize(
    ("sizes", "dims"), [((4, 2), ([1, 2], [0, 1])), ((2, 4), ([1, 2], [1, 0])), ((2, 4), ([1], [1]))]
)
def test_tensordot_keeps_a_gathered_parameter_or_a_copy(
    sizes: tuple[int, ...], dims: tuple[list[int], list[int]]
) -> None:
    torch.manual_seed(0)
    model, batch = Tensordot(sizes, dims).double(), {"x": torch.randn(8, 8).double()}
    found = trace(model, batch)
    drawn = (random_plan(found.graph, Mesh((2,), ("data",)), seed) for seed in range(200))
    plan = next(plan for plan in drawn if plan.stages[0].parameters["factor"].zero == 3)
    ran = run_program(generate(plan, found.graph), found, values_of(model), batch, 2)
    assert {key: num_bytes for key, num_bytes in ran[0].sent.items() if num_bytes} == totals(ledger(plan, found.graph))


def test_samples_that_depend_on_one_another_are_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be computed in 2 micro-batches: .*batch_norm"):
        generate(planned("resnet", 2, (2,), "1f1b", 2), traced("resnet").graph)


def test_an_order_of_ranks_computes_the_same() -> None:
    compare(planned("mlp", 2, (2,), "1f1b", 2, rank_order=(3, 1, 0, 2)), "mlp")


def test_one_size_only_refuses_micro_batches_of_two() -> None:
    plan = planned("gpt2", 2, (2,), "1f1b", 3, size=7)
    assert plan.micro_batch_size == 3
    with pytest.raises(InputError, match=r"micro-batches of the plan have \[2, 3\] samples"):
        generate(plan, traced("gpt2", 7).graph)


# -- the text ------------------------------------------------------------------------------------------------------


def deep(layers: int, recompute: str) -> str:
    model, batch = gpt2(4, layers=layers)
    graph = trace(model, batch).graph
    cut = f"transformer.h.{layers // 2}.ln_1:layer_norm"
    return generate(pipeline_plan(graph, (cut,), (2,), "1f1b", 2, recompute), graph)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_length_does_not_grow_with_depth(recompute: str) -> None:
    short, long = deep(4, recompute).splitlines(), deep(20, recompute).splitlines()
    assert len(short) == len(long)
    different = [line for line, other in zip(short, long, strict=True) if line != other]
    assert all(re.search(r"transformer\.h|FINGERPRINT|from plan|self\.h_|self\.h\b", line) for line in different)


def test_a_class_that_stages_use_alike_is_written_once() -> None:
    source = deep(4, "full")
    assert source.count("class GPT2Block") == 1
    assert '    """transformer.h.0 ... transformer.h.3"""' in source
    assert source.count("= nn.ModuleList(GPT2Block(") == 2


def test_blocks_that_are_computed_again_are_called_by_checkpoint() -> None:
    source = deep(4, "full")
    assert "        for block in self.h_0_to_1:\n            x = checkpoint(block, x)\n" in source


def test_blocks_of_another_mode_have_their_own_loop() -> None:
    model, batch = gpt2(4, layers=4)
    graph = trace(model, batch).graph
    modes = {"transformer.h.0": "full", "transformer.h.1": "full"}
    source = generate(pipeline_plan(graph, (), (2,), "single", 1, modes), graph)
    assert "for block in self.h_0_to_1:\n            x = checkpoint(block, x)\n" in source
    assert "for block in self.h_2_to_3:\n            x = block(x)\n" in source
    assert source.count("class GPT2Block") == 1


def test_runs_are_methods_without_collectives_in_forward() -> None:
    graph = traced("gpt2").graph
    plan = planned("gpt2", 2, (2, 2), "1f1b", 4, "selective")
    runs = [
        statement
        for part in parts(plan, graph)
        for place in range(len(part.arrangement.blocks))
        for statement in function_body(part.arrangement, place).statements
        if isinstance(statement, Again)
    ]
    assert runs
    sending = ("reduce_from", "all_reduce", "gather", "all_gather", "reduce_scatter", "all_to_all")
    source = generate(plan, graph)
    for method in re.findall(r"    def _\w+\(self.*?\n\n", source, re.DOTALL):
        assert not any(re.search(rf"= {name}\(", method) for name in sending)
    assert "attention = checkpoint(self._attention, projected)" in source
    matmuls = ("addmm", "linear", "mm")
    inner = [s for run in runs for s in run.body.statements if isinstance(s, Compute)]
    assert not [s for s in inner if s.operator.target.split(".")[1] in matmuls]
    assert any(isinstance(s, Change) for run in runs for s in run.body.statements)


def test_parameters_gathered_for_their_use_enter_runs_as_arguments() -> None:
    graph = traced("gpt2").graph
    source = generate(in_pieces(planned("gpt2", 2, (2,), "1f1b", 2, "selective"), graph, 3), graph)
    assert "ln_1 = checkpoint(self._ln_1, x, ln_1_weight, ln_1_bias)" in source
    source = generate(in_pieces(planned("gpt2", 2, (2,), "1f1b", 2, "selective"), graph, 2), graph)
    assert "ln_1 = checkpoint(self._ln_1, x)" in source


def test_a_plan_of_one_stage_and_one_micro_batch_has_no_new_lines() -> None:
    source = generate(planned("gpt2", 1, (2,), "single", 1), traced("gpt2").graph)
    assert "STAGES = (Stage0,)\n" in source
    assert not any(word in source for word in ("SCHEDULE", "MICRO_BATCH", "COUNTS", "checkpoint", "stages="))


def test_one_stage_of_several_micro_batches() -> None:
    source = generate(planned("gpt2", 1, (2,), "single", 4), traced("gpt2").graph)
    assert "STAGES = (Stage0,)\n" in source
    assert 'SCHEDULE = "single"\nMICRO_BATCHES = 4\nGLOBAL_BATCH = 8\nMICRO_BATCH_UNIT = 2\n' in source
    assert "BATCH = 2\n" in source
    assert "A step runs 4 micro-batches of 2 samples one after another; gradients add up." in source


def test_what_stages_hold_and_hand_on() -> None:
    source = generate(planned("t5", 3, (2,), "1f1b", 4), traced("t5").graph)
    assert '"""Stage 0 of 3: encoder.embed_tokens, encoder.block.0, encoder.block.1, part of encoder.block.2."""' in source
    assert '"""Stage 2 of 3: decoder.block.1 to decoder.block.2, decoder.final_layer_norm, lm_head."""' in source
    assert "outputs=(\"encoder_last_hidden_state\",)" in source
    assert 'Boundary("x", (2, 16, 32), torch.float64, "S0", batch_dims=(0,), requires_grad=True)' in source
    assert max(map(len, source.splitlines())) <= text.LINE_LENGTH
    namespace = load_program(source)
    sent = [[boundary.name for boundary in stage.sends] for stage in namespace.STAGES]
    assert all(len(set(row)) == len(row) for row in sent)
    assert [stage.takes for stage in namespace.STAGES] == [("input_ids",), ("labels",), ("labels",)]
    modules = [stage.make() for stage in namespace.STAGES]  # of an unbound mesh
    names = {slot.name for module in modules for slot in module.modules() if isinstance(slot, ParameterSlot)}
    assert names == {parameter.name for parameter in traced("t5").graph.parameters}


def test_an_order_of_ranks_is_in_the_mesh() -> None:
    plan = planned("mlp", 2, (2,), "1f1b", 2, rank_order=(3, 1, 0, 2))
    assert "mesh = Mesh(data=2, stages=2, ranks=(3, 1, 0, 2))\n" in generate(plan, traced("mlp").graph)
    same = replace(plan, rank_order=(0, 1, 2, 3))
    assert "mesh = Mesh(data=2, stages=2)\n" in generate(same, traced("mlp").graph)


def test_an_input_wanted_differently_is_handed_out_whole() -> None:
    graph = traced("t5").graph
    plan = planned("t5", 3, (2,), "1f1b", 4)
    labels = next(entry.value for entry in graph.inputs if entry.path == "labels")
    wanted = {stage.sources[labels] for stage in plan.stages if labels in stage.sources}
    split = (Shard(0, Cut.plain(2)),)
    stages = [replace(s, sources={**s.sources, labels: split}) if at == 1 else s for at, s in enumerate(plan.stages)]
    assert wanted != {split}
    source = generate(replace(plan, stages=tuple(stages)), graph)
    assert 'Input("labels", (2, 16), torch.int64, "R", batch_dim=0)' in source


# -- the ledger ------------------------------------------------------------------------------------------------------


def entries(plan: Plan, graph: OpGraph, **wanted: object) -> list[Entry]:
    found = ledger(plan, graph)
    return [e for e in found if all(getattr(e, name) == value for name, value in wanted.items())]


def test_sends_are_counted_where_they_leave() -> None:
    graph = traced("gpt2").graph
    plan = planned("gpt2", 2, (2,), "1f1b", 4)
    sent = entries(plan, graph, kind="send_recv")
    num_bytes = 1 * 16 * 32 * 8  # one sample on each device, in float64
    assert [(e.axis, e.phase, e.stage, e.count, e.num_bytes) for e in sent] == [
        ("stages", "forward", 0, 4, num_bytes),
        ("stages", "backward", 1, 4, num_bytes),
    ]


def test_neighbours_on_one_rank_send_nothing() -> None:
    graph = traced("vit").graph
    plan = planned("vit", 4, (1,), "zbv", 4)
    assert [rank_of_stage(plan, stage) for stage in range(4)] == [0, 1, 1, 0]
    assert {(e.phase, e.stage) for e in entries(plan, graph, kind="send_recv")} == {
        ("forward", 0), ("backward", 1), ("forward", 2), ("backward", 3),
    }  # fmt: skip


def test_tied_gradients_are_summed_once_a_step() -> None:
    graph = traced("gpt2").graph
    plan = planned("gpt2", 2, (2,), "1f1b", 4, parallelism=Parallelism(zero=0))
    found = entries(plan, graph, axis="stages", kind="all_reduce")
    assert [(e.what, e.stage, e.count, e.num_bytes) for e in found] == [
        ("transformer.wte.weight", stage, 1, 61 * 32 * 8) for stage in (0, 1)
    ]
    both = pipeline_plan(graph, even_cuts(graph, 4), (1,), "zbv", 4)  # the first and the last stage are on one rank
    assert not entries(both, graph, axis="stages", kind="all_reduce")


def per_phase(recompute: str | Sequence[str]) -> dict[str, int]:
    graph = traced("gpt2").graph
    plan = planned("gpt2", 1, (1, 2), "single", 1, recompute)
    found: dict[str, int] = {}
    for entry in ledger(plan, graph):
        found[entry.phase] = found.get(entry.phase, 0) + entry.num_bytes * entry.count
    return found


def test_full_recomputation_sends_the_blocks_forward_again() -> None:
    none, full, selective = (per_phase(mode) for mode in ("none", "full", "selective"))
    assert "recompute" not in none
    assert 0 < full["recompute"] < full["forward"]
    assert "recompute" not in selective


def test_what_is_computed_again() -> None:
    plan = planned("gpt2", 2, (2,), "1f1b", 2, ("full", "selective"))
    first, last = (computed_again(part.arrangement) for part in parts(plan, traced("gpt2").graph))
    assert first == (frozenset({0}), frozenset())
    assert last[0] == frozenset()
    assert {name.split(":")[0].split(".")[2] for name in last[1]} == {"2"}  # the first two are in the first stage


def test_micro_batches_multiply_what_they_send() -> None:
    graph = traced("mlp").graph
    one, other = (
        totals(ledger(planned("mlp", 2, (2,), "1f1b", count, parallelism=Parallelism(zero=0)), graph)) for count in (2, 4)
    )
    assert one["send_recv", "stages"] == other["send_recv", "stages"]  # twice as many of half the size
    assert one["all_reduce", "data"] <= other["all_reduce", "data"]


def test_stage_graphs_are_those_of_a_micro_batch() -> None:
    graph = traced("gpt2").graph
    plan = planned("gpt2", 2, (2,), "1f1b", 4)
    assert [part.graph.batch_size for part in parts(plan, graph)] == [2, 2]
    assert parts(plan, graph, 4)[0].graph.values == parts(replace(plan, num_micro_batches=2), graph)[0].graph.values
    assert at_batch(graph, 2).batch_size == 2
