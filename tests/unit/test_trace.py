"""Tracing: graphs that compute what the model computes, and errors that say what to do."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import InputError, TraceError
from autopar.graph import BatchLiteral, OpGraph, check
from autopar.tracing import Traced, trace
from tests.support.interpret import run_graph, state_values
from tests.support.models import ZOO, cross_entropy, gpt2, llama, mlp

Batch = dict[str, torch.Tensor]

BLOCKS = {
    "gpt2": {"transformer.h": 3},
    "llama": {"model.layers": 3},
    "bert": {"bert.encoder.layer": 3},
    "vit": {"vit.layers": 3},
    "t5": {"encoder.block": 2, "decoder.block": 2},  # block 0 of each makes the position bias for all
    "resnet": {"resnet.encoder.stages.0.layers": 2, "resnet.encoder.stages.1.layers": 2},
    "mlp": {},
    "moe": {"layers": 3},
    "unet": {},
}


def as_double(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def make(name: str, batch: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return as_double(*ZOO[name](batch))


@cache
def zoo(name: str) -> tuple[nn.Module, Batch, Traced]:
    """A model of the zoo, a batch of four, and its trace; tests leave them as they are."""
    model, batch = make(name, 4)
    return model, batch, trace(model, batch, loss_fn=cross_entropy if name == "mlp" else None)


def plain_loss(name: str, model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the plain model gives; its buffers (running statistics) change."""
    return cross_entropy(model(batch["x"]), batch) if name == "mlp" else model(**batch)["loss"]


def interpret(traced: Traced, model: nn.Module, given: Any, batch: int | None = None) -> dict[str, torch.Tensor]:
    values = state_values(traced.graph, model, traced.constants) | traced.inputs(given)
    return run_graph(traced.graph, values, batch)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def literals(tree: Any) -> list[int]:
    if isinstance(tree, BatchLiteral):
        return [tree.value]
    return [number for item in tree for number in literals(item)] if isinstance(tree, tuple) else []


@pytest.mark.parametrize("name", ZOO)
def test_the_graph_computes_what_the_model_computes(name: str) -> None:
    model, batch, traced = zoo(name)
    reference, graph = copy.deepcopy(model), traced.graph
    check(graph)
    assert graph.warnings == () and graph.batch_size == 4 and graph.loss is not None

    values = interpret(traced, model, batch)
    expected = plain_loss(name, reference, batch)
    torch.testing.assert_close(values[graph.loss], expected, rtol=1e-12, atol=1e-12)
    ours, theirs = gradients(model, values[graph.loss]), gradients(reference, expected)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-12, atol=1e-12)
    for buffer in graph.buffers:  # batch norm's statistics after the step
        if buffer.updated:
            torch.testing.assert_close(values[buffer.updated], reference.get_buffer(buffer.name))


@pytest.mark.parametrize("name", ZOO)
def test_batch_literals_carry_the_graph_to_other_batch_sizes(name: str) -> None:
    model, _, traced = zoo(name)
    for size in (2, 12):
        _, other = make(name, size)
        values = interpret(traced, model, other, size)
        expected = plain_loss(name, copy.deepcopy(model), other)
        assert traced.graph.loss is not None
        torch.testing.assert_close(values[traced.graph.loss], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ZOO)
def test_repeated_blocks(name: str) -> None:
    graph = zoo(name)[2].graph
    assert {group.name: len(group.blocks) for group in graph.block_groups} == BLOCKS[name]
    position = {operator.id: index for index, operator in enumerate(graph.operators)}
    for group in graph.block_groups:
        for block in group.blocks:
            first = position[block.operators[0]]
            assert [position[key] for key in block.operators] == list(range(first, first + len(block.operators)))
            for mine, theirs in zip(block.operators, group.blocks[0].operators, strict=True):
                assert graph.operator_of[mine].target == graph.operator_of[theirs].target
            own = [p.value for p in graph.parameters if p.name.startswith(block.path + ".")]
            assert sorted(block.parameters) == sorted(own)
            relative = [name.removeprefix(block.path) for name in block.parameters]
            assert relative == [name.removeprefix(group.blocks[0].path) for name in group.blocks[0].parameters]


