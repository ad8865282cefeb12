"""torch.export of the model on stand-in tensors that have no data: the sole user of torch.export.

Enters: a model on any device (meta included), its :class:`Example`, a loss function. Leaves: a :class:`Capture`, the fx
graph in torch's training IR with what is needed to read it. The model is untouched: while torch.export runs, its
parameters and buffers are replaced by fake tensors (in place, so that no module is copied), and put back afterwards.

A model on meta is traced as if it were on the CPU, so that factory calls without ``device=`` agree with it.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.errors import AutoparError, InputError, TraceError
from autopar.options import Precision
from autopar.tracing.examples import Example, named_leaves
from autopar.tracing.lines import noted_lines
from autopar.tracing.own_gradients import no_own_gradients
from autopar.tracing.source import line_of_error, without_wrapper
from autopar.tracing.targets import dtype_name

LossFunction = Callable[[Any, Any], torch.Tensor]
Cuts = Mapping[str, tuple[int, ...]]

_ON_VALUES = re.compile(
    "DataDependent|data-dependent|DynamicOutputShape|_local_scalar_dense|nonzero|Unbacked", re.IGNORECASE
)


@dataclass(frozen=True)
class State:
    """A parameter or buffer with all of its names in the model; ``dtype`` is the model's own, whatever it is traced in."""

    names: tuple[str, ...]
    stand_in: torch.Tensor
    is_parameter: bool
    persistent: bool
    dtype: str


@dataclass(frozen=True)
class Capture:
    """An exported program: fx graph, what each placeholder is, where the outputs go."""

    graph_module: torch.fx.GraphModule
    states: tuple[State, ...]
    placeholders: dict[str, tuple[str, str]]
    constants: dict[str, torch.Tensor]
    output_paths: tuple[str, ...]
    output_leaves: tuple[Any, ...]
    output_structure: Any
    loss_index: int | None
    fake_mode: FakeTensorMode
    rename: Callable[[str], str]


@dataclass
class _Outcome:
    """What the wrapper's forward found, besides the tensors that it returns."""

    paths: tuple[str, ...] = ()
    leaves: tuple[Any, ...] = ()
    structure: Any = None
    loss_index: int | None = None


class _Wrapped(nn.Module):
    """The model and its loss as a function from flat tensors to flat tensors."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        loss_fn: LossFunction | None,
        precision: Precision,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model = model
        self._device = device
        self.training = model.training
        self._example, self._loss_fn, self._outcome = example, loss_fn, _Outcome()
        self._precision = precision

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = self._example.rebuild(tensors)
        args, kwargs = self._example.call(given)
        if self._precision.compute is not None:
            args, kwargs = pytree.tree_map(self._computed, (args, kwargs))
        with self._autocast():
            return self._results(self.model(*args, **kwargs), given)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._precision.autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, _typed(self._precision.autocast))

    def _results(self, output: Any, given: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of the output, and the loss."""
        found = list(named_leaves(output))
        returned = [leaf for _, leaf in found if isinstance(leaf, torch.Tensor)]
        outcome = self._outcome
        _, outcome.structure = pytree.tree_flatten(output)
        outcome.paths = tuple(path for path, leaf in found if isinstance(leaf, torch.Tensor))
        outcome.leaves = tuple(... if isinstance(leaf, torch.Tensor) else leaf for _, leaf in found)
        if self._loss_fn is None:
            loss = find_loss(output, returned)
        else:
            wide = output if self._precision.compute is None else pytree.tree_map(self._widened, output)
            loss = self._loss_fn(wide, given)
        if loss is not None or self._loss_fn is not None:
            who = "loss_fn(outputs, inputs)" if self._loss_fn else f"{type(self.model).__name__}, for its loss,"
            checked = self._widened(_checked_loss(loss, who))
            returned = [checked if leaf is loss else leaf for leaf in returned]
            outcome.loss_index = len(returned)
            returned.append(checked)
        if not returned:
            raise TraceError(
                f"{type(self.model).__name__} returns {type(output).__name__} without a tensor that autopar can find: "
                "return a tensor, or a tuple or dict of tensors"
            )
        return tuple(returned)

    def _computed(self, leaf: Any) -> Any:
        """An input as the policy computes with it."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(_typed(self._precision.computed(dtype_name(leaf.dtype))))

    def _widened(self, leaf: Any) -> Any:
        """A result of the policy's as losses are computed and added up: in float32 at least, as in Megatron-LM."""
        narrow = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
        return leaf.float() if narrow and self._precision.compute is not None else leaf


