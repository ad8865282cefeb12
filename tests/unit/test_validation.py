"""Published runs: read, turned into jobs, predicted, counted. The prediction's oracle is the planner with the same forced."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.cli import main
from autopar.errors import InputError
from autopar.options import Parallelism, PlanOptions, Precision
from autopar.planner import plan_graph
from autopar.tracing import trace
from autopar.validation import document, outcomes, text, validate
from autopar.validation.dims import ModelDims
from autopar.validation.elsewhere import completed
from autopar.validation.jobs import Job, NotModelled, job_of
from autopar.validation.models import Decoder
from autopar.validation.parts import Degrees, LastAxis, Part
from autopar.validation.prediction import (
    Predictor,
    gradient_bytes,
    layers_of,
    resting_bytes,
    schedule_of,
    stage_times,
    stages_of,
    step_seconds,
)
from autopar.validation.runs import COLUMNS, Run, read_runs
from autopar.validation.splits import CONFIGURATION, is_calibration
from autopar.validation.stacks import ALPA, AUTOPAR, stack_of
from autopar.validation.statistics import Outcome, figures, kendall_tau, percentile
from cost_models import Cluster, ClusterError, Hops, StageTimes, step_seconds_only

# Of the published runs, as their authors wrote them.
VTRAIN = {
    "source": "vTrain MICRO24 ground truth", "model": "GPT L12H2048", "n_layers": "12", "hidden": "2048", "heads": "16",
    "ffn_hidden": "8192", "vocab": "50257", "seq_len": "1024", "precision": "fp16 mixed", "gpu_type": "A100-SXM4",
    "gpus_per_node": "8", "n_gpus": "8", "intra_link": "NVLink3", "tp": "1", "pp": "1", "dp": "8", "schedule": "1F1B",
    "micro_batch": "8", "global_batch": "128", "activation_recompute": "full", "zero_stage": "0",
    "iteration_time_s": "0.552215", "status": "ok",
}  # fmt: skip
BLOOM = {
    "source": "BigScience tr11 prequel (Jean Zay A100)", "model": "BLOOM-like 181B", "n_layers": "72", "hidden": "14336",
    "heads": "64", "ffn_hidden": "57344", "vocab": "250880", "seq_len": "2048", "precision": "fp16",
    "gpu_type": "A100-SXM4-80GB", "gpus_per_node": "8", "n_gpus": "384", "intra_link": "NVLink3",
    "inter_link": "4x Omni-Path 100 Gb/s per node", "tp": "4", "pp": "12", "dp": "8", "schedule": "1F1B (DeepSpeed)",
    "micro_batch": "4", "global_batch": "2048", "sequence_parallel": "no", "activation_recompute": "full", "zero_stage": "1",
    "iteration_time_s": "111.89", "tflops_per_gpu": "144.08", "memory_gb": "60", "status": "ok",
}  # fmt: skip
SELECTIVE = {
    "source": "Korthikanti et al. 2205.05198", "model": "GPT 175B (GPT-3)", "n_layers": "96", "hidden": "12288",
    "heads": "96", "ffn_hidden": "49152", "vocab": "51200", "seq_len": "2048", "precision": "fp16",
    "gpu_type": "A100-SXM4-80GB", "gpus_per_node": "8", "n_gpus": "64", "intra_link": "NVLink3/NVSwitch",
    "inter_link": "8x HDR200 IB (Selene)", "tp": "8", "pp": "8", "dp": "1", "vpp": "3", "schedule": "1F1B interleaved",
    "micro_batch": "1", "global_batch": "64", "sequence_parallel": "yes", "activation_recompute": "selective",
    "iteration_time_s": "13.75", "status": "ok",
}  # fmt: skip
MPT = {
    "source": "MosaicML llm-foundry benchmarking", "model": "MPT-13b", "n_layers": "40", "hidden": "5120", "heads": "40",
    "ffn_hidden": "20480", "vocab": "50368", "seq_len": "2048", "precision": "amp_bf16", "gpu_type": "H100-SXM5-80GB",
    "gpus_per_node": "8", "n_gpus": "8", "intra_link": "NVLink", "inter_link": "3200 Gb/s (assumed) ; not stated", "tp": "1",
    "pp": "1", "dp": "8", "micro_batch": "2", "global_batch": "16", "activation_recompute": "none",
    "zero_stage": "3 (FSDP FULL_SHARD)", "iteration_time_s": "0.8548", "status": "ok",
}  # fmt: skip
TIED = ModelDims(4, 512, 8, 8, 2048, 4096, 256, gated=False, fused_attention=True)
GATED = replace(TIED, gated=True)


def run_of(row: dict[str, str], **changes: str) -> Run:
    return Run("runs.csv", 2, {**row, **changes})


def file_of(path: Path, *rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    found = io.StringIO()
    writer = csv.DictWriter(found, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(found.getvalue(), encoding="utf-8")
    return path


# Against the planner


def small_job(dims: ModelDims, degrees: Degrees, pipeline: int, samples: int) -> Job:
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=8, device="A100-SXM-80GB", intra_link="NVLink3")
    return Job(dims, "bfloat16", None, cluster, AUTOPAR, degrees, pipeline, 1, samples, 64)


def planned_seconds(job: Job) -> float:
    """Of the planner's plan with the same degrees."""
    assert isinstance(job.dims, ModelDims)
    with torch.device("meta"):
        model = Decoder(job.dims, job.dims.n_layers).train()
        tokens = torch.empty(job.global_batch, job.dims.seq_len, dtype=torch.long)
    graph = trace(model, {"tokens": tokens, "labels": tokens.clone()}, precision=Precision("bfloat16")).graph
    degrees = job.degrees
    forced = Parallelism(
        data=degrees.data, tensor=degrees.tensor, zero=degrees.zero, pipeline=job.pipeline, recompute=degrees.recompute,
        schedule=None if job.pipeline == 1 else "1f1b", micro_batch_size=int(job.samples or 1) * degrees.data,
    )  # fmt: skip
    report = plan_graph(graph, job.cluster, PlanOptions(parallelism=forced)).report()
    return float(report["predicted"]["step_seconds"])


