"""Which rows the constants were fitted on, and which were held out.

Enters: a :class:`Run`. Leaves: whether it belongs to the calibration. Families of rows that have 40 rows or more in the
published whole are divided in halves by configuration: rows that are the same configuration measured twice are in the
same half. The division follows from the text of the configuration and a seed, so that it is the same everywhere. Smaller
families are held out as wholes.
"""

from __future__ import annotations

import hashlib

from autopar.validation.runs import Run

SEED = 4
# Families with 40 rows or more, by the words that begin their sources, and the rows that they have.
DIVIDED = {
    "vTrain": 1549, "Alpa": 214, "MosaicML": 216, "BigScience": 151, "NVIDIA Megatron-Bridge": 292, "NVIDIA NeMo": 64,
}  # fmt: skip
CONFIGURATION = (
    "model", "n_layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "n_experts", "precision", "gpu_type",
    "n_gpus", "tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch", "global_batch", "sequence_parallel", "activation_recompute",
    "zero_stage",
)  # fmt: skip


def family_of(source: str) -> str | None:
    """The divided family that a source belongs to; None for one that is held out as a whole."""
    return next((family for family in DIVIDED if source.startswith(family)), None)


def is_calibration(run: Run) -> bool:
    """Whether constants may be fitted on a row."""
    family = family_of(run.source)
    if family is None:
        return False
    text = "|".join([str(SEED), family, *(run.text(column) for column in CONFIGURATION)])
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 0
