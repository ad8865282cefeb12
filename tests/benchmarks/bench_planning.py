"""Seconds and memory of planning Llama-70B for 64 and 256 H100, as multiples of one torch.export call in the same run.

``python -m tests.benchmarks.bench_planning [--layers 80]``. Each cluster is planned in a process of its own, so that peak
memory is its own; the model is on meta. Without recomputation and micro-batches the activations of these batches do not
fit 80 GB (the planner says so); so that the whole search is timed, memory rows included, the devices are given the
memory that would do (``--memory-gib``), everything else being an H100's.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import time
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.errors import InfeasibleError
from autopar.planner import plan
from cost_models import Cluster, find_device

CLUSTERS = {64: 128, 256: 512}  # devices -> global batch
SEQUENCE = 4096


def llama_70b(layers: int, batch: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty(batch, SEQUENCE, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def measure(devices: int, layers: int, memory_gib: float, alone: bool) -> dict[str, object]:
    """Plan once in this process."""
    model, inputs = llama_70b(layers, CLUSTERS[devices])
    start = time.perf_counter()
    if not alone:
        torch.export.export(model, (), inputs, strict=False)
    exporting = time.perf_counter() - start
    device = replace(find_device("H100-SXM"), name=f"H100 with {memory_gib} GiB", memory_bytes=int(memory_gib * 2**30))
    cluster = Cluster.homogeneous(num_nodes=devices // 8, devices_per_node=8, device=device)
    start = time.perf_counter()
    try:
        made = plan(model, cluster, inputs)
    except InfeasibleError as error:
        return {"seconds": time.perf_counter() - start, "export_seconds": exporting, "infeasible": str(error)}
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "export_seconds": exporting,
        "phases": dict(made.timings),
        "mesh": str(made.stages[0].mesh),
        "gap": made.report()["solver"]["gap"],
        "step_seconds": made.report()["predicted"]["step_seconds"],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_process(devices: int, layers: int, memory_gib: float, alone: bool = False) -> dict[str, object]:
    words = ["--child", str(devices), "--layers", str(layers), "--memory-gib", str(memory_gib)] + ["--alone"] * alone
    done = subprocess.run([sys.executable, "-m", __spec__.name, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def show(name: str, found: dict[str, object]) -> None:
    ratio = found["seconds"] / found["export_seconds"] if found["export_seconds"] > 0.1 else float("nan")  # type: ignore[operator]
    print(f"{name}: {found['seconds']:.1f} s, one torch.export {found['export_seconds']:.1f} s, ratio {ratio:.2f}")
    if "infeasible" in found:
        print(f"  {found['infeasible']}")
        return
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in found["phases"].items())  # type: ignore[attr-defined]
    print(f"  phases: {phases}; peak {found['peak_bytes'] / 1e9:.2f} GB")  # type: ignore[operator]
    print(f"  {found['mesh']}, predicted step {found['step_seconds']:.2f} s, gap {found['gap']:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--memory-gib", type=float, default=320)
    parser.add_argument("--child", type=int)
    parser.add_argument("--alone", action="store_true", help="do not time torch.export")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.layers, arguments.memory_gib, arguments.alone)))
        return
    for devices in CLUSTERS:
        show(f"{devices} H100 of 80 GB", in_process(devices, arguments.layers, find_device("H100-SXM").memory_bytes / 2**30))
        found = in_process(devices, arguments.layers, arguments.memory_gib)
        show(f"{devices} x {arguments.memory_gib:.0f} GiB", found)
        twice = in_process(devices, 2 * arguments.layers, 2 * arguments.memory_gib, alone=True)
        after = [sum(found_["phases"].values()) - found_["phases"]["trace"] for found_ in (found, twice)]  # type: ignore[attr-defined]
        print(f"  after tracing: {after[0]:.1f} s; with twice the layers {after[1]:.1f} s, {after[1] / after[0]:.2f} x")


if __name__ == "__main__":
    main()
