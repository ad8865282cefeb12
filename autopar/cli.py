"""The command line: parse, call, print. What a command does is elsewhere.

``autopar plan | report | profile | run | verify | validate | demo``. Exit codes: 0 done, 1 something is wrong (one message
on stderr, no traceback; also when a comparison fails), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, InputError
from autopar.options import (
    CONTEXT_FORMS,
    EXPERT_FORMS,
    LOGITS,
    OFFLOADS,
    OPTIMIZERS,
    OUTPUTS,
    PRECISIONS,
    RECOMPUTATIONS,
    Parallelism,
    PlanOptions,
)
from cost_models import SCHEDULES, ClusterError, Profile

if TYPE_CHECKING:
    from autopar.plans import Plan
    from autopar.references import ModelSource
    from autopar.training import Trained

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Progress = Callable[[str], None]

CLUSTER_HELP = "a JSON file, local:4 (processes on this machine), or 8x8:H100-SXM (nodes x devices of a kind)"
PLAN_HELP = (
    "Find the best plan for training a model on a cluster and show its report. Nothing is run; no GPU is needed."
)
ZERO_HELP = "sharded on the data axis: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too"
OFFLOAD_HELP = "optimizer states kept and updated on the host: none, all, or what the search chooses (default none)"
ZERO_SIZE_HELP = "devices over which --zero shards; replicated over the others of the data axis (hybrid sharding)"
OUTPUTS_HELP = "which of the model's outputs the program gives; of the loss alone logits need not be whole (default all)"
LOGITS_HELP = "with --outputs loss: whole, or in chunks of rows, computed again in backward (default: the better)"
MICRO_BATCH_HELP = "samples that go through a stage at a time, over all of its devices"
PRECISION_HELP = (
    "model: the model's own types (default); bfloat16: computed in it, with float32 masters and gradient sums; autocast: "
    "as under torch.autocast to bfloat16"
)
MODEL_HELP = "package.module:function or file.py:function, which returns (model, example_inputs[, loss_fn])"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parsed = parser().parse_args(arguments)
    try:
        code: int = parsed.command(parsed)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads the output has seen enough, as with "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
        return 1
    except Exception as error:
        if not is_expected(error):
            raise
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 1


def is_expected(error: Exception) -> bool:
    """Whether an error is meant for the user: one of this package's own."""
    runtime = sys.modules.get("autopar.runtime.errors")  # loads torch, so it is not imported here
    own = (AutoparError, ClusterError) + ((runtime.ProgramError,) if runtime else ())
    return isinstance(error, own)


def parser() -> argparse.ArgumentParser:
    """The grammar of the command line."""
    from autopar import __version__

    top = argparse.ArgumentParser(
        prog="autopar",
        description="Plans parallel training of a PyTorch model on a cluster, explains the plan and runs it.",
    )
    top.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_plan, _add_report, _add_profile, _add_run, _add_verify, _add_validate, _add_demo):
        add(commands)
    return top


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser("plan", help="find the best plan for a model on a cluster", description=PLAN_HELP)
    plan.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    plan.add_argument("--out", metavar="PLAN.json", help="write the plan to this file")
    plan.add_argument("--json", action="store_true", help="print the report as JSON")
    _add_planning(plan, "local:4")
    _add_profile_option(plan)
    plan.set_defaults(command=plan_command)


def _add_report(commands: Commands) -> None:
    report = commands.add_parser(
        "report", help="show the report of a plan", description="Show what a plan does and costs."
    )
    report.add_argument("plan", metavar="PLAN.json", nargs="?", help="a plan written by 'autopar plan --out'")
    report.add_argument("--json", action="store_true", help="print the report as JSON")
    report.add_argument("--schema", action="store_true", help="print the JSON Schema of reports instead")
    report.set_defaults(command=report_command)


def _add_profile(commands: Commands) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure what plans cost on this machine",
        description="Measure the operators, collectives and optimizer steps that the plans of a model need. Started by "
        "torchrun it is one of the processes; otherwise it starts them on this machine.",
    )
    profile.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    profile.add_argument(
        "--out",
        metavar="PROFILE.json",
        default="profile.json",
        help="the profile; what it has already is not measured again (default profile.json)",
    )
    profile.add_argument(
        "--budget", type=float, default=120.0, metavar="SECONDS", help="for all measurements (default 120)"
    )
    profile.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="of one collective (default 60)"
    )
    _add_planning(profile, "local:2")
    profile.set_defaults(command=profile_command)


