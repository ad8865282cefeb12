"""Small models of many families with a batch of inputs, as tests trace them. Random, in training mode, dropout off."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SEQUENCE = 16


def _tokens(batch: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, SEQUENCE))


def gpt2(batch: int, layers: int = 3) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, vocab_size=61, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = _tokens(batch, 61)
    return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def llama(batch: int, layers: int = 3) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, max_position_embeddings=64,
    )  # fmt: skip
    ids = _tokens(batch, 61)
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def bert(batch: int, layers: int = 3) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(batch, SEQUENCE, dtype=torch.long)
    mask[:, -3:] = 0
    ids = _tokens(batch, 61)
    return BertForMaskedLM(config).train(), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def vit(batch: int, layers: int = 3) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=48, num_attention_heads=4, image_size=32,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config).train(), {
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "labels": torch.randint(0, 10, (batch,)),
    }


def t5(batch: int, layers: int = 3) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=layers, d_model=32, d_kv=8, d_ff=48, num_heads=4, vocab_size=61, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    labels = _tokens(batch, 61)
    labels[:, -2:] = -100
    return T5ForConditionalGeneration(config).train(), {"input_ids": _tokens(batch, 61), "labels": labels}


def resnet(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 24], depths=[3, 3], layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config).train(), {
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "labels": torch.randint(0, 10, (batch,)),
    }


class MLP(nn.Module):
    """Three layers; batch, features -> batch, classes. The loss is given from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(inplace=True), nn.Linear(20, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def cross_entropy(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, inputs["target"])


def mlp(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return MLP(), {"x": torch.randn(batch, 12), "target": torch.randint(0, 5, (batch,))}


class Expert(nn.Module):
    """A residual mixture-of-experts layer in einsums: top-1 routing with a fixed capacity for each expert."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) * 0.1)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts, capacity = self.up.shape[0], x.shape[1] // 2
        scores = self.gate(x).softmax(-1)
        weight, chosen = scores.max(-1)
        mask = nn.functional.one_hot(chosen, experts).to(x.dtype)
        place = (mask.cumsum(1) * mask - 1).long()
        slots = nn.functional.one_hot(place.clamp(min=0, max=capacity - 1), capacity).to(x.dtype)
        dispatch = slots * (mask * (place < capacity)).unsqueeze(-1)
        hidden = torch.einsum("bsec,bsm->becm", dispatch, x)
        hidden = nn.functional.gelu(torch.einsum("becm,emh->bech", hidden, self.up))
        hidden = torch.einsum("bech,ehm->becm", hidden, self.down)
        return x + torch.einsum("becm,bsec->bsm", hidden, dispatch * weight[..., None, None])


class MoE(nn.Module):
    """Embedding, mixture-of-experts layers, head; a dict with the loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.layers = nn.ModuleList(Expert(16, 4) for _ in range(layers))
        self.head = nn.Linear(16, 61)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def moe(batch: int, layers: int = 3) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = _tokens(batch, 61)
    return MoE(layers), {"ids": ids, "labels": ids}


class ConvBlock(nn.Module):
    """Two convolutions with a norm over groups of channels."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, padding=1)
        self.norm = nn.GroupNorm(2, outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.silu(self.norm(self.first(x)))).relu()


class UNet(nn.Module):
    """Down and up again; what each level down makes is joined on the way up: values that skip many blocks."""

    def __init__(self, widths: tuple[int, ...] = (8, 12, 16)) -> None:
        super().__init__()
        before = (3, *widths[:-1])
        self.down = nn.ModuleList(ConvBlock(inner, outer) for inner, outer in zip(before, widths, strict=True))
        self.middle = ConvBlock(widths[-1], widths[-1])
        after = widths[::-1]
        below = (widths[-1], *after[:-1])
        self.up = nn.ModuleList(ConvBlock(inner + outer, outer) for inner, outer in zip(below, after, strict=True))
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, image: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        x, skips = image, []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = x.repeat_interleave(2, -1).repeat_interleave(2, -2)
            x = block(torch.cat([x, skips.pop()], 1))
        out = self.head(x)
        return {"loss": nn.functional.mse_loss(out, target), "out": out}


def unet(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return UNet(), {"image": torch.randn(batch, 3, 16, 16), "target": torch.randn(batch, 2, 16, 16)}


ZOO = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "t5": t5, "resnet": resnet, "mlp": mlp, "moe": moe,
    "unet": unet,
}  # fmt: skip
