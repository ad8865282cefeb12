"""Tiny models and clusters from a seed, and the joint search on them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from autopar.batching import at_batch
from autopar.graph import OpGraph
from autopar.options import Parallelism, PlanOptions
from autopar.planner import Search
from autopar.search.clock import Clock
from autopar.tracing import trace
from cost_models import Cluster, CostModel, Device, Link, Node
from cost_models.memory import CONTEXT_BYTES

WIDTH, SEQUENCE, HEADS, VOCABULARY = 32, 8, 2, 48
EXACT = PlanOptions(gap=0.0, max_evaluations=10**6)


class Layer(nn.Module):
    """A linear layer and what bends it."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, inner)
        self.back = nn.Linear(inner, WIDTH) if inner != WIDTH else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = nn.functional.gelu(self.linear(x))
        return found if self.back is None else x + self.back(found)


class Layers(nn.Module):
    """A chain of layers of different kinds; with ``skip``, the first result is read again at the end."""

    def __init__(self, inner: tuple[int, ...], skip: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for size in inner)
        self.skip = skip

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        first = None
        for layer in self.layers:
            x = layer(x)
            first = x if first is None else first
        return nn.functional.mse_loss(x + first if self.skip else x, target)


class Attention(nn.Module):
    """A block of a transformer without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        read = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(read.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Language(nn.Module):
    """Tokens, blocks, and the loss of the next token; the last layer may be the embedding again."""

    def __init__(self, num_blocks: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


SMALL = ("three alike", "four alike", "uneven", "wide end", "skip")  # these on up to 4 devices
STRUCTURES = {
    "three alike": lambda: Layers((64,) * 3),
    "four alike": lambda: Layers((32,) * 4),
    "six alike": lambda: Layers((32,) * 6),
    "uneven": lambda: Layers((32, 96, 32, 64)),
    "wide end": lambda: Layers((32, 32, 192)),
    "skip": lambda: Layers((32, 64, 32), skip=True),
    "one block": lambda: Language(1, tied=False),
    "two blocks": lambda: Language(2, tied=False),
    "tied": lambda: Language(1, tied=True),
}


@cache
def traced(structure: str) -> OpGraph:
    """The graph of a structure, for a batch of 8."""
    model = STRUCTURES[structure]()
    if isinstance(model, Language):
        ids = torch.zeros(8, SEQUENCE, dtype=torch.long)
        return trace(model, {"ids": ids, "labels": ids}).graph
    x = torch.zeros(8, SEQUENCE, WIDTH)
    return trace(model, {"x": x, "target": x}).graph


@dataclass(frozen=True)
class Instance:
    """A model on a cluster with what is asked for."""

    graph: OpGraph
    cluster: Cluster
    options: PlanOptions

    def search(self) -> Search:
        """A search that has not run."""
        return Search(self.graph, CostModel(self.cluster), self.options, Clock({}), lambda message: None)


def device(flops: float, memory_bytes: float, launch_seconds: float = 1e-6) -> Device:
    """A device of so many FLOP/s that leaves so many bytes for tensors; its memory is as fast as suits."""
    whole = int(memory_bytes / (1 - EXACT.memory_margin)) + CONTEXT_BYTES["cpu"]
    return Device(f"{flops:.3g} FLOP/s", "cpu", whole, flops, {"float32": flops}, launch_seconds)


def whole_bytes(graph: OpGraph) -> int:
    """Bytes of parameters, gradients, AdamW's states and all results, on one device."""
    states = sum(16 * graph.values[parameter.value].num_elements for parameter in graph.parameters)
    return states + sum(value.num_bytes for value in graph.values.values() if value.kind == "computed")


PARTS = {1: ((1,),), 2: ((2,), (1, 1)), 3: ((3,), (1, 2), (1, 1, 1)), 4: ((4,), (2, 2), (1, 1, 2), (1, 1, 1, 1))}
LITTLE = (0.6, 0.8, 1.0, 1.3, 1.8)  # memory of all devices together against what the model fills on one
FORCED: tuple[dict[str, object], ...] = (
    {"zero": 0},
    {"zero": 3},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"micro_batch_size": 2},
    {"micro_batch_size": 1},
    {"schedule": "interleaved_1f1b"},
    {"schedule": "zbv"},
    {"schedule": "dualpipev"},
    {"schedule": "gpipe"},
)


def instance(seed: int) -> Instance:
    """A model of a few structures on 1 to 4 devices, alike or not, with ample or little memory."""
    draw = random.Random(seed)
    structure = draw.choice(list(STRUCTURES))
    count = draw.choice((1, 2, 2, 3, 4) if structure in SMALL else (1, 2))
    graph = at_batch(traced(structure), draw.choice((2, 4, 6) if structure in SMALL and count < 3 else (2, 3, 4)))
    tight = draw.choice((None, *LITTLE))
    kinds = [
        device(10 ** draw.uniform(8.5, 10), 1e12 if tight is None else _around(draw, tight * whole_bytes(graph) / count))
        for _ in range(2 if draw.random() < 0.6 else 1)
    ]
    inside = Link("inside", 10 ** draw.uniform(7.5, 10), 10 ** draw.uniform(-6, -4.5))
    across = Link("across", 10 ** draw.uniform(7, 9.5), 10 ** draw.uniform(-5.5, -4))
    nodes = tuple(Node(draw.choice(kinds), size, inside) for size in draw.choice(PARTS[count]))
    forced = draw.choice(FORCED) if count > 1 and draw.random() < 0.4 else {}
    return Instance(graph, Cluster(nodes, across), replace(EXACT, parallelism=Parallelism(**forced)))


def _around(draw: random.Random, value: float) -> float:
    return draw.uniform(0.8, 1.25) * value
