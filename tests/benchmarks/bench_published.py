"""Plans that people made by hand for large GPTs, against the planner's own, under the same costs.

``python -m tests.benchmarks.bench_published [--row NAME] [--json FILE] [--table FILE]``. The runs are in published_runs.csv:
Megatron-LM's table 1 (SC'21) and BLOOM's trials (BigScience), of a configuration that was run more than once the fastest.
Each is planned twice: with everything forced that was published, the shardings inside a stage and where it is cut searched;
and with nothing forced. Runs of one model on one cluster share the second. Such runs are planned in a process of their own,
smaller ones first; ``--json`` keeps finished rows, a line each, which are not run again, and ``--table`` writes them down.
Lines are added while it runs, so that it may be stopped.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.graph import OpGraph
from autopar.options import Parallelism, PlanOptions
from autopar.planner import Search, named_axes
from autopar.search.clock import Clock
from autopar.search.evaluate import Evaluated
from autopar.search.joint import Found
from autopar.tracing import trace
from cost_models import Cluster, CostModel, Link
from cost_models.catalogue import find_link

RUNS = Path(__file__).with_name("published_runs.csv")
RESULTS = Path("bench_published.jsonl")
MICRO_BATCHES = (1, 2, 4)  # samples of a data rank, where they were not published
MORE_MEMORY = 8  # times what there is, to price what does not fit
FREE = PlanOptions(max_evaluations=3, gap=0.03)

HEAD = """# Plans made by hand, and the planner's own

Megatron-LM's table 1 (SC'21, arXiv:2104.04473) and the trials that led to BLOOM (BigScience, tr11-176B-ml), on A100-80GB in
nodes of eight: InfiniBand HDR, one card for each device, and four Omni-Path cards of 100 Gb/s a node. A row says what a plan
takes under this project's costs, the published one with its degrees, micro-batch, schedule, recomputation and ZeRO level
forced, and the planner's own with nothing forced; so the ratio is free of errors that both have in common. What was
measured is beside it. Made by `python -m tests.benchmarks.bench_published --table docs/published.md`; the runs and their
sources are in `tests/benchmarks/published_runs.csv`.

The models are GPT-2's classes at the published sizes in bfloat16: BLOOM's ALiBi and the norm behind its embedding are left
out, and so are copies of the parameters in float32, so that memory is less than was measured. Of SC'21, ZeRO is taken to be
0, the micro-batch of a data rank the best of 1, 2 and 4 under our costs, and the stages of a rank the best of 2 to 4; its
measured seconds are those that its TFLOP/s stand for, with the paper's own count of operations. Where the published plan
does not fit under our memory model, its seconds are those on devices with more memory. A search ends when three plans have
been planned in full, or one is within 3% of the lower bound; that of the free search is in the table. `t8 p12 d4 m2`: 8
devices share the operators, 12 pipeline ranks the layers, 4 the batch, and each of these has 2 samples at a time.

