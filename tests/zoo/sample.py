"""A sample of transformers' architectures for the tests, one of each kind, with small configs of our own.

Nothing is downloaded: weights are random. Sizes are chosen so that two devices can share heads, channels and experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from torch import nn

BATCH, LENGTH, WORDS, WIDTH, CLASSES, SIDE = 4, 8, 64, 32, 4, 32

Inputs = dict[str, torch.Tensor]


def words(**more: Callable[[], torch.Tensor]) -> Callable[[], Inputs]:
    """Word ids, and what else the model takes."""
    return lambda: {"input_ids": ids(BATCH, LENGTH), **{name: make() for name, make in more.items()}}


def ids(*shape: int, high: int = WORDS) -> torch.Tensor:
    """Random whole numbers from 2, so that they are no padding."""
    return torch.randint(2, high, shape)


def each_word() -> torch.Tensor:
    """A label for each word, some of them ignored."""
    labels = ids(BATCH, LENGTH)
    labels[:, ::3] = -100
    return labels


def images() -> Inputs:
    """Images with a class each."""
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": ids(BATCH, high=CLASSES)}


def scenes() -> Inputs:
    """Images with a class for every pixel."""
    return {"pixel_values": torch.randn(BATCH, 3, SIDE, SIDE), "labels": ids(BATCH, SIDE, SIDE, high=CLASSES)}


def videos() -> Inputs:
    """Four frames with a class."""
    return {"pixel_values": torch.randn(BATCH, 4, 3, SIDE, SIDE), "labels": ids(BATCH, high=CLASSES)}


def waves() -> Inputs:
    """Sound as samples, with a class."""
    return {"input_values": torch.randn(BATCH, 800), "labels": ids(BATCH, high=CLASSES)}


def spectra() -> Inputs:
    """Sound as a spectrogram, with words."""
    return {"input_features": torch.randn(BATCH, 16, 2 * LENGTH), "labels": ids(BATCH, LENGTH)}


def series() -> Inputs:
    """Series of two channels, with what comes next."""
    return {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}


NEXT_WORD = words(labels=each_word)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 2 * WIDTH, "max_position_embeddings": 2 * LENGTH}  # fmt: skip
GROUPED = {
    **TEXT,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
VISION = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH,
          "image_size": SIDE, "patch_size": 8, "num_labels": CLASSES, **NO_DROPOUT}  # fmt: skip
SOUND = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH,
         "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_conv_pos_embeddings": 4,
         "num_conv_pos_embedding_groups": 2, "num_labels": CLASSES, "classifier_proj_size": WIDTH, "hidden_dropout": 0.0,
         "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
         "layerdrop": 0.0, "mask_time_prob": 0.0, "num_feat_extract_layers": 2}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A model class with the settings of its config, and what makes its inputs."""

    model: str
    config: str
    inputs: Callable[[], Inputs]
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[nn.Module, Inputs]:
        """The model in training mode, and its inputs; the same ones every time."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        config._experts_implementation = "batched_mm"  # the others depend on the values of tensors
        model = getattr(transformers, self.model)(config)
        return model.train(), self.inputs()


ENTRIES = {
    "llama": Entry("LlamaForCausalLM", "LlamaConfig", NEXT_WORD, GROUPED),
    "gemma2": Entry("Gemma2ForCausalLM", "Gemma2Config", NEXT_WORD, {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "bloom": Entry("BloomForCausalLM", "BloomConfig", NEXT_WORD,
                   {"vocab_size": WORDS, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "use_cache": False}),
    "gpt-neox": Entry("GPTNeoXForCausalLM", "GPTNeoXConfig", NEXT_WORD, {**TEXT, "use_cache": False}),
    "mixtral": Entry("MixtralForCausalLM", "MixtralConfig", NEXT_WORD,
                     {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}),
    "deepseek-v3": Entry("DeepseekV3ForCausalLM", "DeepseekV3Config", NEXT_WORD,
                         {**GROUPED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
                          "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                          "moe_intermediate_size": WIDTH, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    "gpt-oss": Entry("GptOssForCausalLM", "GptOssConfig", NEXT_WORD,
                     {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
                      "layer_types": ["sliding_attention", "full_attention"]}),
    "mamba": Entry("MambaForCausalLM", "MambaConfig", NEXT_WORD,
                   {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}),
    "bert": Entry("BertForMaskedLM", "BertConfig", NEXT_WORD, {**TEXT, **NO_DROPOUT}),
    "deberta": Entry("DebertaV2ForMaskedLM", "DebertaV2Config", NEXT_WORD,
                     {**TEXT, **NO_DROPOUT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                      "position_biased_input": False}),
    "distilbert": Entry("DistilBertForQuestionAnswering", "DistilBertConfig",
                        words(start_positions=lambda: ids(BATCH, high=LENGTH), end_positions=lambda: ids(BATCH, high=LENGTH)),
                        {"vocab_size": WORDS, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 2 * WIDTH,
                         "max_position_embeddings": 2 * LENGTH, "dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0}),
    "electra": Entry("ElectraForTokenClassification", "ElectraConfig", words(labels=lambda: ids(BATCH, LENGTH, high=CLASSES)),
                     {**TEXT, **NO_DROPOUT, "embedding_size": WIDTH, "num_labels": CLASSES}),
    "t5": Entry("T5ForConditionalGeneration", "T5Config", NEXT_WORD,
                {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 4,
                 "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}),
    "bart": Entry("BartForConditionalGeneration", "BartConfig", NEXT_WORD,
                  {"vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": WIDTH,
                   "decoder_ffn_dim": WIDTH, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0,
                   "max_position_embeddings": 2 * LENGTH, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
                   "eos_token_id": 1, "forced_eos_token_id": 1, "decoder_start_token_id": 1}),
    "vit": Entry("ViTForImageClassification", "ViTConfig", images, VISION),
    "beit": Entry("BeitForImageClassification", "BeitConfig", images,
                  {**VISION, "drop_path_rate": 0.0, "use_relative_position_bias": True}),
    "swin": Entry("SwinForImageClassification", "SwinConfig", images,
                  {"image_size": SIDE, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4],
                   "window_size": 4, "drop_path_rate": 0.0, "num_labels": CLASSES, **NO_DROPOUT}),
    "convnext": Entry("ConvNextForImageClassification", "ConvNextConfig", images,
                      {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2, "num_labels": CLASSES}),
    "regnet": Entry("RegNetForImageClassification", "RegNetConfig", images,
                    {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2], "groups_width": 4,
                     "num_labels": CLASSES}),
    "segformer": Entry("SegformerForSemanticSegmentation", "SegformerConfig", scenes,
                       {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
                        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
                        "decoder_hidden_size": 16, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0,
                        "num_labels": CLASSES, **NO_DROPOUT}),
    "videomae": Entry("VideoMAEForVideoClassification", "VideoMAEConfig", videos, {**VISION, "num_frames": 4}),
    "wav2vec2": Entry("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", waves, SOUND),
    "whisper": Entry("WhisperForConditionalGeneration", "WhisperConfig", spectra,
                     {"vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": WIDTH,
                      "decoder_ffn_dim": WIDTH, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 16,
                      "max_source_positions": LENGTH, "max_target_positions": 2 * LENGTH, "pad_token_id": 0,
                      "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1, "use_cache": False,
                      "suppress_tokens": None, "begin_suppress_tokens": None}),
    "patchtst": Entry("PatchTSTForPrediction", "PatchTSTConfig", series,
                      {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": WIDTH,
                       "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": WIDTH, "prediction_length": 4,
                       "loss": "mse", "head_dropout": 0.0, "norm_type": "layernorm"}),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Inputs]:
    """The entry of this name: the model in training mode, and its inputs by the names of its arguments."""
    return ENTRIES[name].build()
