"""Initial values of a model on the meta device, one module at a time, the same on any number of ranks.

Enters: a model some of whose tensors are on meta, and a seed. Leaves: tensors on the CPU. While one module's own
tensors are made real, the rest of the model stays on meta, so that the model's own code can be run on all of it at no
cost: first ``reset_parameters`` of the module and of those around it (as their constructors did), then each one's
``_init_weights`` as transformers and many others have it (the nearest model at or above it; an attention may re-scale
its projection there). Random numbers come from the seed and the module's path alone.

A buffer that no such code writes (a rotary table, a mask) is taken from a fresh copy of its module where the
arguments of the constructor can be read off the module; else an error names it.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError

_RESETS = ("reset_parameters", "_reset_parameters")
_lock = threading.Lock()  # torch's default generator and the model belong to the whole process; ranks may be threads


def meta_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Path, module and names of its own tensors on meta, for every module that has some; a tied one where it is
    first."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        names = []
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta and id(tensor) not in seen:
                seen.add(id(tensor))
                names.append(name)
        if names:
            yield path, module, tuple(names)


def initial_values(model: nn.Module, path: str, names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
    """Values of the tensors ``names`` of the module at ``path``, by these names. The model is the same afterwards.

    Raises :class:`InputError` naming a tensor that the model's code does not initialise.
    """
    module = model.get_submodule(path)
    chain = _chain(model, path)
    with _lock, ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("cpu"))
        torch.manual_seed(_seed_of(seed, path))
        made = stack.enter_context(_made_real(module, names))
        _run_initialisers(chain)
        values = {name: _own(module, name) for name in names}
        left = [name for name in names if not _is_written(values[name], made[name])]
    if left:
        values |= _from_fresh_copy(module, path, left)
    return {name: value.detach() for name, value in values.items()}


def materialized(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy of the model on the CPU with initial values in place of tensors on meta; tied tensors stay tied."""
    real = copy.deepcopy(model)
    made: dict[int, Tensor] = {}
    for path, target, names in list(meta_modules(real)):
        for name, value in initial_values(model, path, names, seed).items():
            old = _own(target, name)
            made[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    for module in real.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) in made:
                    table[name] = made[id(tensor)]  # type: ignore[assignment]
    return real


def _seed_of(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:7], "big")


def _chain(model: nn.Module, path: str) -> list[nn.Module]:
    """The module at ``path`` and all around it, innermost first."""
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1)]


def _own(module: nn.Module, name: str) -> Tensor:
    tensor: Tensor | None = module._parameters.get(name)
    tensor = module._buffers.get(name) if tensor is None else tensor
    assert tensor is not None, f"{type(module).__name__} has lost its tensor {name}"
    return tensor


@contextmanager
def _made_real(module: nn.Module, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Put CPU tensors in the place of the module's own on meta; their versions when they were new, by name."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    try:
        made = {}
        for name in names:
            old = _own(module, name)
            real = _poisoned(old)
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(real, old.requires_grad)
            else:
                module._buffers[name] = real
            made[name] = _own(module, name)._version
        yield made
    finally:
        module._parameters.clear()
        module._parameters.update(parameters)
        module._buffers.clear()
        module._buffers.update(buffers)


def _poisoned(like: Tensor) -> Tensor:
    """A CPU tensor whose elements show whether they have been written."""
    real = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    if real.is_floating_point() or real.is_complex():
        return real.fill_(float("nan"))
    return real.zero_() if real.dtype == torch.bool else real.fill_(torch.iinfo(real.dtype).min)


def _is_written(tensor: Tensor, version: int) -> bool:
    if tensor.is_meta:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(torch.isnan(tensor).any())
    if tensor._version != version or not tensor.numel():
        return True
    return tensor.dtype != torch.bool and bool((tensor != torch.iinfo(tensor.dtype).min).all())


def _run_initialisers(chain: list[nn.Module]) -> None:
    """What the constructors did, and then what the models' own pass over their modules did, both innermost first."""
    for module in chain:
        for name in _RESETS:
            reset = getattr(module, name, None)
            if callable(reset) and not _required(reset):
                reset()
    for at, module in enumerate(chain):
        owner = next((above for above in chain[at:] if _visits(getattr(above, "_init_weights", None))), None)
        if owner is not None:
            owner._init_weights(module)  # type: ignore[operator]


def _visits(initialise: Any) -> bool:
    """Whether it is a function of one module."""
    return callable(initialise) and len(_required(initialise)) == 1


def _required(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters.values()
    return [item.name for item in found if item.kind in kinds and item.default is inspect.Parameter.empty]


def _from_fresh_copy(module: nn.Module, path: str, names: list[str]) -> dict[str, Tensor]:
    """Buffers of the module as its constructor makes them."""
    full = [f"{path}.{name}" if path else name for name in names]
    of = type(module).__name__
    weights = [name for name in names if name in module._parameters]
    if weights:
        raise InputError(
            f"{', '.join(full)} is on the meta device and {of} has no code that initialises it: give {of} a "
            "reset_parameters(), or the model an _init_weights(module), or build the model on the CPU"
        )
    arguments, unknown = _constructor_arguments(module)
    advice = f"write it in {of}.reset_parameters(), or build the model on the CPU"
    if unknown:
        raise InputError(
            f"the buffer {', '.join(full)} is on the meta device and cannot be computed again: {of} keeps no attribute "
            f"{', '.join(unknown)} with which to construct it anew; {advice}"
        )
    try:
        with _lock, torch.random.fork_rng(devices=[]), torch.device("cpu"), _parameters_on_meta():
            fresh = type(module)(**arguments)
        found = {name: fresh._buffers[name] for name in names}
    except Exception as error:
        raise InputError(
            f"the buffer {', '.join(full)} is on the meta device and cannot be computed again: constructing {of}"
            f"({', '.join(arguments)}) fails: {type(error).__name__}: {error}; {advice}"
        ) from error
    for name, value in found.items():
        old = _own(module, name)
        if value is None or value.is_meta or value.shape != old.shape:
            raise InputError(f"the buffer {path}.{name} has another shape in a fresh {of} than in the model; {advice}")
    return {name: value.to(_own(module, name).dtype) for name, value in found.items() if value is not None}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """While active, constructors keep no parameter's values: only buffers of the fresh module are wanted."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        kept = None if parameter is None else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, kept)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _constructor_arguments(module: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Arguments for a fresh copy, each from the attribute of its name, and the names of those that are not there.

    No default is trusted, since the module may have been made with another value; ``device`` and ``dtype`` alone may
    be left out.
    """
    arguments, unknown = {}, []
    for name, item in inspect.signature(type(module)).parameters.items():
        if item.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) or name in (
            "device",
            "dtype",
        ):
            continue
        if name in module.__dict__:
            arguments[name] = module.__dict__[name]
        else:
            unknown.append(name)
    return arguments, unknown
