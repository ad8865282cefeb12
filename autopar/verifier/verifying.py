"""verify(): the program of a plan against the plain model, in float64, on simulated ranks or real processes.

Compared are the loss, every output, every gradient, every parameter after one step of AdamW and every buffer, on every
rank, piece by piece where each piece lies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.codegen import generate, ledger
from autopar.codegen.inputs import input_names
from autopar.codegen.ledger import totals
from autopar.errors import InputError
from autopar.graph import OpGraph
from autopar.initial import materialized
from autopar.plans import Plan, check_fingerprint
from autopar.randomness import uncounted_operators
from autopar.tracing import Traced, trace
from autopar.tracing.capture import find_loss
from autopar.tracing.examples import named_leaves
from autopar.verifier.double import InDouble, default_dtype, in_double, wide_type
from autopar.verifier.dropping import SameDropout
from autopar.verifier.outcome import Expected, Verification, adamw_epsilon, differences, measures
from autopar.verifier.trial import Trial, TrialResult, run_in_processes, run_in_threads


def verify(
    model: nn.Module,
    plan: Plan | str | Path,
    example_inputs: Any = None,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    processes: bool = False,
    learning_rate: float = 1e-3,
    epsilon: float | None = None,
    tolerance: float = 1e-10,
    count_collectives: bool = False,
    seed: int = 0,
    timeout_seconds: float = 600.0,
) -> Verification:
    """Run the program of ``plan`` and the plain ``model`` on the same batch and compare everything that training
    depends on.

    ``example_inputs``, ``batch_dims``, ``loss_fn``: as given to :func:`autopar.plan`; the inputs must have values.
    The ranks are threads of this process, or with ``processes`` processes of their own over gloo. A model on meta is
    given random values from ``seed``. ``count_collectives`` also compares what the first rank (of each pipeline rank)
    sends, kind by kind and byte by byte, with what the plan says. The model is left as it is. Under a precision policy the
    program that runs has the policy's masters, working copies and casts, all of them in float64.

    Errors are relative: to the largest gradient of the model, to the loss, to the largest value of an output or
    buffer (of a running statistic at least 1e-3 of the model's largest one; all within ``tolerance``), and for a parameter
    after a step of AdamW to the larger of itself and ``learning_rate`` (within 1e-8). ``epsilon`` is AdamW's; by default
    1% of the model's largest gradient, so that what rounding leaves of a gradient of exactly zero (a bias before a batch
    norm) does not become a whole step.

    Raises InputError for a model with random operators or without a loss, PlanFileError for a plan of another model,
    and what the program itself raises. Inequality is no error: see :meth:`Verification.require`.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    traced = trace(
        model, example_inputs, batch_dims=batch_dims, loss_fn=loss_fn, precision=plan.precision, outputs=plan.outputs
    )
    return verify_traced(
        model,
        traced,
        plan,
        loss_fn=loss_fn,
        processes=processes,
        learning_rate=learning_rate,
        epsilon=epsilon,
        tolerance=tolerance,
        count_collectives=count_collectives,
        seed=seed,
        timeout_seconds=timeout_seconds,
    )


def verify_traced(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    processes: bool = False,
    learning_rate: float = 1e-3,
    epsilon: float | None = None,
    tolerance: float = 1e-10,
    count_collectives: bool = False,
    seed: int = 0,
    timeout_seconds: float = 600.0,
) -> Verification:
    """:func:`verify` of a model that is traced already, on the inputs of its trace: for several plans of one model."""
    _check(traced, plan)
    graph = in_double(traced.graph)
    plan = replace(plan, graph_fingerprint=graph.fingerprint)
    real = materialized(model, seed) if any(t.is_meta for t in (*model.parameters(), *model.buffers())) else model
    plain = copy.deepcopy(real).to("cpu")._apply(lambda tensor: tensor.to(wide_type(tensor.dtype)))
    inputs = [_input(leaf.value) for leaf in traced.example.tensors]
    state = {name: _state(plain, name) for name in _state_names(graph)}
    source = generate(plan, graph)
    run = run_in_processes if processes else run_in_threads
    mode = InDouble(torch.get_default_dtype())
    with default_dtype(torch.float64):
        expected = _run_plain(plain, traced, inputs, loss_fn, (learning_rate, epsilon), mode)
        trial = Trial(
            source=source,
            state=state,
            inputs=dict(zip(input_names(graph), _used(traced, inputs), strict=True)),
            learning_rate=learning_rate,
            epsilon=expected.epsilon,
        )
        results = run(trial, plan.num_devices, timeout_seconds)
    return Verification(
        model=graph.model,
        mesh=_described(plan),
        measures=tuple(measures(expected, results, tolerance, learning_rate)),
        collectives=results[0].sent,
        differences=tuple(_differences(plan, graph, results)) if count_collectives else None,
    )


