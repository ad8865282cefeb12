"""What rows leave blank and their source says elsewhere.

Enters: a :class:`Run`. Leaves: the same with its blank cells filled from the source's own configuration file, where that is
known. A cell that is not blank is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.validation.runs import Run

# Alpa's weak scaling: a model for each number of devices (alpa-projects/alpa@bfb7715f
# benchmark/alpa/old_backup/exp_weak_scaling_2d.py; the rows' operations a step are those of these models within 3%).
_DECODER = {"seq_len": "1024", "vocab": "25600", "micro_batch": "8", "global_batch": "8", "n_layers": "10"}
_EXPERTS = {**_DECODER, "micro_batch": "16", "global_batch": "16", "n_layers": "12", "n_experts": "16"}
_IMAGES = {"micro_batch": "32", "global_batch": "32", "n_layers": "50"}
_WEAK_SCALING: Mapping[tuple[str, int], Mapping[str, str]] = {
    **{
        ("GPT", count): {**_DECODER, "hidden": str(hidden), "heads": str(hidden // 128)}
        for count, hidden in ((1, 2048), (2, 3072), (4, 4096), (8, 6144))
    },
    **{
        ("MoE", count): {**_EXPERTS, "hidden": str(hidden), "heads": str(hidden // 128)}
        for count, hidden in ((1, 768), (2, 1280), (4, 1920), (8, 2560))
    },
    **{
        ("W-ResNet", count): {**_IMAGES, "hidden": f"channels {channels} width 4 image 224"}
        for count, channels in ((1, 224), (2, 320), (4, 448), (8, 640))
    },
}
ELSEWHERE = {"Alpa weak scaling": _WEAK_SCALING}


def completed(run: Run) -> Run:
    """The row with what its source says elsewhere."""
    table = next((found for source, found in ELSEWHERE.items() if run.source.startswith(source)), {})
    cells = table.get((run.text("model"), run.num_devices), {})
    return replace(run, cells={**run.cells, **{name: text for name, text in cells.items() if not run.text(name)}})