def _add_run(commands: Commands) -> None:
    run = commands.add_parser(
        "run",
        help="train some steps",
        description="Train a model on its example batch and compare measured with predicted seconds. Started by torchrun "
        "it is one of the processes; otherwise it starts them on this machine.",
    )
    run.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    run.add_argument("plan", metavar="PLAN.json", nargs="?", help="the plan to run; without it the model is planned")
    run.add_argument("--steps", type=_positive, default=10, metavar="N", help="steps to train (default 10)")
    run.add_argument("--learning-rate", type=float, default=1e-3, metavar="RATE", help="of AdamW (default 1e-3)")
    run.add_argument("--out", metavar="RUN.json", help="write what was predicted beside what was measured")
    run.add_argument(
        "--update", metavar="PROFILE.json", help="have this profile learn from the difference, for later predictions"
    )
    _add_planning(run, "local:2")
    _add_profile_option(run)
    run.set_defaults(command=run_command)


def _add_verify(commands: Commands) -> None:
    verify = commands.add_parser(
        "verify",
        help="compare a plan's program with the plain model",
        description="Run the program on simulated ranks in float64 and compare loss, outputs, gradients, parameters after a "
        "step, and the bytes sent.",
    )
    verify.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    verify.add_argument(
        "plan", metavar="PLAN.json", nargs="?", help="the plan to verify; without it the model is planned"
    )
    verify.add_argument("--processes", action="store_true", help="use real processes (gloo) instead of simulated ranks")
    _add_planning(verify, "local:4")
    _add_profile_option(verify)
    verify.set_defaults(command=verify_command)


def _add_validate(commands: Commands) -> None:
    validate = commands.add_parser(
        "validate",
        help="predict published runs",
        description="Predict runs that others published and compare with what they measured. No GPU is needed.",
    )
    validate.add_argument(
        "--runs", metavar="FILE.csv", action="append", required=True, help="a file of runs; may be repeated"
    )
    validate.add_argument(
        "--json", metavar="OUT", help="write the figures and every run as JSON; - for standard output alone"
    )
    validate.add_argument(
        "--held-out", action="store_true", help="only rows that the cost models' constants were not fitted on"
    )
    validate.set_defaults(command=validate_command)


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="plan and train a small GPT-2 on this machine",
        description="Plan a small GPT-2 for processes on this machine, train it, and compare the loss of every step with the "
        "same training in one process. Needs transformers.",
    )
    demo.add_argument("--devices", type=_positive, default=4, metavar="N", help="processes (default 4)")
    demo.add_argument("--steps", type=_positive, default=20, metavar="N", help="steps to train (default 20)")
    demo.set_defaults(command=demo_command)


def _add_planning(command: argparse.ArgumentParser, cluster: str) -> None:
    """What every command that plans can be told."""
    command.add_argument("--cluster", metavar="CLUSTER", default=cluster, help=f"{CLUSTER_HELP} (default {cluster})")
    forced = command.add_argument_group("forced choices (what is left out is searched)")
    forced.add_argument("--data", type=_positive, metavar="N", help="devices that share the batch")
    forced.add_argument("--tensor", type=_positive, metavar="N", help="devices that share the operators")
    forced.add_argument("--context", type=_positive, metavar="N", help="devices that share the sequence")
    forced.add_argument("--context-form", choices=CONTEXT_FORMS, help="attention of a shared sequence (default: the cheaper)")
    forced.add_argument("--spatial", type=_positive, metavar="N", help="devices that share the space of convolutions")
    forced.add_argument("--expert", type=_positive, metavar="N", help="devices that share the experts of mixtures")
    forced.add_argument("--expert-form", choices=EXPERT_FORMS, help="how tokens come to experts (default: the cheaper)")
    forced.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help=ZERO_HELP)
    forced.add_argument("--zero-size", type=_positive, metavar="N", help=ZERO_SIZE_HELP)
    forced.add_argument("--logits", choices=LOGITS, help=LOGITS_HELP)
    forced.add_argument("--mesh-shape", metavar="4x2", help="the mesh of a stage, instead of every factorisation")
    forced.add_argument("--pipeline", type=_positive, metavar="N", help="pipeline ranks, which share the layers")
    forced.add_argument("--schedule", choices=SCHEDULES, help="the order in which pipeline ranks work")
    forced.add_argument("--micro-batch-size", type=_positive, metavar="N", help=MICRO_BATCH_HELP)
    forced.add_argument("--recompute", choices=RECOMPUTATIONS, help="what every block computes again in backward")
    options = command.add_argument_group("options")
    options.add_argument(
        "--max-mesh-axes", type=_positive, default=2, metavar="N", help="most axes of a searched mesh (default 2)"
    )
    options.add_argument(
        "--memory-margin",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="share of the memory kept free (default 0.05)",
    )
    options.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="whose states count (default adamw)")
    options.add_argument("--offload", choices=OFFLOADS, default="none", help=OFFLOAD_HELP)
    options.add_argument("--outputs", choices=OUTPUTS, default="all", help=OUTPUTS_HELP)
    options.add_argument("--precision", choices=tuple(PRECISIONS), default="model", help=PRECISION_HELP)
    options.add_argument("--time-limit", type=float, metavar="SECONDS", help="end the search with the best found")