def test_tied_weights_are_one_parameter_and_the_model_is_untouched() -> None:
    model, batch = make("gpt2", 4)
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    state = torch.random.get_rng_state()
    config = copy.deepcopy(model.config.to_dict())
    assert model.config.use_cache is True
    graph = trace(model, batch).graph
    tied = next(parameter for parameter in graph.parameters if parameter.name == "transformer.wte.weight")
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert len(graph.readers_of[tied.value]) == 2
    assert len(graph.parameters) == len(list(model.parameters()))
    after = model.state_dict(keep_vars=True)
    assert all(id(after[name]) == key and torch.equal(after[name], value) for name, (key, value) in before.items())
    assert model.config.to_dict() == config and model.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_same_model_gives_the_same_graph_on_meta_and_in_eval_mode_no_dropout() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=61, n_positions=32)
    ids = torch.zeros(2, 8, dtype=torch.long)
    with torch.device("meta"):
        empty = GPT2LMHeadModel(config).train()
    graph = trace(GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}).graph
    on_meta = trace(empty, {"input_ids": ids.to("meta"), "labels": ids.to("meta")}).graph
    assert graph == on_meta and graph.fingerprint == on_meta.fingerprint
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert any(operator.target == "aten.dropout.default" for operator in graph.operators)
    quiet = trace(empty.eval(), {"input_ids": ids, "labels": ids}).graph
    assert not quiet.training and not any("dropout" in operator.target for operator in quiet.operators)


def test_ids_modules_and_sources_lead_back_to_the_user() -> None:
    graph = zoo("gpt2")[2].graph
    operator = graph.operator_of["transformer.h.0.attn.c_attn:addmm"]
    assert (operator.module, operator.module_class) == ("transformer.h.0.attn.c_attn", "Conv1D")
    assert operator.source.endswith(tuple("0123456789")) and ".py:" in operator.source
    assert [entry.path for entry in graph.inputs] == ["input_ids", "labels"]
    assert [output.path for output in graph.outputs] == ["loss", "logits"]


def test_the_short_second_trace_marks_what_a_whole_one_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(3, 6)
    seen: list[dict[str, tuple[int, ...]]] = []
    import autopar.tracing.tracer as module

    real = module.capture

    def spy(model: nn.Module, example: Any, shapes: Any, loss_fn: Any, cuts: Any, precision: Any) -> Any:
        seen.append(dict(cuts))
        return real(model, example, shapes, loss_fn, cuts, precision)

    monkeypatch.setattr(module, "capture", spy)
    short = trace(model, batch).graph
    assert len(seen) == 2 and list(seen[1].values()) == [(0, 1)]
    monkeypatch.setattr("autopar.tracing.batch.MIN_BLOCKS_TO_CUT", 100)
    whole = trace(model, batch).graph
    assert seen[2:] == [{}, {}]
    assert short == whole and any(literals(operator.args) for operator in short.operators)


class Writes(nn.Module):
    """In-place writes of many kinds, each of which autopar must express without writing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        first = y[:, 0]
        y[:, 1:3] = x[:, 2:4]
        y[..., 0] = 2.0
        y.view(-1, 2, 3)[:, 1].mul_(3.0)
        z = y.t().neg_()
        z += 1
        y[y > 4] = 0.5
        y.masked_fill_(y < -1, 0.25)
        with torch.no_grad():
            self.count += 1
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
            shift = y.mean()
        fresh = torch.zeros(x.shape[0], 6, dtype=x.dtype)
        a, b = fresh.split([2, 4], dim=1)
        b.add_(1)
        a.unbind(1)[1].fill_(2)
        fresh.chunk(4, dim=1)[2].mul_(3)
        fresh[:, ::2] += first[:, None]
        same = torch.nn.functional.dropout(z, 0.0, True)  # hands its input on
        same[0] += 1.0
        return (y + fresh + z.t() - shift).pow(2).mean()


def test_in_place_writes_become_values() -> None:
    torch.manual_seed(1)
    model = Writes().double()
    reference = copy.deepcopy(model)
    x = torch.randn(4, 6, dtype=torch.double)
    traced = trace(model, x)
    assert not any(name.split(".")[1].endswith("_") for name in (o.target for o in traced.graph.operators))
    values = interpret(traced, model, x)
    expected = reference(x.clone())
    assert traced.graph.loss is not None
    torch.testing.assert_close(values[traced.graph.loss], expected, rtol=1e-12, atol=1e-12)
    ours, theirs = gradients(model, values[traced.graph.loss]), gradients(reference, expected)
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-12, atol=1e-12)
    updated = {buffer.name: values[buffer.updated] for buffer in traced.graph.buffers if buffer.updated}
    assert updated.keys() == {"count", "average"}
    for key, value in updated.items():
        torch.testing.assert_close(value, reference.get_buffer(key), rtol=1e-12, atol=1e-12)
    assert [buffer.persistent for buffer in traced.graph.buffers] == [True, False]
    longer = torch.randn(12, 6, dtype=torch.double)
    loss = interpret(traced, model, longer, 12)[traced.graph.loss]
    torch.testing.assert_close(loss, reference(longer), rtol=1e-12, atol=1e-12)


class Regions(nn.Module):
    """Regions without gradient and autocast, detach, constants, an LSTM, nested inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.linear = nn.Linear(4, 4)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.double)

    def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], flag: bool, *, power: int = 2) -> Any:
        x, more = pair
        y, _ = self.lstm(x + more["bias"])
        with torch.no_grad():
            target = self.linear(y).exp()
        with torch.autocast("cpu", enabled=False):
            z = self.linear(y) * self.scale
        best = z.max(-1)
        loss = (z - target).pow(power).mean() + (best.values * best.indices).mean() + z.detach().mean()
        return loss if flag else None, {"z": z, "parts": [y, torch.tensor([1.0, 2.0])], "note": "text"}


