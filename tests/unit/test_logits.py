"""Logits that only the loss reads: recognised, computed by chunks of rows, chosen by the search where memory is short.

Whole models on more meshes, with micro-batches, stages, ZeRO-3 and every precision, with

    pytest -m slow tests/unit/test_logits.py
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.codegen import generate
from autopar.errors import InputError
from autopar.options import Parallelism, PlanOptions
from autopar.plans import Plan
from autopar.report import text
from autopar.runtime import ProgramError, linear_cross_entropy
from autopar.strategies.choices import CHUNKS
from autopar.strategies.loss import FUSED
from autopar.strategies.registry import signature_of
from autopar.tracing import trace
from cost_models import Cluster
from cost_models.parts import Device
from tests.support import memory

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES, WIDTH, LENGTH = 29, 8, 10


class Classified(nn.Module):
    """An embedding, a head, and their loss in one of several ways of writing it."""

    def __init__(self, how: str = "shifted", **options: Any) -> None:
        super().__init__()
        self.how, self.options = how, options
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=how not in ("shifted", "scaled"))
        self.register_buffer("importance", torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids).tanh())
        return {"loss": self.loss(logits, labels), "logits": logits}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.how == "shifted":
            shifted, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            return F.cross_entropy(shifted.view(-1, CLASSES), labels.view(-1), **self.options)
        if self.how == "classes first":
            return F.cross_entropy(logits.transpose(1, 2), labels, weight=self.importance, **self.options)
        if self.how == "logarithms":
            return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten(), **self.options)
        if self.how == "scaled":
            return F.cross_entropy((logits / 3.0 * 0.5).view(-1, CLASSES), labels.view(-1), **self.options)
        if self.how == "last":
            return F.cross_entropy(logits[:, -1].to(torch.float64), labels[:, -1], **self.options)
        if self.how == "capped":
            logits = (logits / 30).tanh() * 30
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + logits.square().mean() if self.how == "read twice" else loss


@functools.cache
def built(how: str, options: tuple[tuple[str, Any], ...] = ()) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, CLASSES, (4, LENGTH))
    labels = ids.roll(1, 1)
    labels[1, 2:], labels[3, 0] = -100, -100  # not as many in each sample
    return Classified(how, **dict(options)), {"ids": ids, "labels": labels}


def fused(graph: Any) -> list[Any]:
    return [operator for operator in graph.operators if operator.target == FUSED]


@pytest.mark.parametrize("how", ["shifted", "classes first", "logarithms", "last", "scaled"])
def test_a_layer_and_its_loss_are_one_operator(how: str) -> None:
    graph = trace(*built(how), outputs="loss").graph
    assert len(fused(graph)) == 1
    assert not any(CLASSES in value.shape and value.kind == "computed" for value in graph.values.values()), "no logits"
    assert [output.path for output in graph.outputs] == ["loss"]


@pytest.mark.parametrize("how", ["capped", "read twice"])
def test_logits_that_are_used_otherwise_stay(how: str) -> None:
    assert not fused(trace(*built(how), outputs="loss").graph)


def test_logits_that_are_wanted_stay() -> None:
    traced = trace(*built("shifted"))
    assert not fused(traced.graph)
    assert [output.path for output in traced.graph.outputs] == ["loss", "logits"]


# -- equal to one device -----------------------------------------------------------------------------------------------


def planned(model: nn.Module, batch: Any, devices: int, logits: str | None = "chunks", **forced: Any) -> Plan:
    precision = forced.pop("precision", "model")
    options = PlanOptions(parallelism=Parallelism(logits=logits, **forced), outputs="loss", precision=precision)
    return autopar.plan(model, Cluster.homogeneous(num_nodes=1, devices_per_node=devices), batch, options=options)


def forms(plan: Plan) -> list[str]:
    """How the loss is computed."""
    chosen = {name: operator.form for stage in plan.stages for name, operator in stage.operators.items()}
    return [
        form for name, form in chosen.items() if name.endswith((":cross_entropy_loss", ":nll_loss_nd", ":nll_loss"))
    ]


def check_equal(model: nn.Module, batch: Any, devices: int, **forced: Any) -> None:
    """Loss, gradients and a step of AdamW as on one device, and what is sent as planned."""
    plan = planned(model, batch, devices, **forced)
    assert forms(plan) == [CHUNKS if forced.get("logits", "chunks") == "chunks" else ""]
    autopar.verify(model, plan, batch, count_collectives=True).require()


SUM = (("reduction", "sum"),)


@pytest.mark.parametrize(
    ("how", "options", "devices", "forced"),
    [
        ("shifted", (), 4, {"data": 2, "tensor": 2}),
        ("classes first", (("label_smoothing", 0.1),), 2, {"tensor": 2}),
        ("logarithms", (), 2, {"context": 2}),
        ("last", SUM, 2, {"data": 2, "micro_batch_size": 2}),
        ("logarithms", (), 2, {"data": 2, "micro_batch_size": 2, "logits": "whole"}),
        ("scaled", (), 2, {"tensor": 2}),
    ],
)
def test_by_chunks_as_on_one_device(how: str, options: Any, devices: int, forced: dict[str, Any]) -> None:
    check_equal(*built(how, options), devices, **forced)


def test_a_frozen_head_is_gathered_as_planned() -> None:
    torch.manual_seed(1)
    model = Classified("logarithms")
    model.head.requires_grad_(False)
    check_equal(model, built("logarithms")[1], 2, data=2, zero=3)


@functools.cache
def language_model(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Of two layers, with labels that are not as many in each sample; the first has its head tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ids = torch.randint(0, 97, (8, 12))
    labels = ids.clone()
    labels[1, 3:], labels[5] = -100, -100
    batch = {"input_ids": ids, "labels": labels}
    if family == "gpt2":
        config = GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=97, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config), batch
    llama = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=97
    )  # fmt: skip
    return LlamaForCausalLM(llama), batch


def test_the_program_has_one_call() -> None:
    model, batch = language_model("gpt2")
    source = generate(planned(model, batch, 2, tensor=2), trace(model, batch, outputs="loss").graph)
    assert "loss = linear_cross_entropy(transformer, wte_weight, padded, rows=24, vocab=vocab)\n" in source


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("devices", "forced"),
    [
        (2, {"data": 2}),
        (3, {"tensor": 3}),
        (4, {"tensor": 2, "data": 2, "micro_batch_size": 4}),
        (4, {"context": 2, "data": 2}),
        (4, {"data": 4, "zero": 3}),
        (4, {"data": 2, "pipeline": 2, "micro_batch_size": 2, "schedule": "1f1b"}),
        (2, {"pipeline": 2, "micro_batch_size": 2, "schedule": "zbv"}),
        (2, {"data": 2, "recompute": "full"}),
        (4, {"tensor": 2, "data": 2, "precision": "bfloat16"}),
        (4, {"tensor": 2, "data": 2, "precision": "autocast"}),
    ],
)
def test_language_models_by_chunks(family: str, devices: int, forced: dict[str, Any]) -> None:
    check_equal(*language_model(family), devices, **forced)


def test_sums_are_of_a_wider_type() -> None:
    """In half precision gradients of many chunks are as near to those of float32 as those of one product."""
    torch.manual_seed(0)
    x, weight = (torch.randn(size, 16, dtype=torch.bfloat16) for size in (512, 64))
    labels = torch.randint(0, 64, (512,))

    def gradients(rows: int | None, dtype: torch.dtype) -> list[Tensor]:
        given = [part.to(dtype).requires_grad_() for part in (x, weight)]
        if rows is None:
            loss = F.cross_entropy(F.linear(*given).float(), labels)
        else:
            loss = linear_cross_entropy(*given, labels, rows=rows, dtype=torch.float32)
        return list(torch.autograd.grad(loss, given))

    right = gradients(None, torch.float32)
    at_once, by_rows = (
        [(one.float() - other).abs().max() for one, other in zip(gradients(rows, torch.bfloat16), right, strict=True)]
        for rows in (None, 8)
    )
    assert all(mine <= 1.5 * theirs for mine, theirs in zip(by_rows, at_once, strict=True)), (by_rows, at_once)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_in_which_no_label_counts_has_no_gradient(smoothing: float) -> None:
    """As torch has it: the mean is 0/0, its gradient 0."""
    x, weight = (torch.randn(size, 8, requires_grad=True) for size in (4, 5))
    loss = linear_cross_entropy(x, weight, torch.full((4,), -100), rows=2, label_smoothing=smoothing)
    assert loss.isnan() and not any(part.any() for part in torch.autograd.grad(loss, (x, weight)))


# -- chosen, forced and measured ---------------------------------------------------------------------------------------


def test_chunks_are_chosen_where_memory_is_short() -> None:
    """With room enough nothing is computed twice; with less than whole logits take, chunks are."""
    model, batch = built("shifted")
    long = {name: value.repeat(8, 16) for name, value in batch.items()}

    def chosen(num_bytes: float, logits: str | None = None) -> Plan:
        device = Device("small", "cpu", int(num_bytes), 1e9, {"float32": 1e9}, launch_seconds=1e-7, source="made up")
        cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=1, device=device)
        parallelism = Parallelism(logits=logits, micro_batch_size=32)
        options = PlanOptions(outputs="loss", parallelism=parallelism, memory_margin=0.0)
        return autopar.plan(model, cluster, long, options=options)

    plenty = chosen(2**30)
    assert forms(plenty) == [""]
    both = {form: chosen(2**30, form).report() for form in ("whole", "chunks")}
    needed = {form: report["predicted"]["memory"]["total_bytes"] for form, report in both.items()}
    assert needed["chunks"] < 0.6 * needed["whole"], needed
    assert both["whole"]["predicted"]["step_seconds"] < both["chunks"]["predicted"]["step_seconds"]
    of_software = 2**30 - both["whole"]["predicted"]["memory"]["available_bytes"]
    short = chosen(of_software + (needed["chunks"] + needed["whole"]) / 2)
    assert forms(short) == [CHUNKS]
    assert short.report()["predicted"]["step_seconds"] == both["chunks"]["predicted"]["step_seconds"]


@pytest.mark.parametrize("axis", ["data", pytest.param("tensor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_memory_falls(family: str, axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured peak falls by most of what logits take, and both peaks are as predicted."""
    for name, value in {"LAYERS": 1, "HIDDEN": 64, "VOCABULARY": 4000}.items():
        monkeypatch.setattr(memory, name, value)
    whole, chunks = (memory.compare(memory.Case(family, axis, logits=logits))[0] for logits in ("whole", "chunks"))
    logits_bytes = 4 * memory.BATCH * memory.SEQUENCE * memory.VOCABULARY / memory.NUM_DEVICES
    assert chunks.measured_bytes < whole.measured_bytes - 2 * logits_bytes, (whole, chunks)
    assert all(0.97 <= found.ratio <= 1.1 for found in (whole, chunks)), (whole, chunks)