def _add_profile_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profile", metavar="PROFILE.json", help="costs that 'autopar profile' measured on the cluster"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _options(parsed: argparse.Namespace) -> PlanOptions:
    from autopar.references import read_shape

    return PlanOptions(
        parallelism=Parallelism(
            data=parsed.data,
            tensor=parsed.tensor,
            context=parsed.context,
            context_form=parsed.context_form,
            spatial=parsed.spatial,
            expert=parsed.expert,
            expert_form=parsed.expert_form,
            zero=parsed.zero,
            zero_size=parsed.zero_size,
            logits=parsed.logits,
            pipeline=parsed.pipeline,
            recompute=parsed.recompute,
            schedule=parsed.schedule,
            micro_batch_size=parsed.micro_batch_size,
        ),
        optimizer=parsed.optimizer,
        memory_margin=parsed.memory_margin,
        max_mesh_axes=parsed.max_mesh_axes,
        mesh_shape=read_shape(parsed.mesh_shape) if parsed.mesh_shape else None,
        time_limit_seconds=parsed.time_limit,
        precision=parsed.precision,
        offload=parsed.offload,
        outputs=parsed.outputs,
    )


@contextmanager
def progress() -> Iterator[Progress]:
    """Tells on stderr what is being done: a line that changes on a terminal, plain lines otherwise."""
    if not sys.stderr.isatty():
        yield lambda message: print(message, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


def _planned(parsed: argparse.Namespace, source: ModelSource) -> Plan:
    from autopar.planner import plan
    from autopar.references import load_cluster

    options, cluster = _options(parsed), load_cluster(parsed.cluster)
    with progress() as say:
        say("tracing the model")
        return plan(
            source.model,
            cluster,
            source.example_inputs,
            options=options,
            loss_fn=source.loss_fn,
            profile=parsed.profile,
            progress=say,
        )


def _given_plan(parsed: argparse.Namespace, source: ModelSource) -> Plan:
    from autopar.plans import Plan

    return Plan.load(parsed.plan) if parsed.plan else _planned(parsed, source)


def _show(report: dict[str, Any], as_json: bool) -> None:
    from autopar.report import text

    print(json.dumps(report, indent=1, allow_nan=False) if as_json else text(report))


def plan_command(parsed: argparse.Namespace) -> int:
    """``autopar plan``."""
    from autopar.references import load_model

    found = _planned(parsed, load_model(parsed.model))
    _show(found.report(), parsed.json)
    if parsed.out:
        found.save(parsed.out)
        print(f"\nwritten to {parsed.out}", file=sys.stderr if parsed.json else sys.stdout)
    return 0


def report_command(parsed: argparse.Namespace) -> int:
    """``autopar report``."""
    from autopar.plans import Plan
    from autopar.report import SCHEMA

    if parsed.schema:
        print(json.dumps(SCHEMA, indent=1))
        return 0
    if not parsed.plan:
        print("autopar report: give PLAN.json, or --schema", file=sys.stderr)
        return 2
    _show(Plan.load(parsed.plan).report(), parsed.json)
    return 0


def profile_command(parsed: argparse.Namespace) -> int:
    """``autopar profile``: one of torchrun's processes, or the parent that starts them."""
    from autopar.launching import own_rank
    from autopar.profiler import profile
    from autopar.references import load_cluster, load_model

    rank = own_rank()
    source = load_model(parsed.model)
    with progress() as say:
        found = profile(
            source.model,
            None if rank is not None and parsed.cluster.startswith("local") else load_cluster(parsed.cluster),
            source.example_inputs,
            path=parsed.out,
            options=_options(parsed),
            budget_seconds=parsed.budget,
            timeout_seconds=parsed.timeout,
            loss_fn=source.loss_fn,
            progress=say if rank is None or rank.is_first else None,
        )
    if rank is None or rank.is_first:
        print(f"{len(found.operators)} operators and {len(found.collectives)} kinds of collectives in {parsed.out}")
    return 0


def run_command(parsed: argparse.Namespace) -> int:
    """``autopar run``: one of torchrun's processes, or the parent that starts them."""
    from autopar.launching import own_rank
    from autopar.references import load_model

    rank = own_rank()
    source = load_model(parsed.model)
    if rank is None:
        from autopar.running import run_processes

        steps = ["--steps", str(parsed.steps), "--learning-rate", str(parsed.learning_rate)]
        for name in ("out", "update"):
            steps += [f"--{name}", getattr(parsed, name)] if getattr(parsed, name) else []
        return run_processes(parsed.model, _given_plan(parsed, source), steps)
    from autopar.report.units import seconds_text
    from autopar.running import run_rank

    def show(step: int, loss: float, seconds: float) -> None:
        if rank.is_first:
            print(f"step {step:4d}   loss {loss:.6f}   {seconds_text(seconds)}", flush=True)

    plan = _given_plan(parsed, source)
    trained = run_rank(source, plan, parsed.steps, parsed.learning_rate, show)
    if rank.is_first:
        _show_run(parsed, plan, trained)
    return 0


def _show_run(parsed: argparse.Namespace, plan: Plan, trained: Trained) -> None:
    """What was predicted beside what was measured, on standard output and where the user wants it."""
    from autopar.report.text import basis_words
    from autopar.report.units import seconds_text
    from autopar.running import comparison, fed_back

    found = comparison(plan, trained)
    measured, predicted = found["measured"], found["predicted"]
    basis = basis_words(plan.report()["predicted"]["basis"]["step_seconds"])
    print(f"step: predicted {seconds_text(predicted['step_seconds'])} ({basis}), measured ", end="")
    print(f"{seconds_text(measured['compared_seconds'])} and {seconds_text(measured['clip_seconds'])} for clipping")
    if parsed.out:
        _write(parsed.out, json.dumps(found, indent=1, allow_nan=False) + "\n")
    if parsed.update:
        updated = fed_back(Profile.load(parsed.update), plan, trained)
        updated.save(parsed.update)
        print(f"{parsed.update}: later predictions are corrected by {updated.correction:.3f}")


def verify_command(parsed: argparse.Namespace) -> int:
    """``autopar verify``."""
    from autopar.references import load_model
    from autopar.verifier import verify

    source = load_model(parsed.model)
    plan = _given_plan(parsed, source)
    with progress() as say:
        say(f"running {plan.num_devices} ranks in float64")
        found = verify(
            source.model,
            plan,
            source.example_inputs,
            loss_fn=source.loss_fn,
            processes=parsed.processes,
            count_collectives=True,
        )
    print(found)
    return 0 if found.passed else 1


def validate_command(parsed: argparse.Namespace) -> int:
    """``autopar validate``."""
    from autopar.validation import document, text, validate

    with progress() as say:
        found = validate(parsed.runs, parsed.held_out, say)
    as_json = json.dumps(document(found), indent=1, allow_nan=False) if parsed.json else ""
    if parsed.json == "-":
        print(as_json)
        return 0
    if parsed.json:
        _write(parsed.json, as_json + "\n")
    print(text(found))
    return 0


def _write(path: str, content: str) -> None:
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path!r}: {error.strerror}; choose another path") from error


def demo_command(parsed: argparse.Namespace) -> int:
    """``autopar demo``."""
    from autopar.demo import TOLERANCE, plan_demo, train_demo
    from autopar.report.units import seconds_text

    with progress() as say:
        say(f"planning GPT-2 for {parsed.devices} processes on this machine")
        chosen = plan_demo(parsed.devices, say)
    _show(chosen.report(), as_json=False)
    with progress() as say:
        found = train_demo(chosen, parsed.steps, say)
    print("\nstep   parallel loss   one process   difference")
    for step, (ours, theirs) in enumerate(zip(found.parallel.losses, found.plain.losses, strict=True)):
        print(f"{step:4d}   {ours:13.6f}   {theirs:11.6f}   {abs(ours - theirs) / abs(theirs):10.1e}")
    predicted = chosen.report()["predicted"]["step_seconds"]
    print(
        f"\nstep: predicted {seconds_text(predicted)}, measured {seconds_text(found.parallel.typical_seconds)} in "
        f"{parsed.devices} processes; {seconds_text(found.plain.typical_seconds)} in one process (a thread each)"
    )
    print(f"largest difference of the loss at any step: {found.largest_difference:.1e} (allowed {TOLERANCE:.0e})")
    return 0 if found.passed else 1
