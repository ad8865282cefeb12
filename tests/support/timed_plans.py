"""Training steps of any plans measured in two processes over gloo, one plan after the other in every round.

Enters: a model of :data:`MODELS`, and its plans. Leaves: seconds of each plan's steps. One of the two processes:
``-m tests.support.timed_plans FOLDER NAME`` under torchrun. The protocol is that of ``timed_pipelines``: a step of training
follows its own like, and one in which a process waits for a core for long is run again.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.codegen import generate
from autopar.graph import OpGraph
from autopar.launching import torchrun
from autopar.plans import Plan
from autopar.ranks import join_group
from tests.support.timed_pipelines import DISTURBED, in_rounds, training

NUM_RANKS = 2
WARM_UP_STEPS = 2
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Text:
    """A language model's sizes and its batch."""

    layers: int
    hidden: int
    sequence: int
    batch: int
    vocabulary: int = 1000


def gpt2(size: Text) -> tuple[nn.Module, Batch]:
    """transformers' GPT-2 with the same values in every process, and its batch."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=size.layers, n_embd=size.hidden, n_head=max(1, size.hidden // 64), vocab_size=size.vocabulary,
        n_positions=size.sequence, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return cast(nn.Module, GPT2LMHeadModel(config)).train(), _tokens(size)


def llama(size: Text) -> tuple[nn.Module, Batch]:
    """transformers' Llama, grouped queries included."""
    torch.manual_seed(0)
    heads = max(2, size.hidden // 64)
    config = LlamaConfig(
        num_hidden_layers=size.layers, hidden_size=size.hidden, intermediate_size=size.hidden * 8 // 3 // 64 * 64,
        num_attention_heads=heads, num_key_value_heads=heads // 2, vocab_size=size.vocabulary,
        max_position_embeddings=size.sequence, use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    return cast(nn.Module, LlamaForCausalLM(config)).train(), _tokens(size)


def _tokens(size: Text) -> Batch:
    ids = torch.randint(3, size.vocabulary, (size.batch, size.sequence))
    return {"input_ids": ids, "labels": ids.clone()}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "tiny GPT-2": partial(gpt2, Text(2, 128, 64, 8, 256)),
    "GPT-2": partial(gpt2, Text(8, 256, 128, 16)),
    "Llama": partial(llama, Text(6, 384, 128, 8, 2000)),
    "wide GPT-2": partial(gpt2, Text(4, 768, 128, 8, 8000)),
}


@dataclass(frozen=True)
class Measured:
    """Seconds of each plan by round; of each step the part in which a process waited for a core; the machine's loads."""

    seconds: list[list[float]]
    losses: list[float]
    waiting: list[float]
    loads: list[float]

    @property
    def medians(self) -> list[float]:
        return [statistics.median(found) for found in self.seconds]

    @property
    def spreads(self) -> list[float]:
        """Of each plan half of the range of the middle half of its rounds over the median."""
        found = []
        for rounds in self.seconds:
            low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
            found.append((high - low) / 2 / middle)
        return found

    @property
    def noise(self) -> str:
        disturbed = sum(waited > DISTURBED for waited in self.waiting)
        return (
            f"load of the machine {min(self.loads):.1f} to {max(self.loads):.1f}, of which these processes make 2; "
            f"{disturbed} of {len(self.waiting)} steps disturbed for more than {DISTURBED:.0%}"
        )


def measure(name: str, plans: Sequence[Plan], graph: OpGraph, rounds: int, minutes: float) -> Measured:
    """All plans of a model in turn in two processes, which wait up to so many minutes for moments without other work."""
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as place:
        folder = Path(place)
        for index, plan in enumerate(plans):
            (folder / f"{index:03d}.py").write_text(generate(plan, graph))
        arguments = [place, name, str(rounds), str(minutes)]
        if torchrun("tests.support.timed_plans", arguments, NUM_RANKS):
            sys.exit("the measuring processes failed")
        found = Measured(**json.loads((folder / "measured.json").read_text()))
    spread = max(found.losses) - min(found.losses)
    assert spread < 1e-3, f"the plans of {name} compute losses that differ by {spread:.1e}"
    return found


def measure_here(folder: Path, name: str, rounds: int, minutes: float) -> None:
    """One of the two processes; rank 0 writes what it has measured."""
    torch.set_num_threads(1)
    join_group("cpu")
    model, batch = MODELS[name]()
    trainings = [training(path.read_text(), model) for path in sorted(folder.glob("*.py"))]
    losses = [each.step(batch) for each in trainings for _ in range(WARM_UP_STEPS)][::WARM_UP_STEPS]
    timed = in_rounds([partial(each.step, batch) for each in trainings], rounds, minutes)
    if dist.get_rank() == 0:
        document: Mapping[str, Any] = {"losses": losses, **timed}
        (folder / "measured.json").write_text(json.dumps(document))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    measure_here(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
