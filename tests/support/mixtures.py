"""Mixtures of experts as people write them: einsums, transformers' own, and plain PyTorch in several forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import moe

Built = tuple[nn.Module, dict[str, Tensor]]
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


def tokens(batch: int, length: int = 6) -> dict[str, Tensor]:
    """Words and the same as labels, the first of each row left out."""
    words = torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(0))
    labels = words.clone()
    labels[:, 0] = -100
    return {"input_ids": words, "labels": labels}


def einsum(batch: int = 8) -> Built:
    """Four experts of fixed capacity; ordinary operators."""
    torch.manual_seed(0)
    model, inputs = moe(batch, 2)
    return model.double(), inputs


def mixtral(batch: int = 8, num_experts: int = 4, implementation: str = "batched_mm", **config: Any) -> Built:
    """Two of ``num_experts`` for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = {"num_local_experts": num_experts, "intermediate_size": 24, "experts_implementation": implementation}
    made = MixtralConfig(**{**SIZES, **settings, **config}, use_cache=False)
    return _made(MixtralForCausalLM, made, implementation), tokens(batch)


def qwen_moe(batch: int = 8, num_experts: int = 6) -> Built:
    """Three of ``num_experts`` for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    made = Qwen3MoeConfig(
        **SIZES, num_experts=num_experts, num_experts_per_tok=3, moe_intermediate_size=8, head_dim=4, use_cache=False,
        norm_topk_prob=True,
    )  # fmt: skip
    return _made(Qwen3MoeForCausalLM, made), tokens(batch)


def shared_experts(batch: int = 8, num_experts: int = 4) -> Built:
    """Beside the chosen experts one, with a gate of its own, that all tokens go to."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    made = Qwen2MoeConfig(
        **SIZES, num_experts=num_experts, num_experts_per_tok=2, moe_intermediate_size=8, use_cache=False,
        shared_expert_intermediate_size=12, output_router_logits=True, router_aux_loss_coef=0.1,
    )  # fmt: skip
    return _made(Qwen2MoeForCausalLM, made), tokens(batch)


def _made(model: Any, config: Any, implementation: str = "batched_mm") -> nn.Module:
    config._experts_implementation = implementation
    torch.manual_seed(0)
    made: nn.Module = model(config).double()
    with torch.no_grad():  # so that tokens choose differently, and experts differ
        for name, parameter in made.named_parameters():
            if "gate.weight" in name or "experts" in name:
                parameter.mul_(10)
    return made


class Dropless(nn.Module):
    """A router and experts in plain operators. ``form``: how rows find their experts, and the results their tokens."""

    def __init__(self, form: str, width: int = 8, inside: int = 8, num_experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.form, self.chosen, self.num_experts = form, chosen, num_experts
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, 2 * inside, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, inside) / inside**0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, ids = self.router(flat).softmax(-1).topk(self.chosen, -1)
        found = self._sorted(flat, ids, weights) if self.form.startswith("sorted") else self._picked(flat, ids, weights)
        return x + found.view(x.shape)

    def _picked(self, flat: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Each row with a copy of its expert's weights."""
        rows, chosen = flat.repeat_interleave(self.chosen, 0), ids.flatten()
        found = torch.bmm(rows.unsqueeze(1), self.up[chosen].transpose(1, 2)).squeeze(1)
        return self._finished(rows, found, chosen, weights)

    def _finished(self, rows: Tensor, found: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate, value = found.chunk(2, -1)
        found = torch.bmm(self.down[chosen], (gate.sigmoid() * value).unsqueeze(-1)).squeeze(-1)
        return (weights.reshape(-1, 1) * found).view(-1, self.chosen, rows.shape[-1]).sum(1)

    def _sorted(self, flat: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Rows sorted by expert, and each added to its token's place."""
        chosen = ids.view(-1)
        order = chosen.argsort(stable=True) if self.form == "sorted, argsort" else chosen.sort().indices
        token = order // self.chosen
        counts = nn.functional.one_hot(chosen, self.num_experts).sum(0)
        offsets = counts.cumsum(0).to(torch.int32)
        hidden = torch._grouped_mm(flat[token], self.up.transpose(1, 2), offsets)
        half = hidden.shape[1] // 2
        hidden = nn.functional.silu(hidden[:, :half]) * hidden[:, half:]
        found = torch._grouped_mm(hidden, self.down.transpose(-2, -1), offsets)
        weighted = found * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, token, weighted)


class DroplessModel(nn.Module):
    """Layers of experts with a head; a dict with the loss."""

    def __init__(self, form: str, layers: int = 1, **sizes: int) -> None:
        super().__init__()
        width = sizes.get("width", 8)
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Dropless(form, **sizes) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def dropless(form: str, batch: int = 4, dtype: torch.dtype = torch.float64, **sizes: int) -> Built:
    """A model of :class:`Dropless` layers with its batch."""
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (batch, 5))
    return DroplessModel(form, **sizes).to(dtype), {"ids": ids, "labels": ids.roll(1, 1)}
