"""What a generated program imports: meshes, layout steps, operators that know the mesh, parameters, and the engine."""

from autopar.runtime.branches import cond
from autopar.runtime.engine import Engine
from autopar.runtime.errors import ProgramError
from autopar.runtime.experts import experts
from autopar.runtime.halo import halo
from autopar.runtime.loss import cross_entropy, linear_cross_entropy
from autopar.runtime.mesh import Axis, Ledger, Mesh, Sent
from autopar.runtime.normalization import group_norm
from autopar.runtime.operators import batch_norm, partial_mean, vocab_embedding
from autopar.runtime.parameters import BufferSlot, Chunk, ParameterSlot, buffer, parameter
from autopar.runtime.program import Boundary, Count, Input, Output, Stage, load_program
from autopar.runtime.random import dropout
from autopar.runtime.recompute import checkpoint
from autopar.runtime.ring import ring_attention
from autopar.runtime.split import Split
from autopar.runtime.steps import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to,
    gather,
    keep_first,
    keep_first_both,
    keep_first_gradient,
    pad_shard,
    reduce_from,
    reduce_scatter,
    scatter,
    take_shard,
)

__all__ = [
    "Axis",
    "Boundary",
    "BufferSlot",
    "Chunk",
    "Count",
    "Engine",
    "Input",
    "Ledger",
    "Mesh",
    "Output",
    "ParameterSlot",
    "ProgramError",
    "Sent",
    "Split",
    "Stage",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "batch_norm",
    "buffer",
    "checkpoint",
    "cond",
    "copy_to",
    "cross_entropy",
    "dropout",
    "experts",
    "gather",
    "group_norm",
    "halo",
    "keep_first",
    "keep_first_both",
    "keep_first_gradient",
    "linear_cross_entropy",
    "load_program",
    "pad_shard",
    "parameter",
    "partial_mean",
    "reduce_from",
    "reduce_scatter",
    "ring_attention",
    "scatter",
    "take_shard",
    "vocab_embedding",
]