# On data ranks the two have the same choices. On tensor ranks the planner may split more than Megatron-LM does.
@pytest.mark.parametrize(
    ("dims", "degrees", "pipeline", "tolerance"),
    [
        (TIED, Degrees(8, 1, 0, "none", False), 1, 1e-9),
        (TIED, Degrees(8, 1, 1, "selective", False), 1, 1e-9),
        (TIED, Degrees(8, 1, 3, "full", False), 1, 1e-9),
        (GATED, Degrees(4, 2, 0, "none", True), 1, 0.02),
        (TIED, Degrees(4, 1, 0, "full", False), 2, 1e-9),
    ],
)
def test_prediction_is_the_planners(dims: ModelDims, degrees: Degrees, pipeline: int, tolerance: float) -> None:
    job = small_job(dims, degrees, pipeline, 4)
    assert Predictor().predict(job).seconds == pytest.approx(planned_seconds(job), rel=tolerance)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 17, 40])
def test_long_pipelines_repeat_their_rounds(count: int) -> None:
    times = [StageTimes(1.0, 1.5, 0.5, 0.2), StageTimes(0.8, 1.0, 0.7, 0.1), StageTimes(1.1, 2.0, 0.5, 0.3)]
    hops = Hops((0.1, 0.2), (0.1, 0.2))
    schedule = schedule_of(3, 1, count)
    whole = step_seconds_only(schedule, times, hops, 3, count)
    assert step_seconds(schedule, times, hops, 3, count) == pytest.approx(whole, rel=1e-12)


