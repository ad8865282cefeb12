"""How the software of a published run differs from autopar's own programs, as a value.

Enters: a run's source. Leaves: a :class:`Stack`. What a stack *does* (attention in one kernel or not, in which type gradients
are kept and sent, what overlaps) is a fact with a source; its *figures* are fitted by ``python -m
tests.benchmarks.fit_validation`` on the calibration half of the rows, and say so. Figures that the rows of a stack do not fix
are those of the stack that it is derived from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


@dataclass(frozen=True)
class Gradients:
    """Bytes of an element of a parameter's gradient, as it is kept and as it is sent."""

    kept_bytes: float
    sent_bytes: float


@dataclass(frozen=True)
class Stack:
    """A training program's ways.

    ``fused_attention``: no matrix of scores. ``gradients``: by the type of activations, where autopar's own way (kept and sent
    in the master's type) is not the stack's. ``flat_parameters``: a block's parameters are sent together.
    ``splits_messages``: pipeline messages are cut over tensor ranks. ``per_operator``: selective recomputation keeps the
    results of attention and of every second product and computes all else again. ``fuses``: a compiler computes elementwise
    operators where they are read, so that even without recomputation it keeps what selective recomputation keeps.
    ``whole_gradients``: all gradients are reduced together at the step's end and kept whole until then, whatever the level of
    ZeRO; a gathered parameter makes place for its gradient. ``gathers_once``: under ZeRO-3 a parameter is gathered once for
    both passes where blocks are not computed again. ``half_copies``: parameters in half precision rest beside their masters,
    under ZeRO-3 too; parameters in float32 are their own masters. ``scatters``: gradients are scattered, and the optimizer's
    work and states with them, where a run does not say its level of ZeRO. ``solves``: on the last axis of the mesh, runs whose
    notes say ``auto_sharding`` are laid out by a solver (plain transformers where the row has no degrees), those whose notes
    say ``heuristic`` by their parameters' longest dims. ``device_share``: of the device's memory that the program may take.
    ``fused_loss``: one kernel on half-precision logits, which it overwrites with their gradient. ``sequence_parallel``: on
    tensor ranks, unless a run says otherwise; ``gathers_again``: what it gathers in front of a product is gathered again in
    backward, not kept. ``expert_optimizer``: of mixtures of experts, ``image_optimizer``: of convolutional models.

    Figures. ``overlap``: share of the traffic of parameters and gradients that runs beside computing. ``host_seconds``: that
    the host takes to start an operator, and ``pass_seconds`` to start a pass of a micro-batch through a stage; a pass does not
    take less. ``light_passes``: seconds of elementwise operators and norms against those of the fewest kernels, and
    ``loss_passes``: of the loss likewise, beside that. ``sent_passes``: of collectives between operators, against those of
    a collective alone, and ``rank_seconds`` that each of the two collectives of a block's pass takes beside for each further
    tensor rank. ``memory_share`` and ``memory_bytes``: what the process holds beyond its tensors, as a share of them
    (fragmentation) and in any case (context, workspaces, communicators).
    """

    name: str
    source: str
    fused_attention: bool = True
    gradients: Mapping[str, Gradients] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    flat_parameters: bool = False
    splits_messages: bool = False
    per_operator: bool = False
    fuses: bool = False
    whole_gradients: bool = False
    gathers_once: bool = False
    half_copies: bool = False
    scatters: bool = False
    solves: bool = False
    device_share: float = 1.0
    fused_loss: bool = False
    sequence_parallel: bool = False
    gathers_again: bool = False
    expert_optimizer: str = "adamw"
    image_optimizer: str = "adamw"
    overlap: float = 0.0
    host_seconds: float = 0.0
    pass_seconds: float = 0.0
    light_passes: float = 1.0
    loss_passes: float = 1.0
    sent_passes: float = 1.0
    rank_seconds: float = 0.0
    memory_share: float = 0.0
    memory_bytes: float = 0.0


AUTOPAR = Stack("autopar", "what autopar's own programs do and its report says")

