"""The program's text: it computes what the plain model computes, sends what the ledger says, and reads well."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar.codegen import generate, ledger, text
from autopar.codegen.arrange import Arrangement, Call
from autopar.codegen.conversions import Wiring
from autopar.codegen.ledger import totals
from autopar.errors import InputError, PlanFileError
from autopar.gradients import has_gradient
from autopar.layout import REPLICATED, Cut, Shard
from autopar.mesh import Mesh
from autopar.plans import OperatorPlan, Plan, Resolved
from autopar.tracing import Traced, trace
from tests.support.models import ZOO, cross_entropy, gpt2, mlp
from tests.support.plans import data_parallel_plan, make_plan
from tests.support.running import assert_equal, run_program, values_of
from tests.support.shapes import SHAPES, shape

Batch = dict[str, torch.Tensor]


def as_double(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def make(name: str, size: int = 4) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return as_double(*(shape(name, size) if name in SHAPES else ZOO[name](size)))


def loss_fn(name: str) -> Any:
    return cross_entropy if name == "mlp" else None


@cache
def traced(name: str, size: int = 4) -> Traced:
    model, batch = make(name, size)
    return trace(model, batch, loss_fn=loss_fn(name))


def plain_loss(name: str, model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch) if name == "mlp" else model(**batch)["loss"]


def compare(name: str, plan: Plan, num_ranks: int, size: int = 4, planned: int = 4) -> list[Any]:
    """Run the plan's program and the plain model on a batch of ``size`` and compare them."""
    model, batch = make(name, size)
    found = traced(name, planned)
    ran = run_program(generate(plan, found.graph), found, values_of(model), batch, num_ranks)
    loss = plain_loss(name, model, batch)
    loss.backward()
    assert_equal(ran, model, loss)
    return ran


@pytest.mark.parametrize("name", [*ZOO, *SHAPES])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_replicated_program_computes_what_the_model_computes(name: str, num_ranks: int) -> None:
    graph = traced(name).graph
    ran = compare(name, make_plan(graph, Mesh((num_ranks,), ("data",))), num_ranks)
    assert not ran[0].sent


@pytest.mark.parametrize(("size", "sizes"), [(4, (2,)), (5, (2,)), (8, (2, 2)), (5, (3,))])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel_mlp(size: int, sizes: tuple[int, ...], zero: int) -> None:
    graph = traced("mlp", size).graph
    mesh = Mesh(sizes, ("data", "more")[: len(sizes)])
    plan = data_parallel_plan(graph, mesh, zero)
    ran = compare("mlp", plan, mesh.num_devices, size, size)
    counted = {key: num_bytes for key, num_bytes in totals(ledger(plan, graph)).items() if num_bytes}
    assert ran[0].sent == counted


def test_another_batch_size_is_a_multiple_of_the_shares() -> None:
    graph = traced("mlp").graph
    plan = data_parallel_plan(graph, Mesh((2,), ("data",)))
    assert "BATCH_MULTIPLE = 2" in generate(plan, graph)
    compare("mlp", plan, 2, size=6)


def test_uneven_batch_is_the_only_batch() -> None:
    graph = traced("mlp", 5).graph
    source = generate(data_parallel_plan(graph, Mesh((2,), ("data",))), graph)
    assert "BATCH = 5\nBATCH_MULTIPLE = None" in source


def test_conversion_is_one_line_with_what_it_sends() -> None:
    graph = traced("mlp").graph
    mesh = Mesh((2,), ("data",))
    batch_split = data_parallel_plan(graph, mesh).stages[0].operators
    first = graph.operators[0]
    plan = make_plan(graph, mesh, {first.id: batch_split[first.id]})
    source = generate(plan, graph)
    assert "x = take_shard(x, mesh.data, 0)" not in source  # an input has no gradient: it is replicated, not partial
    assert "x = scatter(x, mesh.data, 0)  # R -> S0\n" in source
    assert "layers_0_weight = copy_to(self.layers_0_weight(), mesh.data)  # R -> G; backward: all-reduce" in source
    ran = compare("mlp", plan, 2)
    assert ran[0].sent == totals(ledger(plan, graph))


@pytest.mark.parametrize("name", [*ZOO, *SHAPES])
def test_text_is_the_same_each_time_and_clean(name: str) -> None:
    found = traced(name)
    plan = make_plan(found.graph, Mesh((2, 2), ("data", "tensor")))
    source = generate(plan, found.graph)
    assert source == generate(plan, found.graph)
    assert max(map(len, source.splitlines())) <= text.LINE_LENGTH
    assert not unused_imports(source)
    assert "torch.ops" not in source


