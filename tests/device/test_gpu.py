"""On a GPU: what is detected, what is measured, and how a single-GPU step is predicted.

Opt-in (``pytest -m device``). The models are as large as people train on one GPU, so each test takes a minute or two.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.options import PlanOptions
from autopar.plans import Plan
from autopar.training import train_parallel
from cost_models import Cluster, Profile

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BFLOAT16 = PlanOptions(precision="bfloat16")
STEPS = 10
Source = tuple[nn.Module, dict[str, torch.Tensor]]


def gpt2_medium() -> Source:
    """GPT-2 medium without dropout: 24 blocks of 1024, 4 samples of 1024 tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=24,
        n_embd=1024,
        n_head=16,
        n_positions=1024,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config).train(), tokens(config.vocab_size, 4, 1024)


def llama_1b() -> Source:
    """The sizes of Llama 3.2 1B: 16 blocks of 2048, grouped queries, a vocabulary of 128256; 2 samples of 1024 tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=1024, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train(), tokens(config.vocab_size, 2, 1024)


def tokens(vocabulary: int, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(3, vocabulary, (batch, sequence))
    return {"input_ids": ids, "labels": ids.clone()}


MODELS = {"GPT-2 medium": gpt2_medium, "Llama 1B": llama_1b}


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    pytest.importorskip("pynvml")
    return Cluster.local(1, kind="cuda")


def profiled(name: str, model: nn.Module, batch: Any, cluster: Cluster, folder: Path) -> Profile:
    """The profile of a model, in a process that torchrun starts."""
    path = folder / f"{name.replace(' ', '_')}.json"
    return autopar.profile(model, cluster, batch, path=path, options=BFLOAT16, budget_seconds=120.0)


def measured_seconds(model: nn.Module, plan: Plan, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The typical step without clipping, and the most bytes that were allocated."""
    torch.cuda.reset_peak_memory_stats()
    parallel = autopar.parallelize(model, None, batch, plan=plan, device="cuda")
    placed = {name: tensor.cuda() for name, tensor in batch.items()}
    trained = train_parallel(parallel, [placed] * STEPS, learning_rate=1e-5)
    assert all(torch.isfinite(torch.tensor(trained.losses)))
    assert trained.peak_bytes is not None
    seconds = sorted(step - clip for step, clip in zip(trained.step_seconds[2:], trained.clip_seconds[2:], strict=True))
    del parallel
    gc.collect()
    torch.cuda.empty_cache()
    return seconds[len(seconds) // 2], float(trained.peak_bytes)


def test_the_gpu_is_found(cluster: Cluster) -> None:
    device, properties = cluster.device_of(0), torch.cuda.get_device_properties(0)
    assert device.kind == "cuda"
    assert device.memory_bytes == pytest.approx(properties.total_memory, rel=0.05)
    assert device.memory_bandwidth_bytes_per_second > 1e11
    assert device.peak_flops["float32"] > 1e12
    assert Cluster.local(1).device_of(0).name == device.name


def test_the_profile_is_measured_once_and_then_served(cluster: Cluster, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    inputs = (torch.ones(512, 1024),)

    def loss_fn(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        return outputs.square().mean()

    said: list[str] = []
    given: dict[str, Any] = {"path": tmp_path / "profile.json", "loss_fn": loss_fn, "progress": said.append}
    found = autopar.profile(model, cluster, inputs, **given)
    assert found.machine.kind == "cuda" and found.machine.device == cluster.device_of(0).name
    heavy = [entry for key, entry in found.operators.items() if key.startswith("aten.linear")]
    assert heavy and all(entry.forward_seconds > 0 and entry.backward_seconds > 0 for entry in heavy)
    assert max(entry.spread for entry in heavy) < 0.5
    said.clear()
    assert autopar.profile(model, cluster, inputs, **given) == found
    assert any("has everything" in line for line in said)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_predicted(name: str, cluster: Cluster, tmp_path: Path) -> None:
    """Within 10% from the profile, within 25% from the estimate alone."""
    model, batch = MODELS[name]()
    profile = profiled(name, model, batch, cluster, tmp_path)
    plan = autopar.plan(model, cluster, batch, options=BFLOAT16, profile=profile)
    estimate = autopar.plan(model, cluster, batch, options=BFLOAT16)
    from_profile, from_estimate = (found.report()["predicted"]["step_seconds"] for found in (plan, estimate))
    measured, peak = measured_seconds(model, plan, batch)
    assert from_profile == pytest.approx(measured, rel=0.10)
    assert from_estimate == pytest.approx(measured, rel=0.25)
    assert plan.report()["predicted"]["memory"]["total_bytes"] >= 0.97 * peak
