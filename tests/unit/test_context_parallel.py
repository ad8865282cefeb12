"""The sequence split from the first operator to the loss: as rules offer it, as it is forced, chosen, run and measured.

All of GPT-2 and Llama on two to four ranks in both forms, and both forms at a sequence of 8192, with

    pytest -m slow tests/unit/test_context_parallel.py
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.codegen import generate
from autopar.errors import InputError
from autopar.graph import Operator, OpGraph, Ref, Value
from autopar.plans import Plan
from autopar.strategies.choices import axis_choices, strategies
from autopar.strategies.cuts import LetterCuts
from autopar.strategies.registry import signature_of
from autopar.strategies.rule import Signature
from autopar.tracing import trace
from cost_models import Cluster
from tests.support import memory
from tests.support.attention import Attention, squares

FORMS = ("ring", "ulysses")


pytestmark = pytest.mark.usefixtures("one_thread")


def signature(query: tuple[int, ...], key: tuple[int, ...], causal: bool = False) -> Signature:
    """Of attention to keys and values of one shape."""
    shapes = {"q": query, "k": key, "v": key, "y": query}
    values = {name: Value(name, shape, "float32", True) for name, shape in shapes.items()}
    args = (Ref("q"), Ref("k"), Ref("v"), None, 0.0, causal)
    operator = Operator("attention", "aten.scaled_dot_product_attention.default", args, (), ("y",))
    found = signature_of(operator, OpGraph("model", values, (), (), (), (), (operator,), (), None, 1))
    assert found is not None
    return found


def test_queries_and_keys_are_split_together() -> None:
    found = signature((2, 4, 12, 8), (2, 4, 12, 8), causal=True)
    assert "s" in found.splittable()
    assert "q" not in found.splittable(), "queries of causal attention are split with the keys alone"
    assert "s" in signature((2, 4, 12, 8), (2, 4, 20, 8)).splittable(), "without a mask lengths may differ"


@pytest.mark.parametrize(
    ("query", "key", "causal"),
    [
        ((2, 4, 12, 8), (2, 4, 20, 8), True),  # a causal mask is a square
        ((2, 4, 12, 8), (1, 4, 12, 8), False),  # broadcast keys
        ((12, 8), (12, 8), False),  # no heads
    ],
)
def test_where_there_is_no_ring(query: tuple[int, ...], key: tuple[int, ...], causal: bool) -> None:
    assert "s" not in signature(query, key, causal).splittable()


def test_a_ring_has_one_axis() -> None:
    found = signature((2, 4, 16, 8), (2, 4, 16, 8))
    cuts = LetterCuts(
        {letter: (autopar.layout.Cut.plain(found.sizes[letter]),) for letter in found.splittable()}, frozenset()
    )
    per_axis = [axis_choices(found, cuts, ([True] * 3, [True]), 2)] * 2
    labels = {strategy.label for strategy in strategies(per_axis, (2, 2))}
    assert {"s R", "R s", "s b1", "b0 s"} <= labels
    assert labels.isdisjoint({"s s", "s q", "q s"})


# -- forced ----------------------------------------------------------------------------------------------------------


@functools.cache
def small(family: str, length: int = 22) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of two layers and four heads, two for Llama's keys, with labels."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ids = torch.randint(0, 40, (2, length))
    if family == "gpt2":
        config = GPT2Config(
            n_layer=2, n_embd=32, n_head=4, vocab_size=40, n_positions=length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}
    llama = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=40
    )  # fmt: skip
    return LlamaForCausalLM(llama), {"input_ids": ids, "labels": ids.clone()}


def forced(model: nn.Module, batch: Any, size: int, form: str | None, **rest: Any) -> Plan:
    parallelism = autopar.Parallelism(context=size, context_form=form)
    options = autopar.PlanOptions(parallelism=parallelism, mesh_shape=(size,))
    return autopar.plan(model, Cluster.homogeneous(num_nodes=1, devices_per_node=size), batch, options=options, **rest)


def labels_of(plan: Plan, what: str) -> list[str]:
    """How the plan splits operators whose id has ``what`` in it."""
    return [chosen.label for name, chosen in plan.stages[0].operators.items() if what in name]


def check_whole_model(family: str, size: int, form: str) -> None:
    model, batch = small(family)
    plan = forced(model, batch, size, form)
    attention = labels_of(plan, "scaled_dot_product")
    assert attention
    assert all((label == "s") == (form == "ring") and label != "R" for label in attention), attention
    for what in ("linear", "addmm", "embedding", "cross_entropy"):
        assert "R" not in labels_of(plan, what), f"{what} is not split"
    if family == "llama" and form == "ring":  # the model widens its key heads: one of two is sent
        assert "repeats=2)" in generate(plan, trace(model, batch).graph)
    outcome = autopar.verify(model, plan, batch, count_collectives=True)
    assert outcome.passed, str(outcome)


@pytest.mark.parametrize(("family", "size", "form"), [("llama", 3, "ring"), ("gpt2", 4, "ulysses")])
def test_whole_models(family: str, size: int, form: str) -> None:
    check_whole_model(family, size, form)


class Biased(nn.Module):
    """Attention with a bias that is learned."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 3 * 16)
        self.bias = nn.Parameter(torch.randn(length, length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.inner(x).split(16, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias).square().mean()


def test_a_learned_bias_that_is_sharded_is_gathered_again_around_a_ring() -> None:
    """Found by a random program: what is sent was less in the plan, as torch's own attention keeps no bias."""
    model, batch = Biased(8), (torch.randn(4, 8, 16),)
    parallelism = autopar.Parallelism(data=2, context=2, context_form="ring", zero=3)
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=4)
    plan = autopar.plan(model, cluster, batch, parallelism=parallelism)
    assert plan.stages[0].parameters["bias"].zero == 3
    assert "s" in labels_of(plan, "scaled_dot_product")[0]
    outcome = autopar.verify(model, plan, batch, count_collectives=True)
    assert outcome.passed, str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "size", "form"), list(itertools.product(("gpt2", "llama"), (2, 3, 4), FORMS)))
