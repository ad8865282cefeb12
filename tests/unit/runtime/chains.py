"""A hand-written program of several stages and micro-batches, with the model that it computes.

What is awkward is all in it: an embedding tied with the head, a skip that stages relay, an integer and a boolean tensor
between stages, a weight used twice in one stage, a parameter of a stage that its input does not lead to, an output of an
early stage, a mean over labels some of which are ignored, and a penalty that is a mean over the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH, HIDDEN = 11, 3, 8, 12


class Layer(nn.Module):
    """A residual MLP that uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Layers between a tied embedding and head; ``shared`` makes layer 1 use one weight twice."""

    def __init__(self, layers: int, shared: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.kinds = nn.Embedding(3, WIDTH, dtype=torch.float64)
        self.h = nn.ModuleList(Layer() for _ in range(layers))
        self.twice = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4) if shared else None
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.wte(ids)
        skip, kind, odd = x.tanh(), ids % 3, ids % 2 == 1
        for number, layer in enumerate(self.h):
            x = layer(x)
            if number == 0:
                early = x
            if number == 1 and self.twice is not None:
                x = x + (x @ self.twice).sin() @ self.twice
        x = x + skip * odd.unsqueeze(-1) + self.kinds(kind)
        logits = x @ self.wte.weight.t() * self.scale
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + 0.1 * x.square().mean(), logits, early


def _block(number: int, shared: bool, recompute: bool) -> str:
    lines = [f"        x = checkpoint(self.h_{number}, x)" if recompute else f"        x = self.h_{number}(x)"]
    if number == 1 and shared:
        lines.append("        twice = self.twice()")
        lines.append("        x = x + (x @ twice).sin() @ twice")
    return "\n".join(lines)


def _stage(number: int, stages: int, slots: dict[str, str], shared: bool, recompute: bool) -> str:
    first, last = number == 0, number == stages - 1
    makes = [f'        self.h_{number} = Layer("h.{number}")']
    makes += [slots["wte"]] if first or last else []
    makes += [slots["kinds"], '        self.scale = buffer(mesh, "scale", (), torch.float64)'] if last else []
    makes += [slots["twice"]] if number == 1 and shared else []
    body = []
    if first:
        body.append("        x = F.embedding(ids, self.wte())")
        body.append("        skip, kind, odd = x.tanh(), ids % 3, ids % 2 == 1")
    body.append(_block(number, shared, recompute))
    if first and last:
        body.append("        early = x")
    if first and not last:
        body.append("        return (x, skip, kind, odd), {'early': x}")
    elif last:
        body += [
            "        x = x + skip * odd.unsqueeze(-1) + F.embedding(kind, self.kinds())",
            "        logits = x @ self.wte().t() * self.scale()",
            '        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / mesh.count("labels")',
            "        loss = loss + 0.1 * mesh.share * partial_mean(x.square(), None, False, x.numel() * mesh.data.size)",
            '        outputs = {"loss": reduce_from(loss, mesh.data), "logits": logits}',
            '        return outputs | {"early": early}' if first else "        return outputs",
        ]
    else:
        body.append("        return x, skip, kind, odd")
    arguments = ("ids" if first else "x, skip, kind, odd") + (", labels" if last else "")
    return "\n".join(
        [
            f"class Stage{number}(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *makes,
            "",
            f"    def forward(self, {arguments}):",
            *body,
            "",
            "",
        ]
    )


def chain_program(
    stages: int,
    schedule: str,
    micro_batches: int,
    batch: int,
    ranks: int = 2,
    data: int = 1,
    tensor: int = 1,
    zero: int = 0,
    shared: bool = True,
    recompute: bool = False,
    rank_order: tuple[int, ...] = (),
) -> str:
    """The chain of as many layers as stages. Sizes of micro-batches are multiples of ``data``."""
    size = -(-batch // data // micro_batches) * data

    def slot(name: str, path: str, shape: tuple[int, ...], use: str, dim: int, end: str = "") -> str:
        rest = f', store="S{dim},{use}", zero={zero}' if zero else ""
        return f'        self.{name} = parameter(mesh, {path}, {shape}, torch.float64, use="G,{use}"{rest}{end})'

    layer = "\n".join(
        [
            slot("norm_weight", 'f"{path}.norm.weight"', (WIDTH,), "R", 0),
            slot("norm_bias", 'f"{path}.norm.bias"', (WIDTH,), "R", 0),
            slot("up_weight", 'f"{path}.up.weight"', (HIDDEN, WIDTH), "S0", 1),
            slot("up_bias", 'f"{path}.up.bias"', (HIDDEN,), "S0", 0),
            slot("down_weight", 'f"{path}.down.weight"', (WIDTH, HIDDEN), "S1", 0),
            slot("down_bias", 'f"{path}.down.bias"', (WIDTH,), "R", 0),
        ]
    )
    slots = {
        "wte": slot("wte", '"wte.weight"', (VOCABULARY, WIDTH), "R", 1),
        "kinds": slot("kinds", '"kinds.weight"', (3, WIDTH), "R", 1),
        "twice": slot("twice", '"twice"', (WIDTH, WIDTH), "R", 0),
    }
    classes = "".join(_stage(number, stages, slots, shared, recompute) for number in range(stages))
    hidden = (size, LENGTH, WIDTH)
    boundaries = (
        f'(Boundary("x", {hidden}, torch.float64, "S0,R", (0,), True), Boundary("skip", {hidden}, torch.float64, "S0,R", (0,), '
        f'True), Boundary("kind", {hidden[:2]}, torch.int64, "S0,R", (0,)), Boundary("odd", {hidden[:2]}, torch.bool, "S0,R", '
        "(0,)))"
    )
    entries = []
    for number in range(stages):
        takes = tuple(["ids"] * (number == 0) + ["labels"] * (number == stages - 1))
        sends = "()" if number == stages - 1 else boundaries
        outputs = tuple(["early"] * (number == 0) + ["loss", "logits"] * (number == stages - 1))
        entries.append(f"    Stage(Stage{number}, takes={takes}, sends={sends}, outputs={outputs}),")
    order = f", ranks={rank_order}" if rank_order else ""
    listed = "\n".join(entries)
    return f'''"""Chain of {stages} stages."""
import torch
import torch.nn.functional as F
from torch import nn

from autopar.runtime import (
    Boundary, Count, Input, Mesh, Output, Stage, buffer, checkpoint, copy_to, cross_entropy, parameter, partial_mean,
    reduce_from,
)

mesh = Mesh(data={data}, tensor={tensor}, stages={ranks}{order})


class Layer(nn.Module):
    def __init__(self, path):
        super().__init__()
{layer}

    def forward(self, x):
        h = copy_to(F.layer_norm(x, ({WIDTH},), self.norm_weight(), self.norm_bias()), mesh.tensor)
        h = F.gelu(F.linear(h, self.up_weight(), self.up_bias()))
        return x + reduce_from(F.linear(h, self.down_weight()), mesh.tensor) + self.down_bias()


{classes}class Labels(nn.Module):
    def forward(self, labels):
        return labels


INPUTS = (
    Input("ids", {hidden[:2]}, torch.int64, "S0,R", batch_dim=0),
    Input("labels", {hidden[:2]}, torch.int64, "S0,R", batch_dim=0),
)
OUTPUTS = (
    Output("loss", (), "R,R"),
    Output("logits", ({size}, {LENGTH}, {VOCABULARY}), "S0,R", batch_dim=0),
    Output("early", {hidden}, "S0,R", batch_dim=0),
)
BATCH = {size}
BATCH_MULTIPLE = {data}
GLOBAL_BATCH = {batch}
MICRO_BATCHES = {micro_batches}
MICRO_BATCH_UNIT = {data}
SCHEDULE = "{schedule}"
COUNTS = (Count("labels", Labels, takes=("labels",), axes=(mesh.data,)),)
STAGES = (
{listed}
)
FINGERPRINT = "2"
'''


def chain_batch(seed: int, batch: int) -> dict[str, Tensor]:
    """Ids and labels, a third of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)
    ignored = torch.rand(batch, LENGTH, generator=generator) < 0.3
    return {"ids": ids, "labels": labels.masked_fill(ignored, -100)}