def _typed(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), f"{name} is no dtype"
    return found


def _checked_loss(loss: Any, who: str) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss
    found = f"{list(loss.shape)} in {loss.dtype}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise InputError(
        f"{who} must return a scalar tensor, it returned {found}; a loss is one floating-point number: take a mean or sum"
    )


def find_loss(output: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """``.loss`` or ``["loss"]``; else the output, or the first of a tuple, where it is a floating-point scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    if isinstance(output, (torch.Tensor, tuple, list)) and tensors:
        first = tensors[0]
        if first.dim() == 0 and first.is_floating_point() and (first is output or first is output[0]):
            return first
    return None


def capture(
    model: nn.Module,
    example: Example,
    shapes: Sequence[Sequence[int]],
    loss_fn: LossFunction | None,
    cuts: Cuts,
    precision: Precision,
) -> Capture:
    """Export the model with its tensor inputs in the given shapes, in the types of ``precision``.

    ``cuts`` keeps only some children of long containers (by path): a cheap second trace of a deep model. Paths in
    the result are those of the whole model. Raises :class:`TraceError` where the model cannot be exported.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(tracked_fakes=[]))
    device = _trace_device(model)
    with ExitStack() as stack:
        stack.enter_context(_quiet_config(model))
        stack.enter_context(no_own_gradients(model))
        model, rename = stack.enter_context(_cut(model, cuts))
        states = stack.enter_context(_stand_ins(model, fake_mode, device, rename, precision))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        with fake_mode:
            tensors = tuple(
                torch.empty(tuple(shape), dtype=leaf.value.dtype, device=device)
                for shape, leaf in zip(shapes, example.tensors, strict=True)
            )
        wrapped = _Wrapped(model, example, loss_fn, precision, device)
        stack.enter_context(noted_lines())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="The tensor attributes? .* assigned during export")
        try:
            program = torch.export.export(wrapped, tensors, strict=False)
        except Exception as error:
            raise _explain(model, error, precision) from error
        touched = next((state.names[0] for state in states if state.stand_in.grad is not None), None)
        if touched is not None:
            raise TraceError(
                f"the model cannot be traced: its forward or an autograd function adds to the gradient of {touched} by hand, "
                "which torch.export leaves out of the program; compute the gradient wanted with plain operators"
            )
    outcome = wrapped._outcome
    placeholders = {}
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        placeholders[name] = (spec.kind.name, without_wrapper(spec.target or ""))
    return Capture(
        graph_module=program.graph_module,
        states=tuple(states),
        placeholders=placeholders,
        constants={without_wrapper(name): value for name, value in program.constants.items()},
        output_paths=outcome.paths,
        output_leaves=outcome.leaves,
        output_structure=outcome.structure,
        loss_index=outcome.loss_index,
        fake_mode=fake_mode,
        rename=rename,
    )


def _trace_device(model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} - {torch.device("meta")}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


@contextmanager
def _quiet_config(model: nn.Module) -> Iterator[None]:
    """Switch off key-value caches and checkpointing (the plan decides about recomputation) while tracing."""
    saved: list[tuple[Any, str, Any]] = []
    for module in model.modules():
        owners: tuple[tuple[Any, str], ...] = (
            (getattr(module, "config", None), "use_cache"),
            (module, "gradient_checkpointing"),
        )
        for owner, name in owners:
            if getattr(owner, name, None) is True:
                saved.append((owner, name, True))
                setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)