# Attention as batched products with a fused softmax between, fp16 gradients summed in fp16 after the last backward pass, the
# loss over a split vocabulary in some ten kernels on float32 logits (megatron/fused_kernels, megatron/mpu/cross_entropy.py,
# megatron/model/distributed.py). Figures: fitted, vTrain.
MEGATRON_DEEPSPEED = Stack(
    "Megatron-DeepSpeed",
    "microsoft/Megatron-DeepSpeed, as vTrain ran it (VIA-Research/vTrain@f8dda847); figures fitted",
    fused_attention=False,
    gradients=MappingProxyType({"float16": Gradients(2, 2)}),
    host_seconds=80e-6,
    pass_seconds=1.54e-3,
    light_passes=1.09,
    loss_passes=2.9,
    sent_passes=1.5,
    rank_seconds=6e-6,
)
# The same code with DeepSpeed's pipeline engine and ZeRO-1 on Jean Zay. BF16_Optimizer keeps the gradients in bfloat16 and
# sums them in float32 beside (deepspeed/runtime/bf16_optimizer.py). Collectives on that machine: fitted, BigScience.
BIGSCIENCE = replace(
    MEGATRON_DEEPSPEED,
    name="BigScience",
    source="bigscience-workshop/Megatron-DeepSpeed on Jean Zay (bigscience@9e64edec); figures fitted",
    gradients=MappingProxyType({"float16": Gradients(2, 2), "bfloat16": Gradients(6, 4)}),
    sent_passes=2.2,
    rank_seconds=2.5e-4,
    memory_share=0.1,
    memory_bytes=8 * 2**30,
)
# Megatron-LM itself: messages are scattered over tensor ranks (Narayanan et al. 2021, section 4.1). Nothing is fitted.
MEGATRON = replace(
    MEGATRON_DEEPSPEED,
    name="Megatron-LM",
    source="NVIDIA/Megatron-LM; figures of Megatron-DeepSpeed",
    splits_messages=True,
    gathers_again=True,
)
# A block's parameters are gathered and its gradients scattered together, ahead of use (Zhao et al. 2023, arXiv:2304.11277);
# loss_fn: fused_crossentropy in the benchmark's yaml files.
FSDP = Stack(
    "FSDP",
    "mosaicml/llm-foundry@8c8dd48f with PyTorch's FSDP and FlashAttention (Triton); figures fitted",
    flat_parameters=True,
    fused_loss=True,
    overlap=0.95,
    light_passes=1.9,
)
# Compiled, so that elementwise operators are fused, and since April 2025 the loss too (torchtitan pull request 1033). Its
# selective activation checkpointing keeps a list of operators, and every second product
# (torchtitan/models/llama3/parallelize.py). Its memory is what the allocator reserved; its fragmentation is taken to be that of
# BigScience, the same allocator.
FSDP2 = replace(
    FSDP,
    name="FSDP2",
    source="pytorch/torchtitan@e7c0cae9; figures of FSDP",
    per_operator=True,
    light_passes=1.0,
    memory_share=BIGSCIENCE.memory_share,
)
# torchtitan's runs of 2024, whose loss was not compiled (train.py of 820504e2).
FSDP2_2024 = replace(
    FSDP2, name="FSDP2 of 2024", source="pytorch/torchtitan@820504e2; figures of FSDP", fused_loss=False
)
# Distributed optimizer with overlapped reduction; TransformerEngine's fused kernels.
MEGATRON_CORE = replace(
    FSDP,
    name="Megatron-Core",
    source="NVIDIA/NeMo and Megatron-Bridge; figures of FSDP",
    splits_messages=True,
    sequence_parallel=True,
    gathers_again=True,
    light_passes=1.0,
)
# XLA; JAX takes 90% of the device's memory at the start (XLA_PYTHON_CLIENT_MEM_FRACTION). Mixtures of experts are trained with
# Adafactor, whose factored state is next to nothing, as is that of sgd (benchmark/alpa/benchmark_one_case_moe.py), Wide-ResNets
# with momentum (benchmark_2d_one_case_wresnet.py). A step is one program. Its reductions are combined without a bound
# (alpa/shard_parallel/auto_sharding.py, ``combiner::all_reduce_threshold`` 1 << 60), so that every gradient waits for the last
# one. The partitioner gathers a parameter once for all its readers, but blocks that are computed again read theirs behind an
# opaque identity (alpa/monkey_patch.py, ``_remat_using_identity``) and so gather again. fp16 parameters are inputs and outputs
# of the step beside ``master_copy`` (alpa/model/model_util.py, ``TrainState``). All suites but those of data parallelism set
# ``prefer_reduce_scatter`` (suite_manual_gpt.py, exp_intra_ablation.py); the latter forces the batch onto the first axis for
# GPT alone under auto_sharding, and its heuristic splits every parameter along the longest dim (tensorflow-alpa,
# auto_sharding.cc, ``shard-largest``).
ALPA = Stack(
    "Alpa",
    "alpa-projects/alpa@8350d913 (XLA, V100); figures fitted",
    fused_attention=False,
    gradients=MappingProxyType({"float16": Gradients(2, 2)}),
    flat_parameters=True,
    fuses=True,
    whole_gradients=True,
    gathers_once=True,
    half_copies=True,
    scatters=True,
    solves=True,
    device_share=0.9,
    expert_optimizer="sgd",
    image_optimizer="sgd_momentum",
    loss_passes=2.7,
)

BY_SOURCE = (
    ("vtrain", MEGATRON_DEEPSPEED), ("bigscience", BIGSCIENCE), ("megatron-lm", MEGATRON), ("korthikanti", MEGATRON),
    ("nemo", MEGATRON_CORE), ("megatron-bridge", MEGATRON_CORE), ("mosaicml", FSDP),
    ("torchtitan benchmarks 2024", FSDP2_2024), ("torchtitan", FSDP2), ("alpa", ALPA),
)  # fmt: skip
# What a source compares itself with, by words of its notes.
BY_METHOD = (("method megatron", MEGATRON), ("method deepspeed", MEGATRON_DEEPSPEED))


def stack_of(source: str, notes: str = "") -> Stack:
    """The software of a run: what its notes say, else by the first known word in its source's name; autopar's own ways for
    others."""
    words = [(word, stack) for word, stack in BY_METHOD if word in notes.lower()]
    words += [(word, stack) for word, stack in BY_SOURCE if word in source.lower()]
    return words[0][1] if words else AUTOPAR