def test_ends_count_as_a_layer_each_where_layers_do_not_divide() -> None:
    assert layers_of(12, 4) == [3, 3, 3, 3]
    assert layers_of(106, 12) == [8, *[9] * 10, 8]  # as BigScience cut its 106 layers
    assert sum(layers_of(31, 7)) == 31


# Against what was published


@pytest.mark.parametrize("row", [VTRAIN, BLOOM, SELECTIVE, MPT], ids=["vTrain", "BLOOM", "selective", "MPT"])
def test_published_runs_are_predicted(row: dict[str, str]) -> None:
    (found,) = outcomes([run_of(row)])
    assert found.error is not None, found.reason
    assert abs(found.error) < 0.15
    if found.measured_bytes is not None:
        assert found.memory_error is not None
        assert abs(found.memory_error) < 0.12
    assert found.runs_out is False


def test_what_does_not_fit_is_foreseen() -> None:
    run = run_of(
        BLOOM, tp="8", pp="1", dp="48", micro_batch="1", global_batch="2016", status="OOM", iteration_time_s=""
    )
    (found,) = outcomes([run])
    assert found.runs_out
    assert found.measured_seconds is None
    assert figures([found])["oom_foreseen"] == 1.0


def test_the_best_micro_batch_is_taken_where_none_is_given() -> None:
    row = {**SELECTIVE, "source": "Megatron-LM SC21 Table 1", "micro_batch": "", "vpp": "", "n_layers": "16", "pp": "2"}
    job = job_of(run_of(row, n_gpus="16"))
    assert (job.samples, job.chunks) == (None, None)
    best = Predictor().predict(job)
    each = [Predictor().predict(replace(job, samples=float(samples), chunks=1)).seconds for samples in (1, 2)]
    assert best.seconds <= min(each)
    (found,) = outcomes([run_of(row, n_gpus="16")])
    assert found.assumed is not None
    assert "micro-batch" in found.assumed


# What a stack does otherwise


def alpa_job(zero: int, recompute: str = "full", compute: str = "float16", last_axis: LastAxis = "forced") -> Job:
    job = small_job(TIED, Degrees(4, 1, zero, recompute, False, last_axis), 1, 2)
    return replace(job, stack=ALPA, compute=compute, global_batch=8)


def parts_of(job: Job) -> Part:
    (stage,) = stages_of(Predictor().laid(job, 2), job, 1)
    return stage


def test_gradients_reduced_together_are_kept_whole() -> None:
    job = alpa_job(2)
    stage, scattered = parts_of(job), replace(job, stack=replace(ALPA, whole_gradients=False))
    assert gradient_bytes(stage, job) == pytest.approx(4 * gradient_bytes(stage, scattered), rel=0.05)  # small ones rest whole
    assert Predictor().predict(job).memory_bytes > Predictor().predict(scattered).memory_bytes


@pytest.mark.parametrize(("recompute", "gathers"), [("selective", 1), ("full", 2)])
def test_a_compiled_step_gathers_again_only_what_is_computed_again(recompute: str, gathers: int) -> None:
    job = alpa_job(3, recompute)
    stage = parts_of(job)
    none = replace(stage, gathers=(), gathers_again=(), reductions=())
    sent = stage_times(stage, 4, job).whole_seconds - stage_times(none, 4, job).whole_seconds
    traffic = (stage.gathers, stage.gathers_again, stage.reductions)
    once, again, reduced = (sum(one.flat_seconds for one in some) for some in traffic)
    assert sent == pytest.approx(once + (gathers - 1) * again + reduced / 2)  # gradients travel in half precision


def test_parameters_rest_as_the_stack_has_them() -> None:
    halves = alpa_job(3)
    stage = parts_of(halves)
    assert resting_bytes(stage, halves) == pytest.approx(1.5 * stage.parameter_bytes)  # masters, and half copies beside
    whole = alpa_job(2, compute="float32")
    stage = parts_of(whole)
    assert resting_bytes(stage, whole) == pytest.approx(4 * stage.parameter_bytes, rel=0.05)  # one copy, whole
    assert resting_bytes(stage, replace(whole, stack=AUTOPAR)) == pytest.approx(5 * stage.parameter_bytes, rel=0.05)


