"""The grid of acceptance: models x meshes x plans, each verified equal to one device in float64.

Run whole with ``python -m tests.equality`` (see ``__main__.py``); a covering selection is run by pytest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan
from autopar.verifier import Verification, verify
from cost_models import Cluster
from tests.support import models

Built = tuple[nn.Module, dict[str, torch.Tensor]]
BATCH = 6
WHOLE = 7  # as many samples as any batch here has
LAYERS = 2

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (4,), (2, 2), (2, 3))
PLANS = ("searched", "data", "zero-1", "zero-2", "zero-3", "tensor", "data x tensor")


def resnet_evaluating(batch: int) -> Built:
    """Batch norm with its running statistics."""
    model, inputs = models.resnet(batch)
    return model.eval(), inputs


def wide_vocabulary(batch: int) -> Built:
    """GPT-2 with 50257 words, 25 heads of 4, and a batch that nothing divides."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=100, n_head=25, vocab_size=50257, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(0, 50257, (batch, 8))
    return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def three_key_heads(batch: int) -> Built:
    """Llama with 6 heads on 3 key-value heads and an inner size of 50."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=42, head_dim=8, intermediate_size=50, num_attention_heads=6,
        num_key_value_heads=3, vocab_size=61, max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.randint(0, 61, (batch, 9))
    labels = ids.clone()
    labels[:, :3] = -100
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": labels}


MODELS: dict[str, tuple[Callable[[int], Built], int]] = {
    "gpt2": (lambda batch: models.gpt2(batch, LAYERS), BATCH),
    "llama": (lambda batch: models.llama(batch, LAYERS), BATCH),
    "bert": (lambda batch: models.bert(batch, LAYERS), BATCH),
    "vit": (lambda batch: models.vit(batch, LAYERS), BATCH),
    "t5": (lambda batch: models.t5(batch, LAYERS), BATCH),
    "resnet-train": (models.resnet, BATCH),
    "resnet-eval": (resnet_evaluating, BATCH),
    "mlp": (models.mlp, BATCH),
    "moe": (lambda batch: models.moe(batch, LAYERS), BATCH),
    "gpt2-25-heads-50257-words": (wide_vocabulary, 7),
    "llama-3-key-heads": (three_key_heads, 7),
}


@dataclass(frozen=True)
class Case:
    """One model on one mesh under one plan."""

    model: str
    mesh: tuple[int, ...]
    plan: str

    def __str__(self) -> str:
        return f"{self.model} {'x'.join(map(str, self.mesh))} {self.plan}"

    @property
    def parallelism(self) -> Parallelism:
        """What is forced, beside one stage and one micro-batch."""
        devices = math.prod(self.mesh)
        whole = Parallelism(pipeline=1, micro_batch_size=WHOLE)
        if self.plan == "searched":
            return whole
        if self.plan == "tensor":
            return replace(whole, tensor=devices)
        if self.plan == "data x tensor":
            return replace(whole, data=self.mesh[0], tensor=self.mesh[1])
        zero = int(self.plan[-1]) if self.plan.startswith("zero") else 0
        return replace(whole, data=devices, zero=zero)


def all_cases() -> Iterator[Case]:
    """The whole grid."""
    for model in MODELS:
        for mesh in MESHES:
            for name in PLANS:
                if name != "data x tensor" or len(mesh) == 2:
                    yield Case(model, mesh, name)


def selection() -> list[Case]:
    """A covering part: every model, mesh and plan occurs, and every model meets tensor parallelism."""
    models_, chosen = list(MODELS), []
    for index, model in enumerate(models_):
        chosen.append(Case(model, MESHES[index % len(MESHES)], PLANS[index % (len(PLANS) - 1)]))
        mesh = MESHES[3 + index % 2]
        chosen.append(Case(model, mesh, "data x tensor" if index % 2 else "tensor"))
    return chosen


def run(case: Case) -> tuple[Verification, Any]:
    """Plan and verify one case, its collectives counted: the outcome and the plan."""
    torch.manual_seed(0)
    build, batch = MODELS[case.model]
    model, inputs = build(batch)
    loss_fn = models.cross_entropy if case.model == "mlp" else None
    options = PlanOptions(parallelism=case.parallelism, mesh_shape=case.mesh)
    cluster = Cluster.local(math.prod(case.mesh), memory_bytes=8 * 2**30, num_cores=2)
    made = plan(model, cluster, inputs, options=options, loss_fn=loss_fn)
    return verify(model, made, inputs, loss_fn=loss_fn, epsilon=1e-8, count_collectives=True), made