@contextmanager
def _stand_ins(
    model: nn.Module,
    fake_mode: FakeTensorMode,
    device: torch.device,
    rename: Callable[[str], str],
    precision: Precision,
) -> Iterator[list[State]]:
    """Replace parameters and buffers by fake tensors, one for each distinct tensor, and put the originals back.

    A buffer that is no part of the state dict keeps its type: it is a table that the model's code computes (rotary
    frequencies), and such code says itself where it goes on in lower precision.
    """
    dtypes: dict[int, str] = {}
    fakes: dict[int, torch.Tensor] = {}
    names: dict[int, list[str]] = {}
    persistent: dict[int, bool] = {}
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    flat_weights: list[tuple[nn.RNNBase, list[Any]]] = []
    try:
        for path, module in model.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                originals = {key: value for key, value in table.items() if value is not None}
                if any(id(value) in fakes and fakes[id(value)] is value for value in originals.values()):
                    continue
                saved.append((table, dict(table)))
                for key, value in originals.items():
                    if id(value) not in fakes:
                        lasts = key not in module._non_persistent_buffers_set
                        own = dtype_name(value.dtype)
                        fake = _stand_in(value, precision.computed(own) if lasts else own, fake_mode, device)
                        fakes[id(value)] = fakes[id(fake)] = fake
                        persistent[id(fake)], dtypes[id(fake)] = lasts, own
                    table[key] = fakes[id(value)]
            if isinstance(module, nn.RNNBase):
                flat_weights.append((module, module._flat_weights))
                module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
            for table in (module._parameters, module._buffers):
                for key, value in table.items():
                    if value is not None:
                        names.setdefault(id(value), []).append(rename(f"{path}.{key}" if path else key))
        distinct = {id(fake): fake for fake in fakes.values()}
        yield [
            State(tuple(names[key]), fake, isinstance(fake, nn.Parameter), persistent[key], dtypes[key])
            for key, fake in distinct.items()
        ]
    finally:
        for module, weights in flat_weights:
            module._flat_weights = weights
        for table, originals in reversed(saved):
            table.update(originals)


def _stand_in(tensor: torch.Tensor, dtype: str, fake_mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """Without data; contiguous, as the program's own tensor is."""
    with fake_mode:
        fake = torch.empty(tensor.shape, dtype=_typed(dtype), device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


@contextmanager
def _cut(model: nn.Module, cuts: Cuts) -> Iterator[tuple[nn.Module, Callable[[str], str]]]:
    """The model with some containers shortened to the children named, and the map from its paths to the whole's."""
    shortened: dict[int, nn.Module] = {}
    renames: list[tuple[str, tuple[int, ...]]] = []
    for path, kept in cuts.items():
        container = model.get_submodule(path)
        short = copy.copy(container)
        short._modules = {str(new): container._modules[str(old)] for new, old in enumerate(kept)}
        shortened[id(container)] = short
        renames.append((f"{path}." if path else "", kept))

    def rename(path: str) -> str:
        for prefix, kept in renames:
            index, dot, rest = path.removeprefix(prefix).partition(".")
            if path.startswith(prefix) and index.isdigit():
                path = f"{prefix}{kept[int(index)]}{dot}{rest}"
        return path

    saved: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in list(model.modules()):
            for key, child in module._modules.items():
                if id(child) in shortened:
                    saved.append((module._modules, key, child))
                    module._modules[key] = shortened[id(child)]
        yield shortened.get(id(model), model), rename
    finally:
        for table, key, child in saved:
            table[key] = child


def _explain(model: nn.Module, error: Exception, precision: Precision) -> AutoparError:
    """The error for the user: what failed, at which of their lines, and what to do."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for cause in chain:
        if isinstance(cause, AutoparError):
            return cause
    where = next((line for line in map(line_of_error, (cause.__traceback__ for cause in chain)) if line), "its forward")
    text = " ".join(f"{type(cause).__name__}: {cause}" for cause in chain)
    first_line = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
    name = type(model).__name__
    if _ON_VALUES.search(text):
        return TraceError(
            f"{name} cannot be traced: at {where} a shape or a branch depends on the values of a tensor "
            f"({type(error).__name__}: {first_line}); write it with operators of fixed shape (torch.where, masks, "
            "top-k with a fixed k), or hand the decision in as a fixed input that is no tensor"
        )
    if precision.compute is not None and ("dtype" in text or "scalar type" in text):
        return TraceError(
            f"{name} cannot be computed in {precision.compute}: at {where} tensors of different types meet "
            f"({type(error).__name__}: {first_line}); cast one to the type of the other there (x.to(weight.dtype)), or "
            "plan with precision='model'"
        )
    return TraceError(
        f"{name} cannot be traced: its forward fails at {where} on tensors without data: {type(error).__name__}: "
        f"{first_line}; check that it runs on example_inputs of these shapes, and that every tensor it uses is an "
        "input, a parameter or a buffer (register_buffer)"
    )
