"""parallelize(): a plain model becomes a :class:`Parallel` that trains on all processes that torchrun started.

Reads top to bottom as things happen: join the process group; every rank traces; rank 0 plans and sends the plan; every
rank writes and loads the same program; the model's values go to the program's pieces, one module or tensor at a time. A
failure on any rank is raised on every rank: nobody is left waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from autopar import errors
from autopar.codegen import generate
from autopar.detection import gathered_cluster
from autopar.errors import AutoparError, InputError
from autopar.graph import Input, OpGraph
from autopar.initial import initial_values, meta_modules
from autopar.options import PRECISIONS, PlanOptions, Precision
from autopar.plans import Plan, check_fingerprint
from autopar.randomness import mode_dependent_operators
from autopar.ranks import Ranks, attempt, is_cpu, join_group
from autopar.runtime import Engine, ParameterSlot, load_program, saving
from autopar.runtime import ProgramError as RuntimeProgramError
from autopar.runtime.pieces import Slot
from autopar.runtime.spreading import Spreader
from autopar.tracing import Traced, trace
from autopar.tracing.examples import Example, named_leaves

if TYPE_CHECKING:
    from autopar.options import Parallelism
    from cost_models import Cluster, Profile

Result = TypeVar("Result")
Given = ParamSpec("Given")


class _ProgramError(errors.ProgramError, RuntimeProgramError):
    """An error of the runtime, which knows nothing else of autopar, as one of autopar's."""