def _described(plan: Plan) -> str:
    """Stages, mesh and micro-batches in words."""
    stages = f"{len(plan.stages)} stages ({plan.schedule}) x " if len(plan.stages) > 1 else ""
    loop = f", {plan.num_micro_batches} micro-batches" if plan.num_micro_batches > 1 else ""
    return f"{stages}{plan.stages[0].mesh}{loop}"


def _differences(plan: Plan, graph: OpGraph, results: Sequence[TrialResult]) -> Iterator[str]:
    """Where what the first device of each pipeline rank has sent is not what the plan says."""
    size = plan.stages[0].mesh.num_devices
    num_places = plan.num_devices // size
    order = plan.rank_order or tuple(range(plan.num_devices))
    for place in range(num_places):
        found = differences(results[order[place * size]].sent, totals(ledger(plan, graph, pipeline_rank=place)))
        yield from (f"pipeline rank {place}: {line}" if num_places > 1 else line for line in found)


def _check(traced: Traced, plan: Plan) -> None:
    graph = traced.graph
    check_fingerprint(plan, graph)
    if graph.loss is None:
        raise InputError(f"{graph.model} has no loss to verify: return one as .loss, or give loss_fn(outputs, inputs)")
    random = uncounted_operators(graph)
    if random:
        raise InputError(
            f"{graph.model} draws random numbers ({len(random)} operators, first {random[0]}), which differ from rank "
            "to rank: leave them out, or use model.eval() (plain dropout is verified, with the same numbers on both sides)"
        )
    for leaf in traced.example.tensors:
        if leaf.value.is_meta:
            raise InputError(f"input {leaf.path} is on the meta device: verify() needs example inputs with values")
    if not graph.values[graph.loss].requires_grad:
        raise InputError(
            f"the loss of {graph.model} depends on no trainable parameter: there is no gradient to verify; check "
            "requires_grad of the parameters, and that the loss is not detached"
        )


def _input(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to("cpu").clone()
    return copied.to(wide_type(copied.dtype))


def _used(traced: Traced, inputs: list[Tensor]) -> list[Tensor]:
    by_path = {leaf.path: tensor for leaf, tensor in zip(traced.example.tensors, inputs, strict=True)}
    return [by_path[entry.path] for entry in traced.graph.inputs]


def _state_names(graph: OpGraph) -> list[str]:
    return [*(parameter.name for parameter in graph.parameters), *(buffer.name for buffer in graph.buffers)]


def _state(model: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    tensor: Tensor | None = module._parameters.get(own)
    tensor = module._buffers.get(own) if tensor is None else tensor
    assert tensor is not None, f"the graph has {name}, the model does not"
    return tensor.detach().clone()


def _run_plain(
    model: nn.Module,
    traced: Traced,
    inputs: list[Tensor],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    step: tuple[float, float | None],
    mode: InDouble,
) -> Expected:
    """Forward, backward and a step of AdamW (learning rate, epsilon) in one process; changes ``model``."""
    graph, example = traced.graph, traced.example
    given = example.rebuild([tensor.clone() for tensor in inputs])
    args, kwargs = example.call(given)
    model.zero_grad()
    try:
        with torch.enable_grad(), mode, SameDropout(graph) as dropout:
            output = model(*args, **kwargs)
            leaves = dict(named_leaves(output))
            tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]
            loss = find_loss(output, tensors) if loss_fn is None else loss_fn(output, given)
            assert loss is not None, "the traced model has a loss, this one has none"
            loss.backward()
    except Exception as error:
        raise InputError(
            f"{graph.model} itself, without autopar, fails in float64 on these inputs: {type(error).__name__}: {error}; "
            "check their values, and that the model trains on one device"
        ) from error
    dropout.check(graph)
    loss_before = loss.detach().clone()  # a result may be a parameter, which the optimizer's step changes
    outputs = {entry.path: leaves[entry.path].detach().clone() for entry in graph.outputs}
    parameters = {entry.name: model.get_parameter(entry.name) for entry in graph.parameters}
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in parameters.items()
    }
    learning_rate, epsilon = step
    epsilon = adamw_epsilon(gradients.values()) if epsilon is None else epsilon
    torch.optim.AdamW(model.parameters(), lr=learning_rate, eps=epsilon).step()
    return Expected(
        loss=loss_before,
        outputs=outputs,
        gradients=gradients,
        parameters={name: parameter.detach() for name, parameter in parameters.items()},
        buffers={entry.name: _state(model, entry.name) for entry in graph.buffers},
        epsilon=epsilon,
        statistics=frozenset(entry.name for entry in graph.buffers if entry.updated),
    )
