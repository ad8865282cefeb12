"""The model of a row as a plain PyTorch module on the meta device, traced at as few blocks as show how one follows another.

Enters: :class:`ModelDims` and a precision. Leaves: the OpGraph of ``BLOCKS`` blocks. What a stack fuses into one kernel
(bias and GELU, scale, mask and softmax) is one operator here too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph import OpGraph
from autopar.options import Precision
from autopar.tracing import trace
from autopar.validation.dims import ModelDims, ResNetDims

BLOCKS = 2  # the first follows the embedding, the second a block
BATCH = 64  # samples traced; any number that has many divisors, since the graph is had at other batch sizes afterwards


class Attention(nn.Module):
    """Causal self-attention with grouped heads; queries, keys and values are made by one product."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.dims = dims
        self.widths = (dims.hidden, dims.kv_heads * dims.head_dim, dims.kv_heads * dims.head_dim)
        self.qkv = nn.Linear(dims.hidden, sum(self.widths), bias=not dims.gated)
        self.out = nn.Linear(dims.hidden, dims.hidden, bias=not dims.gated)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(x).split(self.widths, dim=-1)
        query, key, value = (part.view(batch, length, -1, self.dims.head_dim).transpose(1, 2) for part in parts)
        if turns is not None:
            query, key = turned(query, turns), turned(key, turns)
        mixed = self.mixed(query, key, value)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return found

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = self.dims.kv_heads != self.dims.heads
        if self.dims.fused_attention:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: what a fused kernel reads and writes, not what it computes."""
    return x * turns


class FeedForward(nn.Module):
    """Two products with GELU between, or SwiGLU's three."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.up = nn.Linear(dims.hidden, dims.ffn_hidden, bias=not dims.gated)
        self.gate = nn.Linear(dims.hidden, dims.ffn_hidden, bias=False) if dims.gated else None
        self.down = nn.Linear(dims.ffn_hidden, dims.hidden, bias=not dims.gated)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        found: Tensor = self.down(hidden)
        return found


class Experts(nn.Module):
    """A mixture of experts by products (GShard, Lepikhin et al. 2020, arXiv:2006.16668): each token's share of each slot of
    each expert, a sample being a group. How slots are given away is left out: it is little work on small tensors."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        slots = max(1, 2 * dims.seq_len // dims.experts)
        self.gate = nn.Linear(dims.hidden, dims.experts, bias=False)
        self.slots = nn.Parameter(torch.empty(dims.seq_len, 1, slots))
        self.up = nn.Parameter(torch.empty(dims.experts, dims.hidden, dims.ffn_hidden))
        self.down = nn.Parameter(torch.empty(dims.experts, dims.ffn_hidden, dims.hidden))

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.gate(x), dim=-1).unsqueeze(-1) * self.slots
        given = torch.einsum("gsec,gsm->gecm", shares, x)
        hidden = F.gelu(torch.einsum("gecm,emf->gecf", given, self.up))
        made = torch.einsum("gecf,efm->gecm", hidden, self.down)
        return torch.einsum("gsec,gecm->gsm", shares, made)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, dims: ModelDims, experts: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if dims.gated else nn.LayerNorm
        self.norm1, self.attention = norm(dims.hidden), Attention(dims)
        self.norm2, self.feed_forward = norm(dims.hidden), Experts(dims) if experts else FeedForward(dims)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        found: Tensor = x + self.feed_forward(self.norm2(x))
        return found


class Pair(nn.Module):
    """A plain block and one with experts."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.plain, self.mixed = Block(dims), Block(dims, experts=True)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        found: Tensor = self.mixed(self.plain(x, turns), turns)
        return found


class Decoder(nn.Module):
    """Embedding, blocks, norm, head and the mean cross-entropy of all tokens in float32."""

    def __init__(self, dims: ModelDims, blocks: int) -> None:
        super().__init__()
        self.dims = dims
        self.embedding = nn.Embedding(dims.vocab, dims.hidden)
        self.positions = None if dims.gated else nn.Embedding(dims.seq_len, dims.hidden)
        self.blocks = nn.ModuleList(Pair(dims) if dims.experts else Block(dims) for _ in range(blocks))
        self.norm = (nn.RMSNorm if dims.gated else nn.LayerNorm)(dims.hidden)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)
        if not dims.gated:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, turns = self.embedding(tokens), None
        place = torch.arange(tokens.shape[1], device=tokens.device)
        if self.positions is not None:
            x = x + self.positions(place)
        else:
            angles = place[:, None] * torch.ones(self.dims.head_dim, device=tokens.device)
            turns = angles.cos().to(x.dtype)
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits if self.dims.fused_loss else logits.float(), labels.flatten())


class Bottleneck(nn.Module):
    """Three convolutions beside a residual, the second ``width`` times as wide as in ResNet-50."""

    def __init__(self, wide_in: int, channels: int, width: int, stride: int) -> None:
        super().__init__()
        middle, wide_out = channels * width, 4 * channels
        self.conv1, self.norm1 = nn.Conv2d(wide_in, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv3, self.norm3 = nn.Conv2d(middle, wide_out, 1, bias=False), nn.BatchNorm2d(wide_out)
        same = wide_in == wide_out and stride == 1
        self.skip = None if same else nn.Conv2d(wide_in, wide_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(F.relu(self.norm2(self.conv2(y)))))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


class WideResNet(nn.Module):
    """ResNet-50 with wider bottlenecks (alpa-projects/alpa alpa/model/wide_resnet.py) and the mean cross-entropy of 1024
    classes."""

    def __init__(self, dims: ResNetDims) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, dims.channels, 7, 2, 3, bias=False), nn.BatchNorm2d(dims.channels)
        blocks: list[nn.Module] = []
        wide = dims.channels
        for stage, count in enumerate((3, 4, 6, 3)):
            channels = dims.channels * 2**stage
            for index in range(count):
                blocks.append(Bottleneck(wide, channels, dims.width, 2 if stage and not index else 1))
                wide = 4 * channels
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(wide, 1024)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def traced(dims: ModelDims | ResNetDims, compute: str) -> OpGraph:
    """The graph of the short model (of a Wide-ResNet, the whole), computed in the type ``compute`` with float32 masters unless
    that is float32."""
    precision = Precision() if compute == "float32" else Precision(compute)
    with torch.device("meta"):
        if isinstance(dims, ResNetDims):
            images, labels = torch.empty(BATCH, 3, dims.image, dims.image), torch.empty(BATCH, dtype=torch.long)
            inputs = {"images": images, "labels": labels}
            model: nn.Module = WideResNet(dims).train()
        else:
            tokens = torch.empty(BATCH, dims.seq_len, dtype=torch.long)
            inputs = {"tokens": tokens, "labels": tokens.clone()}
            model = Decoder(dims, BLOCKS).train()
    return trace(model, inputs, precision=precision).graph