def test_the_last_axis_may_be_left_to_the_solver() -> None:
    ways: tuple[LastAxis, ...] = ("forced", "free", "longest")
    jobs = [replace(alpa_job(2, "none", last_axis=way), stack=AUTOPAR) for way in ways]  # as the solver prices it
    forced, free, longest = (Predictor().predict(job).seconds for job in jobs)
    assert free <= min(forced, longest) * (1 + 1e-9)
    whole, _, split = (parts_of(job).used_bytes for job in jobs)
    assert split == pytest.approx(whole / 4, rel=0.01)  # every matrix is used in quarters


def test_software_follows_from_source_and_notes() -> None:
    assert stack_of("torchtitan benchmarks 2024-12").fused_loss is False
    assert stack_of("torchtitan community H200 2025-06").fused_loss is True
    assert stack_of("Alpa OSDI22 artifact").name == "Alpa"
    assert stack_of("Alpa OSDI22 artifact", "method megatron; best grid").name == "Megatron-LM"


# Rows


@pytest.mark.parametrize(
    ("changes", "last_axis", "zero"),
    [
        ({"notes": "method auto_sharding", "dp": "4", "tp": "2"}, "forced", 2),  # a plain transformer with degrees
        ({"notes": "method auto_sharding", "dp": "", "tp": ""}, "free", 2),
        ({"notes": "method parax.auto_sharding", "n_experts": "8", "tp": "", "dp": ""}, "free", 2),
        ({"notes": "method heuristic", "dp": "", "tp": ""}, "longest", 2),
        ({"notes": "method heuristic", "n_gpus": "1", "dp": "", "tp": ""}, "forced", 2),
        ({"notes": "method zero_3", "zero_stage": "3"}, "forced", 3),
    ],
)
def test_a_solvers_rows_are_laid_out_by_one(changes: dict[str, str], last_axis: str, zero: int) -> None:
    row = {**VTRAIN, "source": "Alpa ablation", "micro_batch": "32", "global_batch": "32", "zero_stage": "", **changes}
    job = job_of(run_of(row))
    assert (job.degrees.last_axis, job.degrees.zero) == (last_axis, zero)


def test_what_a_row_leaves_blank_is_read_where_its_source_says_it() -> None:
    row = {"source": "Alpa weak scaling 2021-10", "model": "GPT", "n_gpus": "4", "heads": "64"}
    found = completed(run_of({}, **row))
    assert (found.count("hidden"), found.count("global_batch"), found.count("heads")) == (4096, 8, 64)
    assert completed(run_of(VTRAIN)) == run_of(VTRAIN)
    assert completed(run_of(VTRAIN)).cells == run_of(VTRAIN).cells


def test_measured_seconds_say_where_they_come_from() -> None:
    assert run_of(VTRAIN).measured() == (0.552215, "iteration_time_s")
    tokens = run_of(MPT, iteration_time_s="", tokens_per_s_per_gpu="4791.6").measured()
    assert tokens == (pytest.approx(16 * 2048 / (4791.6 * 8)), "tokens_per_s_per_gpu")
    rate = run_of(BLOOM, iteration_time_s="").measured()  # the authors' TFLOP/s and seconds agree
    assert rate == (pytest.approx(111.89, rel=0.01), "tflops_per_gpu (F_SC21 with 96)")
    assert run_of(VTRAIN, status="OOM").measured() is None
    assert run_of(VTRAIN, status="analytic").measured() is None


