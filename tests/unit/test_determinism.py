"""The same input gives the same plan, byte for byte, in every process: whatever seeds its hashes, wherever its objects lie."""

from __future__ import annotations

import os
import subprocess
import sys

PLANNING = """
import hashlib, sys, torch
from transformers import BartConfig, BartForConditionalGeneration
import autopar

config = BartConfig(
    vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0,
)
tokens = torch.arange(8 * 16).reshape(8, 16) % 90
inputs = {"input_ids": tokens, "labels": tokens}
cluster = autopar.Cluster.homogeneous(num_nodes=2, devices_per_node=2, device="A100-SXM-80GB")
for forced in ({"pipeline": 1}, {"pipeline": 2, "micro_batch_size": 2}):
    plan = autopar.plan(BartForConditionalGeneration(config), cluster, inputs, parallelism=autopar.Parallelism(**forced))
    plan.save(sys.argv[1])
    print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest(), plan.graph_fingerprint)
"""


def planned(seed: int, path: str) -> str:
    """What a process of its own makes of the model, with some objects made before so that others lie elsewhere."""
    clutter = f"clutter = [object() for _ in range({seed * 1000})]\n"
    done = subprocess.run(
        [sys.executable, "-c", clutter + PLANNING, path],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_processes_that_hash_otherwise_make_the_same_plan(tmp_path: object) -> None:
    first, second = (planned(seed, f"{tmp_path}/plan.json") for seed in (0, 1))
    assert len(first.splitlines()) == 2
    assert second == first
