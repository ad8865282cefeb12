"""Mixtures of experts: recognised, forced on expert axes and equal to one device, chosen by the search, kept as priced."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from autopar.codegen import generate
from autopar.codegen.calls import call
from autopar.codegen.scope import Scope
from autopar.errors import InputError
from autopar.layout import REPLICATED, Shard
from autopar.mesh import Mesh
from autopar.options import Parallelism, PlanOptions, Precision
from autopar.planner import plan_graph
from autopar.plans import Plan
from autopar.strategies.experts import TARGET
from autopar.strategies.registry import signature_of
from autopar.tracing import Traced, trace
from autopar.verifier import verify_traced
from cost_models import Cluster
from cost_models.parts import Device
from tests.properties.rule_samples import samples
from tests.support import mixtures
from tests.support.mixtures import Built
from tests.support.random_plans import random_plan
from tests.support.shards import PROGRAM_NAMES, on_one_device

SLOW = Device("slow", "cpu", 2**33, 1e9, {"float32": 1e9}, launch_seconds=1e-7, source="made up")
MODELS: dict[str, Callable[[], Built]] = {
    "einsum": mixtures.einsum,
    "mixtral": lambda: mixtures.mixtral(num_hidden_layers=2, output_router_logits=True, router_aux_loss_coef=0.1),
    "mixtral, grouped": lambda: mixtures.mixtral(implementation="grouped_mm"),
    "qwen moe": mixtures.qwen_moe,
    "shared": mixtures.shared_experts,
    "plain": lambda: mixtures.dropless("picked", batch=8),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def traced(name: str) -> tuple[torch.nn.Module, Traced]:
    model, inputs = MODELS[name]()
    return model, trace(model, inputs)


def planned(found: Traced, num_devices: int, **forced: Any) -> Plan:
    """A plan for slow devices on quick links, which are worth splitting over."""
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=num_devices, device=SLOW)
    settings = {"pipeline": 1, "micro_batch_size": found.graph.batch_size, "recompute": "none", **forced}
    return plan_graph(found.graph, cluster, PlanOptions(parallelism=Parallelism(**settings)))


def mixture_labels(plan: Plan, found: Traced) -> set[str]:
    """What the axes split of each mixture."""
    operators = plan.stages[0].operators
    return {operators[op.id].label for op in found.graph.operators if op.target == TARGET and op.id in operators}


# -- recognised by structure -------------------------------------------------------------------------------------------


def mixture_of(built: Built, **how: Any) -> Any:
    """The only mixture of a model, of which nothing else is left."""
    graph = trace(*built, **how).graph
    names = {operator.target.split(".")[1] for operator in graph.operators}
    parts = "bmm sort argsort histc cumsum grouped_mm_fallback _grouped_mm repeat_interleave".split()
    assert names.isdisjoint(parts)
    found = [operator for operator in graph.operators if operator.target == TARGET]
    assert found, "no mixture was recognised"
    return found[0], graph


def steps_of(operator: Any) -> list[str]:
    return [step[0].removeprefix("aten.").split(".")[0] for step in operator.args[4]]


GATED = ["linear", "chunk", "silu", "mul", "linear"]


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_transformers_experts_are_one_operator(implementation: str) -> None:
    operator, graph = mixture_of(mixtures.mixtral(implementation=implementation))
    assert operator.id == "model.layers.0.mlp.experts:experts"
    assert steps_of(operator) == GATED
    rule = signature_of(operator, graph)
    assert rule is not None
    assert rule.inputs[3:] == ((("e",), (2, "f0"), (16,)), (("e",), (16,), ("f0",)))
    assert (rule.outputs, rule.joint, rule.experts) == (((("t",), (16,)),), {"x": ("t", "e")}, {"e", "x"})
    assert rule.flops == pytest.approx(2 * 96 * (16 * 48 + 24 * 16), rel=0.03), "96 rows through two layers"


@pytest.mark.parametrize("form", ["sorted", "sorted, argsort"])
def test_plain_sorted_experts_are_one_operator(form: str) -> None:
    """Rows sorted and added to their tokens; torch's grouped product takes bfloat16 in a trace."""
    operator, _ = mixture_of(mixtures.dropless(form, dtype=torch.bfloat16))
    assert steps_of(operator) == GATED
    assert operator.args[5] is None


def test_plain_picked_experts_are_one_operator() -> None:
    assert steps_of(mixture_of(mixtures.dropless("picked"))[0]) == ["linear", "chunk", "sigmoid", "mul", "linear"]


def test_experts_under_autocast_are_one_operator() -> None:
    built = mixtures.mixtral(implementation="grouped_mm")
    operator, _ = mixture_of((built[0].float(), built[1]), precision=Precision(autocast="bfloat16"))
    assert steps_of(operator)[-1] == "linear"