def test_degrees_are_derived_where_one_number_fits() -> None:
    job = job_of(run_of(BLOOM, dp=""))
    assert (job.degrees.data, job.degrees.tensor, job.pipeline) == (8, 4, 12)
    assert job_of(run_of(VTRAIN, tp="", pp="", dp="", n_gpus="1")).degrees.data == 1
    assert job_of(run_of(MPT)).degrees.zero == 3


def test_micro_batches_of_all_ranks_together_are_divided() -> None:
    assert job_of(run_of(VTRAIN, micro_batch="128")).samples == 16
    assert job_of(run_of(VTRAIN, micro_batch="64.0", notes="whole mesh, before dp split")).samples == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": "7"}, "product does not make n_gpus=8"),
        ({"tp": "", "dp": ""}, "may be divided in several ways"),
        ({"heads": ""}, "heads blank"),
        ({"cp": "2", "dp": "4"}, "context parallelism"),
        ({"precision": "int4"}, "precision"),
        ({"n_experts": "8"}, "mixture of experts"),
        ({"model": "wresnet", "hidden": "1024"}, "Wide-ResNet"),
        ({"pp": "3 uneven"}, "uneven"),
        ({"status": "figure-percent"}, "nobody ran it"),
        ({"hidden": "2049"}, "heads must divide"),
        ({"pp": "16", "dp": "1", "n_gpus": "16"}, "more stages than the model's 12 layers"),
        ({"pp": "2", "dp": "4", "vpp": "3", "global_batch": "160"}, "suits the schedule"),
    ],
)
def test_rows_that_cannot_be_modelled_say_why(changes: dict[str, str], words: str) -> None:
    (found,) = outcomes([run_of(VTRAIN, **changes)])
    assert found.reason is not None
    assert words in found.reason
    assert found.predicted_seconds is None
    assert words in text([found])


def test_unknown_devices_are_named() -> None:
    with pytest.raises(ClusterError, match="unknown device 'X100'"):
        job_of(run_of(VTRAIN, gpu_type="X100"))
    with pytest.raises(NotModelled, match="no such peak"):
        Predictor().predict(job_of(run_of(VTRAIN, precision="fp8")))


def test_links_are_read_from_words() -> None:
    link = job_of(run_of(BLOOM)).cluster.inter_link
    assert (link.bandwidth_bytes_per_second, link.ports_per_node) == (12.5e9, 4)
    whole = job_of(run_of(MPT, n_gpus="16", dp="16", inter_link="1600 Gb/s RoCE per node")).cluster.inter_link
    assert whole.bandwidth_bytes_per_second * whole.ports(8) == pytest.approx(200e9)
    each = job_of(run_of(MPT, n_gpus="16", dp="16", inter_link="400 Gb/s RDMA per GPU")).cluster.inter_link
    assert each.bandwidth_bytes_per_second * each.ports(8) == pytest.approx(400e9)


# Files