def unused_imports(source: str) -> set[str]:
    tree = ast.parse(source)
    aliases = [
        alias for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
    ]
    names = {alias.asname or alias.name for alias in aliases}
    return names - {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_length_does_not_grow_with_depth() -> None:
    sources = []
    for layers in (4, 12):
        model, batch = gpt2(2, layers=layers)
        graph = trace(model, batch).graph
        sources.append(generate(make_plan(graph, Mesh((2,), ("data",))), graph).splitlines())
    assert len(sources[0]) == len(sources[1]) < 400
    different = [line for line, other in zip(*sources, strict=True) if line != other]
    assert len(different) == 4  # the plan's fingerprint twice, the paths, the number of blocks


def calls(name: str, plan: Plan) -> list[Call]:
    graph = traced(name).graph
    arrangement = Arrangement(Wiring(graph, Resolved(plan.stages[0], graph)))
    return [item for item in arrangement.items if isinstance(item, Call)]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("gpt2", [3]), ("t5", [2, 2]), ("resnet", [2, 2]), ("collecting", [3]), ("adding", [3]), ("skipping", [1, 1])],
)
def test_blocks_run_in_loops_where_they_follow_one_another(name: str, lengths: list[int]) -> None:
    plan = make_plan(traced(name).graph, Mesh((1,), ("data",)))
    assert [len(call.blocks) for call in calls(name, plan)] == lengths


def test_block_with_another_incoming_layout_has_its_own_class() -> None:
    graph = traced("gpt2").graph
    mesh = Mesh((2,), ("data",))
    before = next(op for op in graph.operators if op.outputs == (first_input(graph),))
    split = Shard(0, Cut.plain(4))
    plan = make_plan(graph, mesh, {before.id: OperatorPlan("b0", ((split,), (REPLICATED,)), ((split,),))})
    source = generate(plan, graph)
    assert "class GPT2Block1" in source
    assert "class GPT2Block2" in source
    assert [len(call.blocks) for call in calls("gpt2", plan)] == [1, 2]


def first_input(graph: Any) -> str:
    """The value that the first block reads first."""
    block = graph.block_groups[0].blocks[0]
    return next(value for value in graph.operator_of[block.operators[0]].inputs if value in graph.producer_of)


def test_large_tensors_that_autograd_does_not_keep_are_freed() -> None:
    graph = traced("gpt2").graph
    assert "del attn_c_proj" in generate(make_plan(graph, Mesh((1,), ("data",))), graph)


def test_plan_of_another_model_is_refused() -> None:
    plan = make_plan(traced("mlp").graph, Mesh((1,), ("data",)))
    with pytest.raises(PlanFileError, match="another model"):
        generate(plan, traced("gpt2").graph)


def test_large_tensor_in_the_code_is_refused() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.table = torch.randn(5000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight * self.table).mean()

    graph = trace(Holding(), {"x": torch.randn(2, 5000)}).graph
    with pytest.raises(InputError, match="register_buffer"):
        generate(make_plan(graph, Mesh((1,), ("data",))), graph)


def test_gradient_flows_along_values_that_need_one_and_reach_the_loss() -> None:
    graph = traced("tying").graph
    found = has_gradient(graph)
    assert graph.loss in found
    assert {"layers.0.weight", "layers.2.bias"} <= found
    assert not {"x", "scale", "frozen", "unused"} & found


@pytest.mark.parametrize(
    "code",
    [
        f"total = {'a' * 40} + (({'b' * 60} + self.{'c' * 60}()) * self.{'d' * 60}())",  # brackets that only group
        f"piece = {'a' * 40}[({'b' * 60} + {'c' * 60}) * {'d' * 60}]",  # an index
        f"pair = (({'a' * 60} + {'b' * 60}) * {'c' * 60},)",  # a tuple of one
        f"call({'a' * 60}, ({'b' * 60} + {'c' * 60}) * {'d' * 60}, [{'e' * 60}])",
        f"call(({'a' * 60} + {'b' * 60}) * {'c' * 60})",
    ],
)
def test_a_broken_line_says_the_same(code: str) -> None:
    lines = text.line(code, 0)
    assert len(lines) > 1
    assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse(code))


def test_long_lines_are_broken_between_brackets() -> None:
    code = f"x = F.linear({', '.join(f'argument_{at}' for at in range(12))}).view(1)"
    lines = text.line(code, 8)
    assert lines[0] == "        x = F.linear("
    assert lines[-1] == "        ).view(1)"
    assert all(len(line) <= text.LINE_LENGTH for line in lines)
    assert ast.dump(ast.parse("\n".join(line[8:] for line in lines))) == ast.dump(ast.parse(code))


def test_sizes_for_people() -> None:
    assert [text.megabytes(size) for size in (8, 12_582_912, 999, 50_000_000_000)] == [
        "8 B",
        "12.6 MB",
        "999 B",
        "50 GB",
    ]


def test_mlp_reads_as_written_by_hand() -> None:
    graph = traced("mlp").graph
    source = generate(data_parallel_plan(graph, Mesh((2,), ("data",))), graph)
    assert "loss = reduce_from(loss, mesh.data)  # P -> R; all-reduce 8 B" in source
    assert 'use="G")' in source


def test_mlp_helper_agrees_with_the_zoo() -> None:
    assert ZOO["mlp"] is mlp