class Altered(mixtures.DroplessModel):
    """A model whose layers mix rows: no mixture of experts."""

    def __init__(self, how: str) -> None:
        super().__init__("picked")
        for layer in self.layers:
            layer._finished = partial(altered, layer, how)


def altered(layer: Any, how: str, rows: Any, found: Any, chosen: Any, weights: Any) -> torch.Tensor:
    gate, value = found.chunk(2, -1)
    if how == "rows mixed":
        gate = gate.softmax(0)
    down = layer.down[chosen.flip(0) if how == "other experts" else chosen]
    found = torch.bmm(down, (gate.sigmoid() * value).unsqueeze(-1)).squeeze(-1)
    by = weights.flip(0) if how == "other weights" else weights
    summed = (by.reshape(-1, 1) * found).view(layer.chosen, -1, rows.shape[-1]).sum(0) if how == "other tokens" else None
    return (by.reshape(-1, 1) * found).view(-1, layer.chosen, rows.shape[-1]).sum(1) if summed is None else summed


@pytest.mark.parametrize(("how", "is_mixture"), [
    ("nothing", True), ("rows mixed", False), ("other experts", False), ("other tokens", False), ("other weights", True),
])  # fmt: skip
def test_what_mixes_rows_is_no_mixture(how: str, is_mixture: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (4, 5))
    graph = trace(Altered(how), {"ids": ids, "labels": ids}).graph
    assert any(operator.target == TARGET for operator in graph.operators) == is_mixture


# -- equal to one device -----------------------------------------------------------------------------------------------

EQUAL = [
    ("einsum", 4, {"expert": 2, "data": 2}, None),
    ("einsum", 4, {"expert": 4, "expert_form": "exchanged"}, None),
    ("mixtral", 4, {"expert": 2, "data": 2, "expert_form": "exchanged"}, {"x", "t"}),
    ("mixtral, grouped", 4, {"expert": 4, "expert_form": "replicated"}, {"e"}),
    ("qwen moe", 4, {"expert": 4, "expert_form": "exchanged"}, {"x"}),  # 6 experts on 4 devices
    ("shared", 2, {"expert": 2, "expert_form": "exchanged"}, {"x"}),
]
MORE = [
    *(
        (name, number * data, {"expert": number, "expert_form": form, "data": data}, None)
        for name in MODELS
        for number in (2, 4)
        for data in (1, 2)
        for form in ("exchanged", "replicated")
    ),
    ("mixtral, grouped", 4, {"expert": 2, "tensor": 2, "expert_form": "replicated"}, {"e"}),
    ("mixtral, grouped", 8, {"expert": 2, "tensor": 2, "data": 2, "expert_form": "exchanged"}, {"x", "t"}),
    ("shared", 4, {"expert": 2, "data": 2, "zero": 3, "expert_form": "exchanged"}, {"x", "t"}),
    ("plain", 4, {"expert": 4}, None),
]


def check_equal(name: str, num_devices: int, forced: dict[str, Any], wanted: set[str] | None) -> None:
    model, found = traced(name)
    plan = planned(found, num_devices, **forced)
    split = {label.partition("[")[0] for labels in mixture_labels(plan, found) for label in labels.split(" ")}
    assert wanted is None or wanted <= split, f"the mixtures are split along {split}"
    verify_traced(model, found, plan, count_collectives=True).require()


@pytest.mark.parametrize(("name", "num_devices", "forced", "wanted"), EQUAL)
def test_experts_on_expert_axes(name: str, num_devices: int, forced: dict[str, Any], wanted: set[str] | None) -> None:
    """Loss, gradients, a step of AdamW within 1e-10 in float64, and exactly what the ledger says is sent. The losses of
    ``mixtral`` and ``shared`` have a term that balances the experts' load."""
    check_equal(name, num_devices, forced, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices", "forced", "wanted"), MORE)
def test_experts_on_more_axes(name: str, num_devices: int, forced: dict[str, Any], wanted: set[str] | None) -> None:
    check_equal(name, num_devices, forced, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "forced"), [
    (4, {"pipeline": 2, "micro_batch_size": 4, "expert_form": "exchanged"}),
    (4, {"pipeline": 2, "micro_batch_size": 4, "expert_form": "exchanged", "schedule": "interleaved_zero_bubble"}),
    (4, {"pipeline": 2, "micro_batch_size": 2, "expert_form": "replicated", "schedule": "1f1b"}),
    (2, {"micro_batch_size": 2, "expert_form": "exchanged"}),
    (2, {"recompute": "full", "expert_form": "exchanged"}),
    (2, {"recompute": "selective", "expert_form": "replicated"}),
])  # fmt: skip
def test_experts_in_pipelines_and_micro_batches(num_devices: int, forced: dict[str, Any]) -> None:
    model, found = traced("mixtral, grouped")
    plan = planned(found, num_devices, expert=2, **forced)
    verify_traced(model, found, plan, count_collectives=True).require()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["exchanged", "replicated"])