def test_regions_and_nested_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    model = Regions().double()
    given = (((torch.randn(3, 5, 4).double(), {"bias": torch.randn(3, 5, 4).double()}), True), {"power": 4})
    traced = trace(model, given)
    graph = traced.graph
    check(graph)
    assert [entry.path for entry in graph.inputs] == ["pair[0]", 'pair[1]["bias"]']
    assert [output.path for output in graph.outputs] == ["[0]", '[1]["z"]', '[1]["parts"][0]', '[1]["parts"][1]']
    assert [constant.numbers for constant in graph.constants] == [(1.0, 2.0, 3.0, 4.0), (1.0, 2.0)]
    values = interpret(traced, model, given)
    output, expected = traced.outputs(values), model(*given[0], **given[1])
    torch.testing.assert_close(output[1]["z"], expected[1]["z"])
    assert output[1]["note"] == "text" and graph.loss == graph.outputs[0].value
    ours, theirs = gradients(model, output[0]), gradients(model, expected[0])
    assert ours.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-12, atol=1e-12)


def test_views_share_storage() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return y.view(-1, 3, 2).transpose(1, 2).reshape(-1, 6) + y[:, 1:2].expand(-1, 6)

    graph = trace(Model(), torch.zeros(4, 6)).graph
    root = ":mul"
    assert {key: value.storage for key, value in graph.values.items() if key != "x"} == {
        ":mul": root, ":view": root, ":transpose": root, ":reshape": ":reshape", ":slice": root, ":expand": root,
        ":add": ":add",
    }  # fmt: skip


class Caller(nn.Module):
    """Layers in pairs whose residual sums stand in the caller's loop; a constant in each layer's code."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)]) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for up, down in self.layers:
            y = up(x).view(x.shape[0], 2, 4)
            x = down((y + x[:, None]).flatten(1)) * torch.tensor([1.0, 0.5, 1.0, 2.0]) + x
        return x.pow(2).sum()


def test_what_a_loop_does_between_modules_belongs_to_the_block() -> None:
    graph = trace(Caller(), torch.randn(2, 4)).graph
    check(graph)
    assert len(graph.constants) == 1
    (group,) = graph.block_groups
    assert (group.name, len(group.blocks)) == ("layers", 5)
    for block in group.blocks:
        assert [graph.operator_of[name].target.split(".")[1] for name in block.operators] == [
            "linear", "view", "unsqueeze", "add", "flatten", "linear", "mul", "add",
        ]  # fmt: skip
    marked = [literals(operator.args) for operator in graph.operators if operator.target == "aten.view.default"]
    assert marked == [[2]] * 5 and graph.warnings == ()


def find_batch(graph: OpGraph) -> dict[str, int | None]:
    return {entry.path: entry.batch_dim for entry in graph.inputs}


def test_batch_dims() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, table: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (x @ table * scale).sum(1).reshape(x.shape[0]) + y.sum(0)

    x, y, table, scale = torch.zeros(4, 3), torch.zeros(5, 4), torch.zeros(3, 3), torch.zeros(())
    with pytest.raises(InputError, match=r"batch_dims names 'z'.*\['x', 'y'"):
        trace(Model(), (x, y, table, scale), batch_dims={"z": 0})
    with pytest.raises(InputError, match=r"batch_dims\['table'\] is 2"):
        trace(Model(), (x, y, table, scale), batch_dims={"table": 2})
    with pytest.raises(InputError, match="disagree about the batch size"):
        trace(Model(), (x, y, table, scale), batch_dims={"x": 0, "y": 0})
    graph = trace(Model(), (x, y, table, scale), batch_dims={"x": 0, "y": -1, "table": None}).graph
    assert find_batch(graph) == {"x": 0, "y": 1, "table": None, "scale": None}
    assert graph.batch_size == 4 and graph.warnings == ()
    assert literals(graph.operator_of[":reshape"].args) == [4]


def test_sizes_that_disagree_are_warned_about() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return (x + y) @ table

    graph = trace(Model(), (torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(3, 2))).graph
    assert find_batch(graph) == {"x": 0, "y": 0, "table": None} and graph.batch_size == 4
    assert len(graph.warnings) == 1 and "input table has 3" in graph.warnings[0]


def test_a_model_of_one_batch_size_is_traced_without_a_batch() -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(4, 6) + torch.ones(4, 1)

    class Offset(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x.sum(1), x.new_zeros(x.shape[0] + 1)])

    for model in (Fixed(), Offset()):
        graph = trace(model, torch.zeros(4, 6)).graph
        assert find_batch(graph) == {"x": None} and len(graph.warnings) == 1
        assert "no other size works" in graph.warnings[0]
        assert not any(literals(operator.args) for operator in graph.operators)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


class Finds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


class Cycles(nn.Module):
    """Writes through a view of which there is no way back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, :1].expand(-1, 6).diagonal_scatter(y[0, :4]).add_(1)
        y.unfold(1, 2, 2).add_(1)
        return y