def test_outputs_that_are_not_wanted_are_none() -> None:
    model, batch = built("shifted")
    options = PlanOptions(outputs="loss", parallelism=Parallelism(logits="chunks"))
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=1)
    parallel = autopar.parallelize(model, cluster, batch, options=options, device="cpu")
    expected = model(**batch)["loss"].detach()
    torch.testing.assert_close(parallel.step(**batch), expected)
    found = parallel(**batch)
    torch.testing.assert_close(found["loss"], expected)
    assert found["logits"] is None


def test_a_saved_plan_keeps_the_form(tmp_path: Path) -> None:
    plan = planned(*built("shifted"), 2)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (forms(loaded), loaded.outputs) == ([CHUNKS], "loss")
    assert loaded.fingerprint == plan.fingerprint
    assert "logits exist for some rows at a time" in text(loaded.report())


def test_what_cannot_be_forced() -> None:
    with pytest.raises(InputError, match="outputs='loss'"):
        PlanOptions(parallelism=Parallelism(logits="chunks"))
    with pytest.raises(InputError, match="read by its cross-entropy alone"):
        planned(*built("capped"), 2)
    with pytest.raises(InputError, match="outputs 'logits' is not known"):
        PlanOptions(outputs="logits")
    with pytest.raises(InputError, match="returns no loss"):
        trace(nn.Linear(2, 2), torch.zeros(1, 2), outputs="loss")
    with pytest.raises(ProgramError, match="class weights are wanted whole"):
        linear_cross_entropy(
            torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2).long(), class_weight=torch.ones(4), rows=1
        )


def test_a_head_without_gradient_through_it_is_whole() -> None:
    """Where no gradient flows to what the head reads, nothing is gained by computing logits twice."""
    model, batch = Classified("logarithms"), built("logarithms")[1]
    model.embed.requires_grad_(False)
    graph = trace(model, batch, outputs="loss").graph
    rule = signature_of(fused(graph)[0], graph)
    assert rule is not None
    assert rule.chunked is not None
    assert not rule.chunked.is_offered