def test_experts_on_processes(form: str) -> None:
    """Over gloo, whose all-to-all of uneven pieces is not that of the simulated ranks."""
    model, found = traced("qwen moe")
    plan = planned(found, 4, expert=4, expert_form=form)
    verify_traced(model, found, plan, count_collectives=True, processes=True).require()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("seed", range(8))
def test_experts_in_random_plans(sizes: tuple[int, ...], seed: int) -> None:
    model, found = traced("mixtral, grouped" if seed % 2 else "plain")
    plan = random_plan(found.graph, Mesh(sizes, ("data", "tensor")[: len(sizes)]), seed)
    verify_traced(model, found, plan, count_collectives=True).require()


FROZEN = [  # by name, and what is forced: no rows with a gradient before the last product, or before the router's weights
    (("embed", "up", "router"), {"data": 2, "zero": 3}),
    (("embed", "up", "down"), {"expert": 2, "expert_form": "exchanged"}),
]


@pytest.mark.parametrize(("frozen", "forced"), FROZEN)
def test_frozen_experts(frozen: tuple[str, ...], forced: dict[str, Any]) -> None:
    """Only what a gradient needs is kept, gathered again and sent back."""
    model, inputs = mixtures.dropless("picked", batch=8)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in frozen))
    found = trace(model, inputs)
    verify_traced(model, found, planned(found, 2, **forced), count_collectives=True).require()


def test_the_program_calls_one_function() -> None:
    _, found = traced("mixtral")
    source = generate(planned(found, 2, expert=2, expert_form="exchanged"), found.graph)
    assert "def experts_body(x, gate_up_proj, down_proj):\n    h1 = gate_up_proj.linear(x)\n" in source
    assert source.count("def experts_body") == 1, "blocks of one kind have one body"
    assert "split=experts_split, exchange=mesh.expert," in source


# -- what cannot be forced ---------------------------------------------------------------------------------------------


def test_a_model_without_experts_is_refused() -> None:
    ids = torch.zeros(4, 5, dtype=torch.int64)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
    found = trace(model, (ids,), loss_fn=lambda logits, inputs: logits.square().mean())
    with pytest.raises(InputError, match=r"no mixture of experts.*leave expert out"):
        planned(found, 2, expert=2)


def test_more_devices_than_experts_are_refused() -> None:
    with pytest.raises(InputError, match=r"expert=8.*4 experts at the most.*expert=4 or less"):
        planned(traced("mixtral")[1], 8, expert=8)
    with pytest.raises(InputError, match="says how tokens come to the experts: give expert= as well"):
        Parallelism(expert_form="exchanged")
    with pytest.raises(InputError, match="is not known; choose one of exchanged, replicated"):
        Parallelism(expert=2, expert_form="capacity")


# -- priced, kept and chosen -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [sample for sample in samples() if sample.target == TARGET], ids=range(5))
def test_kept_for_backward(sample: Any) -> None:
    """What the rule says is kept for backward is what autograd keeps of the runtime's call."""
    whole = on_one_device(sample, backward=False)
    scope = Scope(Mesh((1,), ("one",)), 1)
    names = [f"x{index}" for index in range(len(whole.inputs))]
    layouts = [(REPLICATED,)] * len(names)
    text = call(whole.operator, names, layouts, layouts[:1], whole.graph, scope.mesh, scope)
    known: dict[str, Any] = dict(PROGRAM_NAMES)
    exec("\n".join([*scope.constants(), f"def local({', '.join(names)}): return {text}"]), known)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = known["local"](*whole.inputs)
    torch.testing.assert_close(result, whole.outputs[0])
    rule = signature_of(whole.operator, whole.graph)
    assert rule is not None
    said = sum(whole.inputs[index].untyped_storage().nbytes() for index in rule.saved_inputs) + rule.saved_extra_bytes
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == said


def many_experts() -> Traced:
    """32 experts of which each token has 4, of full size, without data."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=8192, hidden_size=1024, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(16, 1024, dtype=torch.int64)
    return trace(model, {"input_ids": ids, "labels": ids})


def test_the_search_chooses_expert_parallelism() -> None:
    """Nothing is forced on 8 devices that all reach each other over NVLink: each keeps its experts, and tokens travel."""
    found = many_experts()
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=8, device="H100-SXM")
    plan = plan_graph(found.graph, cluster, PlanOptions(max_mesh_axes=1))
    (mixture,) = {plan.stages[0].operators[name].inputs for name in plan.stages[0].operators if name.endswith(":experts")}
    assert plan.num_devices == 8
    assert all(isinstance(layout[0], Shard) and layout[0].dim == 0 for layout in mixture), "tokens and experts are split"
    rivals = plan.report()["alternatives"]["by_hand"]
    assert all(rival["ratio"] > 1.1 for rival in rivals.values()), rivals
