"""A transformers model, untouched: GPT-2 with its own loss, gradient clipping, and a checkpoint at the end.

python examples/transformers_gpt2.py                       plans for 4 processes and prints the report
torchrun --nproc-per-node 4 examples/transformers_gpt2.py  trains in parallel
autopar verify examples/transformers_gpt2.py:model         compares with the plain model in float64
"""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.report import text

BATCH, SEQUENCE, VOCABULARY = 8, 64, 512


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=128, n_head=4, vocab_size=VOCABULARY, n_positions=SEQUENCE, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    gpt2 = GPT2LMHeadModel(config).train()
    gpt2.loss_type = "ForCausalLM"  # what it falls back to, with a warning
    return gpt2


def make_batch(step: int) -> dict[str, torch.Tensor]:
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + torch.arange(SEQUENCE)) % VOCABULARY  # counting: soon learned
    return {"input_ids": ids, "labels": ids.clone()}


def model():
    return build(), make_batch(0)


if __name__ == "__main__":
    cluster = autopar.Cluster.local(int(os.environ.get("WORLD_SIZE", "4")))
    if "RANK" not in os.environ:
        print(text(autopar.plan(build(), cluster, make_batch(0)).report()))
    else:
        parallel = autopar.parallelize(build(), cluster, make_batch(0))
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        for step in range(10):
            loss = parallel.step(**make_batch(step))
            norm = parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if os.environ["RANK"] == "0":
                print(f"step {step} loss {loss.item():.4f} gradient norm {norm.item():.3f}")
        parallel.save("gpt2-checkpoint", optimizer)  # any other plan, on any number of processes, can load it
        torch.distributed.destroy_process_group()