def _with_our_errors(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, raising the runtime's errors as AutoparError."""

    @wraps(function)
    def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except RuntimeProgramError as error:
            if isinstance(error, AutoparError):
                raise
            raise _ProgramError(*error.args) from error

    return wrapped


@_with_our_errors
def parallelize(
    model: nn.Module,
    cluster: Cluster | None = None,
    example_inputs: Any = None,
    *,
    plan: Plan | str | Path | None = None,
    options: PlanOptions | None = None,
    parallelism: Parallelism | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    profile: Profile | str | Path | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Parallel:
    """Plan ``model`` for the processes that torchrun started (one without torchrun) and take over its values.

    All processes call this together with the same model and ``example_inputs`` (the *global* batch; only shapes and
    dtypes count). Rank 0 plans, or gives its ``plan`` (a Plan or the path of a plan.json). ``cluster`` may be left
    out: it is then what the processes find on their hosts. ``options``, ``parallelism``, ``batch_dims``, ``loss_fn``,
    ``profile``: as of :func:`autopar.plan`.

    Every rank gets the values that the model has on rank 0; only its own pieces are kept. Tensors on the meta device
    are initialised by the model's own code from ``seed``, the same for any plan, and the whole model is never on one
    rank. Dropout draws from ``seed``, the step and each element's place, the same numbers under any plan. The model
    itself is left as it is and may be deleted. ``device``: this rank's, by default its GPU where
    there is one, else the CPU.

    Raises the same error on every rank: InputError (devices, inputs, a tensor on meta that cannot be initialised),
    TraceError, InfeasibleError, PlanFileError.

    >>> parallel = autopar.parallelize(model, cluster, {"input_ids": ids, "labels": ids})
    >>> optimizer = torch.optim.AdamW(parallel.parameters())
    >>> loss = parallel.step(input_ids=ids, labels=ids)
    """
    if cluster is not None and not hasattr(cluster, "num_devices"):
        raise InputError(
            f"cluster= is a {type(cluster).__name__}: give an autopar.Cluster or None, and the batch as example_inputs="
        )
    own_device = join_group(device)
    ranks = Ranks()
    how = ranks.from_first(lambda: _how_traced(plan, options), _HowTraced.from_json)
    traced = ranks.together(
        lambda: trace(
            model, example_inputs, batch_dims=batch_dims, loss_fn=loss_fn, precision=how.precision, outputs=how.outputs
        )
    )
    ranks.same(traced.graph.fingerprint, "traced another model, or example inputs of other shapes")
    if ranks.gather(plan is None and cluster is None)[0]:
        cluster = gathered_cluster(ranks.gather, is_cpu(own_device))
    chosen = ranks.from_first(
        lambda: _plan(traced.graph, ranks.size, plan, cluster, options, parallelism, profile),
        Plan.from_json,
    )
    source = ranks.together(lambda: generate(chosen, traced.graph))
    ranks.same(source, "wrote another program for the same plan")
    engine = ranks.together(lambda: Engine(load_program(source), own_device, seed))
    _take_over(engine, model, seed, ranks)
    return Parallel(engine, chosen, traced, source)


class Parallel:
    """One rank's part of a parallel model. All ranks make it, and call its methods, together."""

    def __init__(self, engine: Engine, plan: Plan, traced: Traced, source: str) -> None:
        self.engine = engine
        self.plan = plan
        self.source = source
        self._traced = traced
        self._paths = [entry.path for entry in traced.graph.inputs]
        self._names = {path: given.name for path, given in zip(self._paths, engine.program.INPUTS, strict=True)}
        self._only_for_loss = _only_for_loss(traced.graph)

    # Running

    @_with_our_errors
    def step(self, *args: Any, local: bool = False, **inputs: Any) -> Tensor:
        """Forward and backward of one batch: adds to the gradients and returns the loss, detached, the same on every
        rank.

        Inputs as the model's forward takes them (and what ``loss_fn`` needs): the global batch, the same on every
        rank, or with ``local`` this rank's share of it, number ``data_rank`` of ``data_size``.
        """
        return self.engine.step(local=local, **self._bound(args, inputs))

    @_with_our_errors
    def __call__(self, *args: Any, local: bool = False, **inputs: Any) -> Any:
        """The model's output in its own structure, whole on every rank, without gradients. Inputs as of :meth:`step`;
        those that only ``loss_fn`` reads may be left out.

        An output that is the same whole on all ranks costs memory: for large logits prefer the loss of a step.
        """
        found = self.engine.forward(local=local, **self._bound(args, inputs, self._only_for_loss))
        graph = self._traced.graph
        values = {
            output.value: found["loss" if output.value == graph.loss else output.path] for output in graph.outputs
        }
        return self._traced.outputs(values)

    @property
    def num_steps(self) -> int:
        """Steps made so far, those before a loaded checkpoint too: with the seed, what dropout draws from."""
        return self.engine.num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self.engine.num_steps = number

    def _bound(
        self, args: Sequence[Any], inputs: Mapping[str, Any], optional: Collection[str] = ()
    ) -> dict[str, Tensor]:
        by_path = bind_inputs(self._traced.example, args, inputs, optional)
        missing = [entry for entry in self._traced.graph.inputs if entry.path not in by_path]
        if missing:
            by_path |= self._stand_ins(missing, by_path)
        return {self._names[path]: tensor for path, tensor in by_path.items() if path in self._names}

    def _stand_ins(self, missing: Sequence[Input], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zeros for inputs that are not needed, for as many samples as the others have."""
        examples = {leaf.path: leaf.value for leaf in self._traced.example.tensors}
        samples = [
            (given[entry.path].shape[entry.batch_dim], examples[entry.path].shape[entry.batch_dim])
            for entry in self._traced.graph.inputs
            if entry.path in given and entry.batch_dim is not None
        ]
        now, before = samples[0] if samples else (1, 1)
        found = {}
        for entry in missing:
            shape = list(examples[entry.path].shape)
            if entry.batch_dim is not None:
                shape[entry.batch_dim] = shape[entry.batch_dim] * now // before
            found[entry.path] = torch.zeros(shape, dtype=examples[entry.path].dtype)
        return found

    def train(self, mode: bool = True) -> Parallel:
        """Training mode, as :meth:`torch.nn.Module.train`. A program computes in the mode in which its model was
        traced."""
        graph = self._traced.graph
        differing = mode_dependent_operators(graph) if mode != graph.training else ()
        if differing:
            modes = ("training", "evaluation") if graph.training else ("evaluation", "training")
            call = "model.eval()" if graph.training else "model.train()"
            raise InputError(
                f"this program was made for {modes[0]} and {graph.model} computes other values in {modes[1]} "
                f"({', '.join(differing[:3])}): parallelize the model anew after {call}, and load a checkpoint there"
            )
        self.engine.train(mode)
        return self

    def eval(self) -> Parallel:
        """Evaluation mode; see :meth:`train`."""
        return self.train(False)

    # Parameters and gradients

    def parameters(self) -> Iterator[nn.Parameter]:
        """What an optimizer updates: this rank's pieces as DTensors, tied parameters once. Of a model in several
        pipeline stages: of the stages on this rank."""
        return self.engine.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the model's own names."""
        return self.engine.named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; ``set_to_none=False`` fills them with zeros instead."""
        if set_to_none:
            self.engine.zero_grad()
            return
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    @_with_our_errors
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` over the whole model; returns the norm before, the same on every
        rank."""
        return self.engine.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    # Checkpoints

    def _slots(self) -> list[Slot]:
        return [*self.engine.slots.values(), *self.engine.buffer_slots.values()]

    def _all_slots(self) -> list[Slot]:
        """Those of all pipeline ranks, parameters first."""
        found = list(self.engine.holdings.described.values())
        return sorted(found, key=lambda slot: not isinstance(slot, ParameterSlot))

    @_with_our_errors
    def state_dict(self) -> dict[str, Tensor]:
        """This rank's pieces by the model's names, for ``torch.distributed.checkpoint.save`` and ``load``."""
        return saving.state_dict(self._slots())

    @_with_our_errors
    def full_state_dict(self, all_ranks: bool = False) -> dict[str, Tensor]:
        """Whole tensors on the CPU for ``model.load_state_dict``: on rank 0 (elsewhere empty), or on all ranks."""
        holdings = self.engine.holdings
        owners = {name: holdings.owner(name) for name in holdings.described}
        return saving.full_state_dict(self._all_slots(), self.engine.mesh, all_ranks=all_ranks, owners=owners)

    @_with_our_errors
    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint of parameters, buffers, the optimizer's states and the number of steps made that any plan on
        any number of ranks can load."""
        saving.save(folder, self._slots(), self.engine.mesh, optimizer, self.num_steps)

    @_with_our_errors
    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read a checkpoint of the same model, whatever plan and number of ranks it was saved under."""
        num_steps = saving.load(folder, self._slots(), self.engine.mesh, optimizer)
        self.num_steps = self.num_steps if num_steps is None else num_steps

    # What it is

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank takes: ``rank`` of a ``DistributedSampler``."""
        return self.engine.data_rank

    @property
    def data_size(self) -> int:
        """Into how many shares the batch is cut: ``num_replicas`` of a ``DistributedSampler``."""
        return self.engine.data_size

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.engine.mesh.device

    def report(self) -> dict[str, Any]:
        """The plan's report."""
        return self.plan.report()

    def __repr__(self) -> str:
        return f"Parallel({self.plan.model} on {self.engine.mesh}, rank {self.engine.mesh.rank})"


# -- inputs -----------------------------------------------------------------------------------------------------------


def bind_inputs(
    example: Example, args: Sequence[Any], kwargs: Mapping[str, Any], optional: Collection[str] = ()
) -> dict[str, Tensor]:
    """Tensors by path. One dict or ``(args, kwargs)``-like tuple of the example's own form is taken apart; the paths
    ``optional`` may be missing.

    Raises :class:`InputError` for inputs that the example did not have, and for fixed ones (flags, None) with another
    value. Shapes are not looked at.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and _all_known(example, args[0]):
        args, kwargs = [], dict(args[0])
    known = {leaf.path: leaf for leaf in example.leaves}
    found: dict[str, Tensor] = {}
    for path, value in _leaves(example, args, kwargs):
        leaf = known.get(path)
        if leaf is None:
            if value is None:
                continue
            raise InputError(f"there is no input {path}: the example inputs had {', '.join(known)}")
        if leaf.is_tensor:
            if not isinstance(value, Tensor):
                raise InputError(f"input {path} must be a tensor, as in the example inputs, not {type(value).__name__}")
            found[path] = value
        elif isinstance(value, Tensor) or value != leaf.value:
            raise InputError(
                f"input {path} is fixed at {leaf.value!r}, as in the example inputs: parallelize anew for another one"
            )
    missing = [leaf.path for leaf in example.tensors if leaf.path not in found and leaf.path not in optional]
    if missing:
        raise InputError(f"missing inputs: {', '.join(missing)}; give all that the example inputs had")
    return found


def _only_for_loss(graph: OpGraph) -> frozenset[str]:
    """Paths of the inputs that lead to the loss alone, and not to anything that the model returns."""
    needed: set[str] = set()
    waiting = [output.value for output in graph.outputs]
    while waiting:
        value = waiting.pop()
        if value not in needed:
            needed.add(value)
            producer = graph.producer_of.get(value)
            waiting += producer.inputs if producer is not None else ()
    return frozenset(entry.path for entry in graph.inputs if entry.value not in needed)


def _all_known(example: Example, inputs: Mapping[str, Any]) -> bool:
    tops = {leaf.path.split("[")[0].split(".")[0] for leaf in example.leaves}
    return all(name in tops for name in inputs)


def _leaves(example: Example, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    names = example.parameter_names
    tops = [(names[at] if at < len(names) else f"args[{at}]", value) for at, value in enumerate(args)]
    twice = [name for name, _ in tops if name in kwargs]
    if twice:
        raise InputError(f"input {twice[0]} is given twice, by position and by name")
    tops += list(kwargs.items())
    return [leaf for name, value in tops for leaf in named_leaves(value, name)]


# -- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HowTraced:
    """The types in which the model is traced, and which of its outputs are wanted."""

    precision: Precision
    outputs: str

    def to_json(self) -> dict[str, Any]:
        return {"precision": self.precision.to_json(), "outputs": self.outputs}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> _HowTraced:
        return _HowTraced(Precision(**document["precision"]), document["outputs"])


def _how_traced(given: Plan | str | Path | None, options: PlanOptions | None) -> _HowTraced:
    """As the plan given says, or the options."""
    if given is not None:
        plan = given if isinstance(given, Plan) else Plan.load(given)
        return _HowTraced(plan.precision, plan.outputs)
    chosen = options or PlanOptions()
    return _HowTraced(PRECISIONS[chosen.precision], chosen.outputs)


def _plan(
    graph: OpGraph,
    num_ranks: int,
    given: Plan | str | Path | None,
    cluster: Cluster | None,
    options: PlanOptions | None,
    parallelism: Parallelism | None,
    profile: Profile | str | Path | None,
) -> Plan:
    """The plan given, checked, or a new one for as many devices as there are ranks."""
    if given is not None:
        if options is not None or parallelism is not None or profile is not None:
            raise InputError(
                "plan= is given together with options=, parallelism= or profile=, which are for making a plan: give one of "
                "them"
            )
        plan = given if isinstance(given, Plan) else Plan.load(given)
        check_fingerprint(plan, graph, "the plan given" if isinstance(given, Plan) else f"plan file {given}")
        _check_size("the plan", plan.num_devices, num_ranks)
        return plan
    from autopar.planner import (
        loaded_profile,
        merged_options,
        plan_graph,
    )  # the solver is loaded by the rank that plans, for a plan only

    assert cluster is not None, "without a plan there is a cluster"
    _check_size("the cluster", cluster.num_devices, num_ranks)
    measured = loaded_profile(profile, cluster)
    return plan_graph(graph, cluster, merged_options(options, parallelism), profile=measured)


def _check_size(what: str, num_devices: int, num_ranks: int) -> None:
    if num_devices != num_ranks:
        processes = f"there are {num_ranks} processes" if num_ranks > 1 else "there is one process"
        raise InputError(
            f"{what} has {num_devices} devices and {processes}: start with torchrun --nproc-per-node so that there "
            f"are {num_devices}, or plan for {num_ranks}"
        )


# -- the model's values ----------------------------------------------------------------------------------------------


def _take_over(engine: Engine, model: nn.Module, seed: int, ranks: Ranks) -> None:
    """Fill every slot: what rank 0 has, or for tensors that are on meta there, what one of the ranks initialises."""
    holdings = engine.holdings
    spreader = Spreader(holdings, engine.mesh)
    on_meta = [(path, names) for path, _, names in meta_modules(model)]
    on_meta = ranks.gather(on_meta)[0]
    failure: Exception | None = None
    done: set[str] = set()
    for at, (path, names) in enumerate(on_meta):
        owner = at % ranks.size
        values: dict[str, Tensor] = {}
        if ranks.rank == owner and failure is None:
            made, failure = attempt(partial(initial_values, model, path, names, seed))
            values = made or {}
        for name in names:
            own = holdings.name_of(f"{path}.{name}" if path else name)
            value = values.get(name)
            if ranks.rank == owner and value is None:  # it has failed: the others find out below
                value = torch.zeros(holdings.described[own].shape, dtype=holdings.described[own].dtype)
            spreader.spread(own, value, owner)
            done.add(own)
    ranks.raise_any(failure)
    for name in sorted(set(holdings.described) - done):
        spreader.spread(name, _tensor(model, name) if ranks.rank == 0 else None, 0)


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    tensor: Tensor | None = module._parameters.get(own)
    tensor = module._buffers.get(own) if tensor is None else tensor
    assert tensor is not None, f"the program has a slot {name} that the model does not"
    return tensor
