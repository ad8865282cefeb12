"""Seconds and memory of planning large models for large clusters, as multiples of one torch.export call in the same run.

``python -m tests.benchmarks.bench_planning [--runs N] [CASE ...]``; without names every case is run. Each is planned in a
process of its own, so that peak memory is its own; models are on meta. With several runs the cases take turns, and the medians
are printed at the end, as machines are not always equally fast.

    one-stage-64, one-stage-256    Llama-70B (80 layers, sequence 4096, bfloat16) for 64 H100 (batch 128) and 256 H100
                                   (batch 512), one stage, every mesh of up to two axes, micro-batches, recomputation
    one-stage-64-twice             the same with twice the layers, for what planning costs after tracing
    llama-256                      the same model for 256 H100, everything searched
    gpt3-1024                      GPT-3 175B for 1024 A100-80GB (128 nodes, batch 1536, sequence 2048), everything searched
    llama-32, llama-128            a Llama of so many layers for 64 H100, everything searched: how planning grows with depth
    mixed-10000                    GPT-3 175B for 10,000 devices of two kinds
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.errors import InfeasibleError
from autopar.options import Parallelism
from autopar.planner import plan
from cost_models import Cluster

Model = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def llama_70b(layers: int, batch: int, sequence: int = 4096) -> Model:
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=sequence, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty(batch, sequence, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def gpt3_175b(layers: int, batch: int, sequence: int = 2048) -> Model:
    config = GPT2Config(
        n_layer=layers, n_embd=12288, n_head=96, vocab_size=51200, n_positions=sequence, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).to(torch.bfloat16).train()
        tokens = torch.empty(batch, sequence, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def h100(devices: int) -> Cluster:
    return Cluster.homogeneous(num_nodes=devices // 8, devices_per_node=8, device="H100-SXM")


def a100(devices: int) -> Cluster:
    return Cluster.homogeneous(num_nodes=devices // 8, devices_per_node=8, device="A100-SXM-80GB")


def mixed(devices: int) -> Cluster:
    """Three quarters A100, the rest H100."""
    slow, fast = a100(devices * 3 // 4), h100(devices // 4)
    return Cluster(nodes=(*slow.nodes, *fast.nodes), inter_link=slow.inter_link, name="A100 and H100")


@dataclass(frozen=True)
class Case:
    model: Callable[[], Model]
    cluster: Callable[[], Cluster]
    parallelism: Parallelism | None = None


ONE_STAGE = Parallelism(pipeline=1)
CASES = {
    "one-stage-64": Case(lambda: llama_70b(80, 128), lambda: h100(64), ONE_STAGE),
    "one-stage-64-twice": Case(lambda: llama_70b(160, 128), lambda: h100(64), ONE_STAGE),
    "one-stage-256": Case(lambda: llama_70b(80, 512), lambda: h100(256), ONE_STAGE),
    "llama-256": Case(lambda: llama_70b(80, 512), lambda: h100(256)),
    "gpt3-1024": Case(lambda: gpt3_175b(96, 1536), lambda: a100(1024)),
    "llama-32": Case(lambda: llama_70b(32, 128), lambda: h100(64)),
    "llama-128": Case(lambda: llama_70b(128, 128), lambda: h100(64)),
    "mixed-10000": Case(lambda: gpt3_175b(96, 10000), lambda: mixed(10000)),
}


def measure(case: Case) -> dict[str, Any]:
    """Plan once in this process."""
    model, inputs = case.model()
    start = time.perf_counter()
    torch.export.export(model, (), inputs, strict=False)
    exporting = time.perf_counter() - start
    start = time.perf_counter()
    try:
        made = plan(model, case.cluster(), inputs, parallelism=case.parallelism)
    except InfeasibleError as error:
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "after_seconds": math.nan, "export_seconds": exporting, "infeasible": str(error)}
    seconds = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = made.report()
    return {
        "seconds": seconds,
        "after_seconds": seconds - made.timings["trace"],
        "export_seconds": exporting,
        "phases": dict(made.timings),
        "mesh": str(made.stages[0].mesh),
        "schedule": report["schedule"],
        "solver": {key: value for key, value in report["solver"].items() if isinstance(value, (int, float, str))},
        "step_seconds": report["predicted"]["step_seconds"],
        "mfu": report["predicted"]["mfu"]["value"],
        "peak_bytes": peak_bytes,
    }


def in_process(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--child", name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def times(runs: list[dict[str, Any]]) -> str:
    """The medians of a case's runs; the ratio's is that of the runs' own ratios."""
    kinds = ("seconds", "after_seconds", "export_seconds")
    seconds, after, exporting = (statistics.median(run[kind] for run in runs) for kind in kinds)
    ratio = statistics.median(run["seconds"] / run["export_seconds"] for run in runs)
    return f"{seconds:.1f} s, {after:.1f} s of it after tracing, one torch.export {exporting:.1f} s, ratio {ratio:.2f}"


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {times([found])}")
    if "infeasible" in found:
        print(f"  {found['infeasible']}")
        return
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in found["phases"].items())
    print(f"  phases: {phases}; peak {found['peak_bytes'] / 1e9:.2f} GB")
    print(f"  {found['mesh']}, {found['schedule']}")
    print(f"  predicted step {found['step_seconds']:.2f} s, MFU {found['mfu']:.3f}; {found['solver']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.child:
        print(json.dumps(measure(CASES[arguments.child])))
        return
    names = arguments.cases or list(CASES)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in names * arguments.runs:
        found[name].append(in_process(name))
        show(name, found[name][-1])
    for name, runs in found.items() if arguments.runs > 1 else ():
        print(f"{name}, medians of {len(runs)}: {times(runs)}")


if __name__ == "__main__":
    main()
