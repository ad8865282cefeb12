"""What is built of a row's model: a small value by which traced models and prices are shared among rows.

Enters: numbers of a row. Leaves: :class:`ModelDims`. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import InputError


@dataclass(frozen=True)
class ModelDims:
    """A decoder of equal blocks.

    ``gated``: SwiGLU feed-forward, RMS norm, rotary positions, untied head and no biases (Llama); otherwise GPT-2's:
    GELU, layer norm, learned positions, a head tied to the embedding. ``fused_attention``: one fused kernel, or the scores
    as a matrix with a softmax over it, as before FlashAttention. ``fused_loss``: the
    cross-entropy reads logits in half precision. ``experts``: in every second layer, as in GShard (two of them
    for each token, with room for twice their share); 0 for none.
    """

    n_layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    seq_len: int
    gated: bool
    fused_attention: bool
    fused_loss: bool = False
    experts: int = 0

    def __post_init__(self) -> None:
        for name in ("n_layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise InputError(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}: heads must divide hidden, and "
                "kv_heads heads"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def per_operator_bytes(self) -> int:
        """Bytes for each token, in half precision, of what torchtitan's per-operator checkpointing keeps of a block: its input,
        queries, values, the result of attention, and of the feed-forward the first and the last product."""
        return 2 * (4 * self.hidden + self.kv_heads * self.head_dim + self.ffn_hidden)

    @property
    def flash_bytes(self) -> int:
        """Bytes for each token, in half precision, of what a block keeps where no scores are kept: both inputs and norms,
        queries, keys, values, the result of attention, and each product and activation of the feed-forward. For GPT 32 times
        the hidden dim, 34 with the masks of dropout (Korthikanti et al. 2022, arXiv:2205.05198, equation 6)."""
        return 2 * (6 * self.hidden + 2 * self.kv_heads * self.head_dim + (3 if self.gated else 2) * self.ffn_hidden)

    @property
    def narrow_bytes(self) -> int:
        """The same where products read their inputs in 8 bits, which are then what is kept of norms, attention's result and the
        activation (TransformerEngine, ``save_original_input=False``)."""
        return self.flash_bytes - 3 * self.hidden - self.ffn_hidden

    @property
    def unit(self) -> int:
        """Layers that a traced block stands for: with experts in every second layer, two."""
        return 2 if self.experts else 1


@dataclass(frozen=True)
class ResNetDims:
    """A Wide-ResNet-50 of bottlenecks 3, 4, 6, 3: channels of the first stage, factor of a bottleneck's 3x3
    convolution, image size."""

    channels: int
    width: int
    image: int
    n_layers: int = 1  # it has no equal blocks: the whole is one
    unit: int = 1
