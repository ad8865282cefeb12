"""Planning only: a Llama of 70 billion parameters for 8 nodes of 8 H100, on a laptop. No weights, no GPU.

python examples/plan_large_cluster.py [LAYERS]             80 layers unless said otherwise
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.report import text

CLUSTER = Path(__file__).parent / "clusters" / "8-nodes-8xH100.json"
BATCH, SEQUENCE = 64, 1024


def model(layers: int = 80):
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        llama = LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return llama, {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    llama, batch = model(*map(int, sys.argv[1:]))
    plan = autopar.plan(
        llama, autopar.Cluster.load(CLUSTER), batch, progress=lambda message: print(message, file=sys.stderr)
    )
    print(text(plan.report()))
    plan.save("llama.plan.json")
    print("\nwritten to llama.plan.json; show it again with: autopar report llama.plan.json")