def test_faults_of_a_file_stop(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="check the path"):
        read_runs(tmp_path / "none.csv")
    missing = file_of(tmp_path / "missing.csv", VTRAIN, columns=tuple(c for c in COLUMNS if c != "n_gpus"))
    with pytest.raises(InputError, match="lacks the columns n_gpus"):
        read_runs(missing)
    with pytest.raises(InputError, match="no rows"):
        read_runs(file_of(tmp_path / "empty.csv"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_runs(tmp_path / "binary.csv")


def test_faults_of_a_row_are_named(tmp_path: Path) -> None:
    path = file_of(tmp_path / "runs.csv", {**VTRAIN, "tp": "-1"}, {**VTRAIN, "n_gpus": "8.x"}, VTRAIN)
    path.write_text(path.read_text(encoding="utf-8") + "vTrain,cut short\n", encoding="utf-8")
    found = validate([str(path)])
    reasons = [outcome.reason for outcome in found]
    assert reasons[2] is None
    assert reasons[0] is not None
    assert "tp is '-1'" in reasons[0]
    assert reasons[1] is not None
    assert "n_gpus is '8.x'" in reasons[1]
    assert reasons[3] is not None
    assert "fewer cells" in reasons[3]
    assert "3 of 4 rows are not modelled" in text(found)


def test_the_command_prints_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [file_of(tmp_path / "a.csv", VTRAIN, {**VTRAIN, "cp": "2", "dp": "4"}), file_of(tmp_path / "b.csv", MPT)]
    out = tmp_path / "out.json"
    arguments = ["validate", *(word for path in paths for word in ("--runs", str(path)))]
    assert main([*arguments, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--json", str(out)]) == 0
    assert "1 of 3 rows are not modelled" in capsys.readouterr().out
    assert json.loads(out.read_text(encoding="utf-8")) == found
    first = found["sources"][0]
    assert {"source", "rows", "mape", "median_ape", "p95_ape", "kendall_tau", "memory_rows", "memory_median_ape"} < set(
        first
    )
    assert (first["rows"], first["not_modelled_rows"], first["timed_rows"]) == (2, 1, 1)
    assert first["mape"] == pytest.approx(abs(found["runs"][0]["predicted_seconds"] / 0.552215 - 1))
    assert first["kendall_tau"] is None
    assert [run["row"] for run in found["runs"]] == [2, 3, 2]
    assert found["runs"][1]["predicted_seconds"] is None
    assert main(["validate", "--runs", str(tmp_path / "none.csv")]) == 1
    assert "check the path" in capsys.readouterr().err


# Statistics


def outcome(measured: float, predicted: float, plan: str, **cells: str) -> Outcome:
    run = run_of(VTRAIN, **cells)
    return Outcome(run, True, measured, "iteration_time_s", predicted, predicted * 2**30, 2.5 * 2**30, plan)


def test_tau_counts_pairs_of_like_runs() -> None:
    rows = [outcome(1, 1, "a"), outcome(2, 3, "b"), outcome(3, 2, "c")]
    assert kendall_tau(rows) == pytest.approx(1 / 3)  # two pairs agree, one does not
    assert kendall_tau([*rows, outcome(9, 1, "a")]) == pytest.approx(-1 / 5)  # the pair of plan a is none
    assert kendall_tau([outcome(1, 1, "a"), outcome(2, 1, "b")]) == 0.0
    assert kendall_tau([outcome(1, 1, "a"), outcome(2, 3, "b", model="another")]) is None


def test_figures_are_fractions() -> None:
    rows = [outcome(1, 1.1, "a", memory_gb="1"), outcome(2, 1.6, "b"), outcome(1, 4, "c", status="OOM")]
    rows.append(Outcome(run_of(VTRAIN), True, reason="no"))
    found = figures(rows)
    assert (found["rows"], found["timed_rows"], found["not_modelled_rows"]) == (4, 3, 1)
    assert found["median_ape"] == pytest.approx(0.2)
    assert found["memory_median_ape"] == pytest.approx(0.1)
    assert (found["oom_rows"], found["oom_foreseen"], found["oom_false_alarms"]) == (1, 1.0, 0.0)
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5


# The calibration half


def test_halves_follow_the_configuration() -> None:
    runs = [run_of(VTRAIN, global_batch=str(batch)) for batch in range(8, 400, 8)]
    halves = [is_calibration(run) for run in runs]
    assert 0.25 < sum(halves) / len(halves) < 0.75
    again = [
        is_calibration(replace(run, line=9, cells={**run.cells, "iteration_time_s": "7", "notes": "x"})) for run in runs
    ]
    assert again == halves  # what was measured does not matter
    assert "iteration_time_s" not in CONFIGURATION
    assert not any(is_calibration(run_of(SELECTIVE, global_batch=str(batch))) for batch in range(8, 200, 8))


def test_the_document_keeps_every_row() -> None:
    found = document([Outcome(run_of(VTRAIN), True, reason="no")])
    assert [run["reason"] for run in found["runs"]] == ["no"]  # type: ignore[attr-defined]
