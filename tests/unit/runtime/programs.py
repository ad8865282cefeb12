"""Two hand-written programs with the models that they compute, for the tests of the engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two layers, a frozen scale, mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, dtype=torch.float64)
        self.down = nn.Linear(10, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.rand(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        found = self.down(F.gelu(self.up(x))) * self.scale
        return F.mse_loss(found, y), found


def mlp_program(zero: int) -> str:
    """The MLP on data=2 x tensor=2; the hidden dim of 10 is split, 7 rows are split unevenly over data."""
    stores = {
        "up.weight": ('use="G,S0[1x10/1]"', 'store="S1[1x6/1],S0[1x10/1]"'),
        "up.bias": ('use="G,S0"', 'store="S0,S0"'),  # nested: 5 of 10 on each tensor rank in use
        "down.weight": ('use="G,S1"', 'store="S0,S1"'),  # 3 rows over 2: uneven
        "down.bias": ('use="G,R"', 'store="S0,R"'),
    }

    def slot(name: str, shape: tuple[int, ...]) -> str:
        use, store = stores[name]
        rest = f", {store}, zero={zero}" if zero else ""
        return f'parameter(mesh, "{name}", {shape}, torch.float64, {use}{rest})'

    return f'''"""Mlp on data=2 x tensor=2."""
import torch
import torch.nn.functional as F
from torch import nn

from autopar.runtime import Input, Mesh, Output, buffer, copy_to, parameter, partial_mean, reduce_from

mesh = Mesh(data=2, tensor=2)


class Stage0(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_weight = {slot("up.weight", (10, 6))}
        self.up_bias = {slot("up.bias", (10,))}
        self.down_weight = {slot("down.weight", (3, 10))}
        self.down_bias = {slot("down.bias", (3,))}
        self.scale = parameter(mesh, "scale", (3,), torch.float64, use="R,R", trainable=False)
        self.count = buffer(mesh, "count", (), torch.int64)

    def forward(self, x, y):
        self.count.update(self.count() + 1)
        x = copy_to(x, mesh.tensor)
        h = F.gelu(F.linear(x, self.up_weight(), self.up_bias()))
        h = reduce_from(F.linear(h, self.down_weight()), mesh.tensor) + self.down_bias()
        found = h * self.scale()
        loss = partial_mean((found - y).square(), None, False, 21)
        return {{"loss": reduce_from(loss, mesh.data), "found": found}}


INPUTS = (
    Input("x", (7, 6), torch.float64, "S0[1x7/1],R", batch_dim=0),
    Input("y", (7, 3), torch.float64, "S0[1x7/1],R", batch_dim=0),
)
OUTPUTS = (Output("loss", (), "R,R"), Output("found", (7, 3), "S0[1x7/1],R", batch_dim=0))
BATCH = 7
BATCH_MULTIPLE = None
STAGES = (Stage0,)
FINGERPRINT = "0"
'''


class Attention(nn.Module):
    """A block of causal attention with fused q-k-v (uneven heads) and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(12, dtype=torch.float64)
        self.qkv = nn.Linear(12, 36, dtype=torch.float64)
        self.proj = nn.Linear(12, 12, dtype=torch.float64)
        self.up = nn.Linear(12, 20, dtype=torch.float64)
        self.down = nn.Linear(20, 12, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in self.qkv(self.ln(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    """Embedding tied with the head, two blocks, cross-entropy with ignored labels."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(13, 12, dtype=torch.float64)
        self.h = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(12, 13, bias=False, dtype=torch.float64)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def language_program(zero: int, data: int = 2, tensor: int = 2) -> str:
    """The language model: vocabulary of 13, 3 heads and hidden 20 split over tensor, batch over data."""

    def slot(name: str, shape: tuple[int, ...], use: str, dim: int, end: str = "") -> str:
        rest = f', store="S{dim},{use}", zero={zero}' if zero else ""
        return f'parameter(mesh, {name}, {shape}, torch.float64, use="G,{use}"{rest}{end})'

    qkv = "S0[3x12/4]"
    return f'''"""Language on data={data} x tensor={tensor}."""
import torch
import torch.nn.functional as F
from torch import nn

from autopar.runtime import Input, Mesh, Output, Split, copy_to, cross_entropy, parameter, reduce_from, vocab_embedding

mesh = Mesh(data={data}, tensor={tensor})
vocab = Split(13, (mesh.tensor, None))
heads = Split(3, (mesh.tensor, None))
qkv = Split(36, (mesh.tensor, "3x12/4"))


class Block(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.ln_weight = {slot('f"{path}.ln.weight"', (12,), "R", 0)}
        self.ln_bias = {slot('f"{path}.ln.bias"', (12,), "R", 0)}
        self.qkv_weight = {slot('f"{path}.qkv.weight"', (36, 12), qkv, 1)}
        self.qkv_bias = {slot('f"{path}.qkv.bias"', (36,), qkv, 0)}
        self.proj_weight = {slot('f"{path}.proj.weight"', (12, 12), "S1[1x12/4]", 0)}
        self.proj_bias = {slot('f"{path}.proj.bias"', (12,), "R", 0)}
        self.up_weight = {slot('f"{path}.up.weight"', (20, 12), "S0", 1)}
        self.up_bias = {slot('f"{path}.up.bias"', (20,), "S0", 0)}
        self.down_weight = {slot('f"{path}.down.weight"', (12, 20), "S1", 0)}
        self.down_bias = {slot('f"{path}.down.bias"', (12,), "R", 0)}

    def forward(self, x):
        h = copy_to(F.layer_norm(x, (12,), self.ln_weight(), self.ln_bias(), 1e-5), mesh.tensor)
        q, k, v = F.linear(h, self.qkv_weight(), self.qkv_bias()).split(qkv.local // 3, -1)
        q, k, v = (t.unflatten(-1, (heads.local, 4)).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + reduce_from(F.linear(a, self.proj_weight()), mesh.tensor) + self.proj_bias()
        h = F.gelu(F.linear(copy_to(x, mesh.tensor), self.up_weight(), self.up_bias()))
        return x + reduce_from(F.linear(h, self.down_weight()), mesh.tensor) + self.down_bias()


class Stage0(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = {slot('"wte.weight"', (13, 12), "S0", 1, ', aliases=("head.weight",)')}
        self.h = nn.ModuleList(Block(f"h.{{i}}") for i in range(2))

    def forward(self, ids, labels):
        x = reduce_from(vocab_embedding(ids, self.wte(), vocab), mesh.tensor)
        for block in self.h:
            x = block(x)
        logits = F.linear(copy_to(x, mesh.tensor), self.wte())
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), batch_axes=(mesh.data,), vocab=vocab)
        return {{"loss": reduce_from(loss, mesh.data), "logits": logits}}


INPUTS = (Input("ids", (4, 5), torch.int64, "S0,R", batch_dim=0), Input("labels", (4, 5), torch.int64, "S0,R", batch_dim=0))
OUTPUTS = (Output("loss", (), "R,R"), Output("logits", (4, 5, 13), "S0,S2", batch_dim=0))
BATCH = 4
BATCH_MULTIPLE = {data}
STAGES = (Stage0,)
FINGERPRINT = "1"
'''


def language_batch(seed: int, batch: int = 4) -> dict[str, Tensor]:
    """Ids and labels, a third of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(13, (batch, 5), generator=generator)
    labels = torch.randint(13, (batch, 5), generator=generator)
    ignored = torch.rand(batch, 5, generator=generator) < 0.3
    return {"ids": ids, "labels": labels.masked_fill(ignored, -100)}


def mlp_batch(seed: int) -> dict[str, Tensor]:
    """Seven rows of inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(7, 6, generator=generator, dtype=torch.float64),
        "y": torch.randn(7, 3, generator=generator, dtype=torch.float64),
    }
