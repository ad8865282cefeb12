"""Published runs, read from CSV files.

Enters: a path. Leaves: one :class:`Run` a row, its cells as values, and what is wrong with it where something is. What is wrong
with a file as a whole (unreadable, columns missing) raises; what is wrong with a row is said of the row.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autopar.errors import InputError

COLUMNS = (
    "source", "model", "n_layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "n_experts",
    "top_k", "precision", "gpu_type", "gpus_per_node", "n_gpus", "intra_link", "inter_link", "tp", "pp", "dp", "cp", "ep",
    "vpp", "schedule", "micro_batch", "global_batch", "sequence_parallel", "activation_recompute", "zero_stage",
    "iteration_time_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "memory_gb", "status", "notes",
)  # fmt: skip

NOT_RUN = ("analytic", "figure-percent")  # statuses of rows that nobody measured


@dataclass(frozen=True)
class Run:
    """A row. Numbers are None where the cell is blank; ``micro_batch``: samples of one data rank as the row has it.

    ``line``: of the file, the header being line 1; ``fault``: why the row cannot be understood.
    """

    file: str
    line: int
    cells: Mapping[str, str] = field(hash=False)
    fault: str | None = None

    def text(self, column: str) -> str:
        """A cell."""
        return self.cells.get(column, "").strip()

    def number(self, column: str) -> float | None:
        """A cell as a number; None where it is blank or none."""
        try:
            value = float(self.text(column).split()[0]) if self.text(column) else math.nan
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    def count(self, column: str) -> int | None:
        """A cell as a whole number; None where it is blank or none."""
        value = self.number(column)
        return int(value) if value is not None and value == int(value) else None

    @property
    def source(self) -> str:
        return self.text("source") or "(no source)"

    @property
    def status(self) -> str:
        return self.text("status")

    @property
    def ran_out(self) -> bool:
        """Whether the row says that memory did not suffice."""
        return self.status.upper().startswith("OOM") and "failed" not in self.status

    @property
    def was_run(self) -> bool:
        return self.status not in NOT_RUN

    @property
    def num_devices(self) -> int:
        return self.count("n_gpus") or 0

    @property
    def recompute(self) -> str:
        """``none``, ``selective`` or ``full``; blank counts as none."""
        word = self.text("activation_recompute").split(" ")[0].lower()
        return word if word in ("full", "selective") else "none"

    @property
    def zero(self) -> int:
        """The ZeRO level at the front of text such as ``3 (FSDP FULL_SHARD)``; blank counts as 0."""
        found = re.match(r"[0-3]", self.text("zero_stage"))
        return int(found.group()) if found else 0

    def measured(self) -> tuple[float, str] | None:
        """Seconds of a step and the column that they come from; None where the row has none.

        Tokens a second count all tokens of the global batch; TFLOP/s are turned back with the source's own count of
        operations (:func:`published_flops`).
        """
        if self.ran_out or not self.was_run:
            return None
        seconds = self.number("iteration_time_s")
        if seconds:
            return seconds, "iteration_time_s"
        batch, length, rate = (self.number(name) for name in ("global_batch", "seq_len", "tokens_per_s_per_gpu"))
        if rate and batch and length and self.num_devices:
            return batch * length / (rate * self.num_devices), "tokens_per_s_per_gpu"
        rate, flops = self.number("tflops_per_gpu"), published_flops(self)
        if rate and flops and self.num_devices:
            return flops[0] / (rate * 1e12 * self.num_devices), f"tflops_per_gpu ({flops[1]})"
        return None


def published_flops(run: Run) -> tuple[float, str] | None:
    """Operations of a step as the row's authors count them, with the formula's name; None where no formula is known.

    ``F_SC21`` (Narayanan et al. 2021, arXiv:2104.04473, section 5.1): 96 B s l h^2 (1 + s/6h + V/16lh) with the
    recomputed forward pass, 72 without; used by Megatron-LM, BigScience and Alpa. ``6N + 12lhs`` a token: NeMo 24.07 and
    MosaicML, ``6N + 6lhs``: Megatron-Bridge; N counts the output embedding and not the input one.
    """
    names = ("n_layers", "hidden", "vocab", "seq_len", "global_batch")
    numbers = [run.number(name) for name in names]
    if None in numbers or run.number("n_experts"):
        return None
    layers, hidden, vocab, length, batch = (float(number) for number in numbers if number is not None)
    source = run.source.lower()
    if any(word in source for word in ("nemo", "bridge", "mosaic")):
        ffn, kv = run.number("ffn_hidden") or 4 * hidden, run.number("kv_heads") or run.number("heads") or 1
        products = 3 if is_gated(run) else 2
        each = 2 * hidden**2 * (1 + kv / (run.number("heads") or kv)) + products * hidden * ffn
        factor = 6 if "bridge" in source else 12
        tokens = batch * length
        return tokens * (6 * (layers * each + hidden * vocab) + factor * layers * hidden * length), f"6N + {factor}lhs"
    factor = 72 if run.recompute == "none" else 96
    flops = factor * batch * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
    return flops, f"F_SC21 with {factor}"


def is_gated(run: Run) -> bool:
    """Whether the model is of Llama's kind."""
    return any(word in run.text("model").lower() for word in ("llama", "qwen", "mistral"))


def read_runs(path: str | Path) -> list[Run]:
    """All rows of a file.

    Raises InputError: the file cannot be read, is no CSV in UTF-8, lacks columns, or has no rows.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InputError(f"cannot read the runs {str(path)!r}: {reason}; check the path") from error
    reader = csv.DictReader(lines, strict=True)
    try:
        header: Sequence[str] = reader.fieldnames or ()
        _check_columns(path, header)
        runs = [_run(str(path), reader.line_num, cells, header) for cells in reader]
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not a CSV file ({error}); check its quotes") from error
    if not runs:
        raise InputError(f"{path} has a header and no rows; give a file with runs")
    return runs


def _check_columns(path: str | Path, header: Sequence[str]) -> None:
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise InputError(
            f"{path} lacks the columns {', '.join(missing)}; a file of runs has the columns {', '.join(COLUMNS)} "
            "(cells may be blank)"
        )


def _run(path: str, line: int, cells: Mapping[str | None, object], header: Sequence[str]) -> Run:
    texts = {name: str(cells.get(name) or "") for name in header}
    fault = None
    if None in cells:
        fault = f"the row has more cells than the header's {len(header)}; check its quotes"
    elif any(cells.get(name) is None for name in header):
        fault = f"the row has fewer cells than the header's {len(header)}; check that it is complete"
    return Run(path, line, texts, fault or _not_numbers(texts))


NUMBERS = ("n_layers", "hidden", "heads", "seq_len", "n_gpus", "tp", "pp", "dp", "cp", "micro_batch", "global_batch")
POSITIVE = (
    *NUMBERS,
    "gpus_per_node",
    "vocab",
    "iteration_time_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "memory_gb",
)


def _not_numbers(cells: Mapping[str, str]) -> str | None:
    """What is wrong with the first cell that should be a number above zero and is not."""
    for name in POSITIVE:
        text = cells.get(name, "").strip()
        try:
            wrong = bool(text) and not 0 < float(text.split()[0]) < math.inf
        except ValueError:
            wrong = name in NUMBERS and not text[0].isalpha()
        if wrong:
            return f"{name} is {text!r}; give a number above zero, or leave it blank"
    return None