class Strides(nn.Module):
    """Reads a transposed tensor as it lies in memory; a program may have a contiguous one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).t().as_strided((2, 2), (1, 2)).sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branches(), r"unit/test_trace.py:\d+ a shape or a branch depends on the values of a tensor"),
        (Finds(), r"unit/test_trace.py:\d+.*depends on the values of a"),
        (Cycles(), r"unit/test_trace.py:\d+ it writes in place through the view aten.unfold"),
        (Strides(), r"unit/test_trace.py:\d+ it uses as_strided, which depends on how a tensor lies in memory"),
    ],
)
def test_what_cannot_be_traced_names_the_line(model: nn.Module, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(model, torch.randn(4, 6))


def test_autocast_inside_becomes_casts() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                product = x @ x.t()
                with torch.autocast("cpu", enabled=False):
                    wide = product.float() @ x
            return wide @ x.t()

    graph = trace(Model(), torch.randn(4, 6)).graph
    products = [op for op in graph.operators if op.target == "aten.matmul.default"]
    assert [graph.values[op.outputs[0]].dtype for op in products] == ["bfloat16", "float32", "float32"]
    inputs = torch.randn(4, 6)
    found = run_graph(graph, {graph.inputs[0].value: inputs})[graph.outputs[0].value]
    assert torch.equal(found, Model()(inputs))


def test_inputs_that_do_not_fit_are_refused_with_the_signature() -> None:
    model, batch = mlp(4)
    with pytest.raises(InputError, match=r"MLP has no example inputs of its own.*forward\(x: "):
        trace(model)
    with pytest.raises(InputError, match=r"forward\(x: .*unexpected keyword argument 'target'.*\['x', 'target'\]"):
        trace(model, batch)
    with pytest.raises(InputError, match="missing a required argument: 'x'"):
        trace(model, {"target": batch["target"]}, loss_fn=cross_entropy)
    with pytest.raises(InputError, match="hold no tensor"):
        trace(model, (3,))
    with pytest.raises(InputError, match="numpy"):
        trace(model, (batch["x"].numpy(), batch["x"]), loss_fn=lambda out, given: out.sum())
    with pytest.raises(
        InputError, match=r"loss_fn\(outputs, inputs\) must return a scalar tensor, it returned \[4, 5\]"
    ):
        trace(model, (batch["x"],), loss_fn=lambda out, given: out)
    with pytest.raises(InputError, match="example_inputs is a str"):
        trace(model, "x")
    with pytest.raises(TraceError, match=r"fails at support/models\.py:"):
        trace(model, (torch.zeros(4, 13),))


def test_a_models_own_example_and_a_positional_loss() -> None:
    model, _ = gpt2(2)
    graph = trace(model).graph
    assert [entry.path for entry in graph.inputs] == ["input_ids"] and graph.loss is None
    network, batch = mlp(4)
    traced = trace(
        network, (batch["x"], batch["target"]), loss_fn=lambda out, given: cross_entropy(out, {"target": given[1]})
    )
    assert [entry.path for entry in traced.graph.inputs] == ["x", "args[1]"] and traced.graph.loss is not None
    assert [output.path for output in traced.graph.outputs] == ["output"]


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).tanh()


def test_sources_are_the_innermost_lines_of_the_model_whoever_traces_it() -> None:
    network, x = nn.Sequential(nn.Linear(4, 4), Doubled(), nn.GELU()), torch.zeros(2, 4)
    here = trace(network, (x,)).graph
    there = trace(network, (x,)).graph
    assert here.fingerprint == there.fingerprint
    sources = {operator.target: operator.source for operator in here.operators}
    first = Doubled.forward.__code__.co_firstlineno
    assert sources["aten.mul.Tensor"] == sources["aten.tanh.default"] == f"unit/test_trace.py:{first + 1}"
    assert not any("test_trace" in sources[target] for target in ("aten.linear.default", "aten.gelu.default"))


def test_tracing_under_a_default_device() -> None:
    model, batch = gpt2(2)
    plain = trace(model, batch).graph
    with torch.device("meta"):
        assert trace(model, batch).graph.fingerprint == plain.fingerprint