"""


@dataclass(frozen=True)
class Run:
    """A published run. ``micro_batch``: samples of one data rank; ``status``: ``ok``, ``OOM`` or ``no time``."""

    name: str
    n_layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int
    n_gpus: int
    inter_link: str
    tp: int
    pp: int
    dp: int
    schedule: str
    micro_batch: int | None
    global_batch: int
    recompute: str
    zero: int
    iteration_time_s: float | None
    tflops_per_gpu: float | None
    memory_gb: float | None
    status: str
    where: str

    @property
    def task(self) -> tuple[object, ...]:
        """What the planner is given: runs that have it in common differ in how they were planned only."""
        return (
            self.n_gpus, self.n_layers, self.hidden, self.heads, self.vocab, self.seq_len, self.global_batch, self.inter_link,
        )  # fmt: skip

    @property
    def measured_seconds(self) -> float | None:
        """As published, or derived from the published rate of operations (SC'21, section 5.1)."""
        if self.iteration_time_s is not None or self.tflops_per_gpu is None:
            return self.iteration_time_s
        h, s, layers, tokens = self.hidden, self.seq_len, self.n_layers, self.global_batch * self.seq_len
        operations = 96 * tokens * layers * h**2 * (1 + s / (6 * h) + self.vocab / (16 * layers * h))
        return operations / (self.tflops_per_gpu * 1e12 * self.n_gpus)

    def model(self) -> OpGraph:
        """Traced at the global batch."""
        config = GPT2Config(
            n_layer=self.n_layers, n_embd=self.hidden, n_head=self.heads, vocab_size=self.vocab, n_positions=self.seq_len,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = GPT2LMHeadModel(config).to(torch.bfloat16).train()
            tokens = torch.empty(self.global_batch, self.seq_len, dtype=torch.long)
        return trace(model, {"input_ids": tokens, "labels": tokens.clone()}).graph

    def cluster(self) -> Cluster:
        return Cluster.homogeneous(
            num_nodes=self.n_gpus // 8, devices_per_node=8, device="A100-SXM-80GB", intra_link="NVLink3",
            inter_link=omni_path() if self.inter_link == "Omni-Path" else self.inter_link,
        )  # fmt: skip

    def forced(self, micro_batch: int) -> Parallelism:
        return Parallelism(
            data=self.dp, tensor=self.tp, pipeline=self.pp, zero=self.zero, recompute=self.recompute,
            schedule=None if self.pp == 1 else self.schedule, micro_batch_size=micro_batch * self.dp,
        )  # fmt: skip


def runs() -> list[Run]:
    """All published runs, smaller tasks first."""
    with RUNS.open() as file:
        found = [
            Run(**{name: _value(Run.__annotations__[name], text) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]
    return sorted(found, key=lambda run: run.task)


def _value(kind: str, text: str) -> int | float | str | None:
    if kind.startswith("str"):
        return text
    if not text:
        return None
    return int(text) if kind.startswith("int") else float(text)


def omni_path() -> Link:
    """Jean Zay's: four cards of 100 Gb/s a node, latency and efficiency as InfiniBand's."""
    return replace(find_link("InfiniBand-HDRx4"), name="Omni-Path-100Gx4", bandwidth_bytes_per_second=12.5e9)


def search(graph: OpGraph, cluster: Cluster, options: PlanOptions) -> Found:
    """The planner's search, without its report."""
    return Search(graph, CostModel(cluster), options, Clock({}), lambda message: print(message, file=sys.stderr)).run()


def with_more_memory(cluster: Cluster) -> Cluster:
    """The same devices with so much memory that all fits."""
    return replace(
        cluster,
        nodes=tuple(
            replace(node, device=replace(node.device, memory_bytes=node.device.memory_bytes * MORE_MEMORY))
            for node in cluster.nodes
        ),
    )


def price(run: Run, graph: OpGraph) -> dict[str, object]:
    """The published plan: its prices, and whether it fits."""
    best: dict[str, object] = {}
    for micro_batch in (run.micro_batch,) if run.micro_batch else MICRO_BATCHES:
        options = replace(FREE, parallelism=run.forced(micro_batch))
        found, fits = search(graph, run.cluster(), options).best, True
        if found is None:
            found, fits = search(graph, with_more_memory(run.cluster()), options).best, False
        assert found is not None, f"{run.name}: no plan satisfies what is forced"
        each = found.frame.num_stages // found.frame.grid.num_ranks
        stages = f", {each} stages a rank" if each > 1 else ""
        here: dict[str, object] = {
            "published": f"t{run.tp} p{run.pp} d{run.dp} m{micro_batch}{stages}",
            "published_seconds": found.step_seconds,
            "published_bytes": found.peak_bytes,
            "published_fits": fits,
        }
        if not best or (fits, -found.step_seconds) > (best["published_fits"], -best["published_seconds"]):  # type: ignore[operator]
            best = here
    return best


def plan_freely(run: Run, graph: OpGraph) -> dict[str, object]:
    """The planner's own plan of a task."""
    start = time.perf_counter()
    found = search(graph, run.cluster(), FREE)
    assert found.best is not None, f"{run.name}: no plan fits"
    return {
        "own": describe(found.best),
        "own_seconds": found.best.step_seconds,
        "own_bytes": found.best.peak_bytes,
        "bound_seconds": found.lower_bound_seconds,
        "planning_seconds": time.perf_counter() - start,
    }


def describe(plan: Evaluated) -> str:
    """A plan in a few words: pipeline, mesh, micro-batches, schedule, ZeRO levels, blocks that recompute."""
    frame, stages = plan.frame, named_axes(plan.stages)
    words = [f"p{frame.grid.num_ranks} of {stages[0].plan.mesh}", f"{frame.num_micro_batches} micro-batches"]
    if frame.num_stages > 1:
        words.append(f"{frame.num_stages} stages, {frame.schedule}")
    zero = sorted({parameter.zero for stage in stages for parameter in stage.plan.parameters.values()})
    words.append(f"ZeRO {', '.join(map(str, zero))}")
    modes = [mode for stage in stages for mode in stage.candidate.costed.setting.recompute.values()]
    again = [f"{modes.count(mode)} of {len(modes)} {mode}" for mode in ("selective", "full") if mode in modes]
    return "; ".join([*words, f"recomputes {', '.join(again)}" if again else "recomputes nothing"])


def measure(run_names: list[str]) -> Iterator[dict[str, object]]:
    """The rows of runs of one task."""
    mine = [run for run in runs() if run.name in run_names]
    graph = mine[0].model()
    own = plan_freely(mine[0], graph)
    for run in mine:
        yield {"name": run.name, **price(run, graph), **own}


def in_processes(chosen: list[Run], results: Path | None) -> Iterator[dict[str, object]]:
    """Runs of each task in a process of its own; finished rows go into the file at once."""
    for task in dict.fromkeys(run.task for run in chosen):
        names = [run.name for run in chosen if run.task == task]
        command = [sys.executable, "-m", __spec__.name, "--child", *names]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if results is not None:
                    with results.open("a") as file:
                        file.write(line)
                yield json.loads(line)
        if process.returncode:
            print(f"FAILED: {' '.join(names)}", flush=True)


def finished(results: Path | None) -> dict[str, dict[str, object]]:
    """Rows in the file, the last of each run."""
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def cells(run: Run, row: dict[str, object]) -> list[str]:
    """A row of the table."""
    size = run.name.partition("-t")[0]
    measured = run.measured_seconds
    ratio = row["published_seconds"] / row["own_seconds"]  # type: ignore[operator]
    memory = [f"{row[key] / 2**30:.1f}" for key in ("published_bytes", "own_bytes")]  # type: ignore[operator]
    return [
        f"{size}, batch {run.global_batch}, {run.n_gpus} devices", str(row["published"]), f"{row['published_seconds']:.2f}",
        f"{memory[0]}{'' if row['published_fits'] else ', does not fit'}", str(row["own"]), f"{row['own_seconds']:.2f}",
        f"{row['bound_seconds']:.2f}", memory[1], f"{ratio:.2f}",
        run.status if run.status == "OOM" else "" if measured is None else f"{measured:.2f}",
    ]  # fmt: skip


COLUMNS = (
    "run", "published plan", "its seconds", "its GiB", "own plan", "own seconds", "lower bound", "own GiB", "ratio", "measured",
)  # fmt: skip


def table(rows: dict[str, dict[str, object]]) -> str:
    """The finished rows in Markdown."""
    done = [run for run in runs() if run.name in rows]
    slower = [run.name for run in done if rows[run.name]["own_seconds"] > rows[run.name]["published_seconds"]]  # type: ignore[operator]
    verdict = f"slower: {', '.join(slower)}" if slower else "the planner's own plan is never slower"
    lines = [f"{len(done)} of {len(runs())} runs; {verdict}.", "", f"| {' | '.join(COLUMNS)} |"]
    lines.append("|" + "---|" * len(COLUMNS))
    lines += [f"| {' | '.join(cells(run, rows[run.name]))} |" for run in done]
    return "\n".join(lines) + "\n"


def main() -> None:
    names = [run.name for run in runs()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=names, help="only this run; may be repeated")
    parser.add_argument("--json", type=Path, help="keeps finished rows, which are not run again")
    parser.add_argument("--table", type=Path, help="where the table is written, as Markdown")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.child:
        for row in measure(arguments.child):
            print(json.dumps(row), flush=True)
        return
    rows = finished(arguments.json)
    wanted = arguments.row or names
    for row in in_processes([run for run in runs() if run.name in wanted and run.name not in rows], arguments.json):
        rows[str(row["name"])] = row
        print(json.dumps(row), flush=True)
    print(table(rows))
    if arguments.table:
        arguments.table.write_text(HEAD + table(rows))


if __name__ == "__main__":
    main()