def test_all_whole_models(family: str, size: int, form: str) -> None:
    check_whole_model(family, size, form)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "form"), list(itertools.product((2, 4), FORMS)))
def test_long_model(size: int, form: str) -> None:
    """A model's program at a sequence of 8192: what the search plans, codegen writes and ranks run."""
    torch.manual_seed(0)
    model, x = Attention(16, 4, 2), torch.randn(1, 8192, 16)
    outcome = autopar.verify(model, forced(model, (x,), size, form, loss_fn=squares), (x,), loss_fn=squares)
    assert outcome.passed, str(outcome)


def test_what_cannot_be_forced() -> None:
    with pytest.raises(InputError, match="context=3"):
        autopar.plan(
            Attention(8, 2, 2), Cluster.local(4), (torch.randn(2, 6, 8),), loss_fn=squares,
            parallelism=autopar.Parallelism(context=3),
        )  # fmt: skip


# -- chosen ----------------------------------------------------------------------------------------------------------

NVLINK = {"num_nodes": 1, "devices_per_node": 8, "device": "H100-SXM", "intra_link": "NVLink4"}
INFINIBAND = {"num_nodes": 8, "devices_per_node": 1, "device": "H100-SXM", "inter_link": "InfiniBand-NDR"}


@pytest.mark.parametrize(
    ("cluster", "kv_heads", "length", "expected"),
    [
        (NVLINK, 32, 8192, "ulysses"),  # heads for all: an all-to-all sends less than seven pieces of keys and values
        (INFINIBAND, 1, 32768, "ring"),  # one key head: what passes is small, and hidden behind the products
    ],
    ids=["heads and NVLink", "few heads, long, across nodes"],
)
def test_the_cheaper_form_is_chosen(cluster: dict[str, Any], kv_heads: int, length: int, expected: str) -> None:
    with torch.device("meta"):
        model = Attention(4096, 32, kv_heads).to(torch.bfloat16)
        x = torch.empty(1, length, 4096, dtype=torch.bfloat16)

    def planned(form: str | None) -> Plan:
        options = autopar.PlanOptions(parallelism=autopar.Parallelism(context=8, context_form=form), mesh_shape=(8,))
        return autopar.plan(model, Cluster.homogeneous(**cluster), (x,), loss_fn=squares, options=options)

    chosen = planned(None)
    assert (labels_of(chosen, "scaled_dot_product") == ["s"]) == (expected == "ring")
    seconds = {form: planned(form).report()["predicted"]["step_seconds"] for form in FORMS}
    assert min(seconds, key=lambda form: float(seconds[form])) == expected, seconds
    assert chosen.report()["predicted"]["step_seconds"] == pytest.approx(seconds[expected])


# -- measured --------------------------------------------------------------------------------------------------------


def measured_bytes(model: nn.Module, batch: Any, size: int, form: str, loss_fn: Any = None) -> tuple[float, float]:
    """The measured peak of the first of ``size`` ranks, and the predicted one."""
    traced = trace(model, batch, loss_fn=loss_fn)
    plan, candidates = memory.planned(memory.Case("own", form, num_devices=size), traced)
    peak, _ = memory.measured(generate(plan, traced.graph), 0, traced, model, batch, size)
    return float(peak), candidates[0].predicted_bytes


def check_falls(found: dict[int, tuple[float, float]]) -> None:
    """A peak is something that all ranks have, and something that is 1/n of what one rank has; as predicted."""
    one, two, four = (found[size][0] for size in (1, 2, 4))
    assert (two - four) / (one - two) == pytest.approx(0.5, abs=0.1), found
    assert all(0.97 * measured <= predicted <= 1.1 * measured for measured, predicted in found.values()), found


def test_activations_fall_as_the_sequence_is_split() -> None:
    width = 64
    layers = [Attention(width, 1, 1), nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)]
    model, batch = nn.Sequential(*layers), (torch.randn(1, 2048, width),)
    check_falls({size: measured_bytes(model, batch, size, "ring", squares) for size in (1, 2, 4)})


@pytest.mark.parametrize(("form", "kv_heads"), [("ulysses", 2), ("ring", 2)])
def test_memory_of_attention_alone(form: str, kv_heads: int) -> None:
    """With nothing around it that holds more: blocks of scores, and a gradient that is put in order, count."""
    model, batch = Attention(64, 4, kv_heads), (torch.randn(1, 4096, 64),)
    found = {size: measured_bytes(model, batch, size, form, squares) for size in (1, 2)}
    assert all(0.97 * measured <= predicted <= 1.1 * measured for measured, predicted in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), list(itertools.product(("gpt2", "llama"), FORMS)))
def test_activations_of_whole_models_fall(family: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SEQUENCE": 1024, "BATCH": 1, "LAYERS": 2, "HIDDEN": 128}.items():
        monkeypatch.setattr(memory, name, value)
    model, batch = memory.make_model(memory.Case(family))
    check_falls({size: measured_bytes(model, batch, size, form) for size in (1, 2, 4)})
