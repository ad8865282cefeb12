"""One operator on simulated devices, put together again and compared with the whole: the proof of a rule.

Every input is cut as a strategy says (partial ones into random terms), the local call that codegen writes is run on each
device, and outputs and gradients are joined by their layouts' meaning.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F

from autopar import runtime
from autopar.codegen.calls import call
from autopar.codegen.scope import Scope
from autopar.graph import Operator, OpGraph, Ref, Value
from autopar.layout import PARTIAL, SUMMED_GRADIENT, Cut, Layout, Split, Whole, indices, splits_of
from autopar.mesh import Mesh
from autopar.simulation import run_ranks
from autopar.strategies.choices import CHUNKS, Strategy, axis_choices, strategies
from autopar.strategies.cuts import LetterCuts, fits_joint, widen
from autopar.strategies.registry import signature_of
from autopar.strategies.rule import Signature
from tests.properties.rule_samples import Given, Sample
from tests.support.interpret import run_operator

TALKS = frozenset(  # functions of the runtime that exchange tensors
    {"batch_norm", "cross_entropy", "experts", "group_norm", "halo", "linear_cross_entropy", "ring_attention"}
)
NAMES = ("one", "two", "three")
MOST_ON_TWO_AXES = 24  # strategies of one sample
Place = tuple[int, ...]


PROGRAM_NAMES = {name: getattr(runtime, name) for name in runtime.__all__} | {"torch": torch, "F": F}


class WrongRule(AssertionError):
    """What came together from the devices is not what one device computes."""


@dataclass(frozen=True)
class OnOneDevice:
    """A sample's operator, its tensors and gradients. ``gradients`` are given for outputs and found for inputs."""

    operator: Operator
    graph: OpGraph
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    output_gradients: tuple[torch.Tensor | None, ...]
    input_gradients: tuple[torch.Tensor | None, ...]


def draw(given: Given, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, given.dtype)
    if given.dtype in ("int64", "bool"):
        return torch.randint(int(given.low), int(given.high), given.shape, generator=generator).to(dtype)
    numbers = torch.rand(given.shape, generator=generator, dtype=torch.float64) * (given.high - given.low) + given.low
    if dtype.is_complex:
        numbers = torch.complex(numbers, torch.rand(given.shape, generator=generator, dtype=torch.float64))
    return numbers.to(dtype).requires_grad_(given.gradient)


def on_one_device(sample: Sample, backward: bool = True) -> OnOneDevice:
    """Run a sample whole."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(sample).encode()))
    torch.manual_seed(0)
    tensors: list[torch.Tensor] = []

    def placed(argument: Any) -> Any:
        if isinstance(argument, Given):
            tensors.append(draw(argument, generator))
            return Ref(f"x{len(tensors) - 1}")
        return tuple(placed(item) for item in argument) if isinstance(argument, tuple) else argument

    args = placed(sample.args)
    kwargs = tuple((name, placed(value)) for name, value in sample.kwargs)
    operator = Operator("sample", sample.target, args, kwargs)
    known = {f"x{index}": tensor for index, tensor in enumerate(tensors)}
    statistics = sample.target == "aten.batch_norm.default" and args[5] and args[3] is not None
    operator = replace(operator, outputs=("y0", "y1", "y2") if statistics else ("y0",))
    outputs = tuple(run_operator(operator, known, 1, 1))
    operator = replace(operator, outputs=tuple(f"y{index}" for index in range(len(outputs))))
    values = {
        name: Value(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
        for name, t in (*known.items(), *((f"y{index}", tensor) for index, tensor in enumerate(outputs)))
    }
    graph = OpGraph("sample", values, (), (), (), (), (operator,), (), None, 1)
    given = tuple(
        torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) if t.requires_grad else None
        for t in outputs
    )
    found = gradients(outputs, given, tensors) if backward else (None,) * len(tensors)
    return OnOneDevice(operator, graph, tuple(tensors), outputs, given, found)


def gradients(
    outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the inputs that want one; zeros where the operator does not use them."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    pairs = [(t, g) for t, g in zip(outputs, given, strict=True) if g is not None and t.requires_grad]
    if not wanted or not pairs:
        return tuple(torch.zeros_like(t) if t.requires_grad else None for t in inputs)
    tensors, along = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(tensors, wanted, along, allow_unused=True))
    results = [next(found) if tensor.requires_grad else None for tensor in inputs]
    return tuple(
        torch.zeros_like(t) if t.requires_grad and result is None else result
        for t, result in zip(inputs, results, strict=True)
    )


def saved_bytes(sample: Sample) -> tuple[int, int]:
    """Bytes that autograd keeps for a sample's backward, and what its rule says; each tensor counted once."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        whole = on_one_device(sample, backward=False)
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    signature = signature_of(whole.operator, whole.graph)
    if signature is None:
        return 0, 0
    tensors = [whole.inputs[index] for index in signature.saved_inputs]
    tensors += [whole.outputs[index] for index in signature.saved_outputs]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return real, sum(storages.values()) + int(signature.saved_extra_bytes)


def with_one_gradient_less(sample: Sample) -> Iterator[Sample]:
    """Of a sample of which several tensors have a gradient, the samples in which one of these has none."""
    arguments = (sample.args, sample.kwargs)
    count = _num_gradients(arguments)
    for place in range(count) if count > 1 else ():
        args, kwargs = _without_gradient(arguments, place)
        yield replace(sample, args=args, kwargs=kwargs)


def _num_gradients(tree: Any) -> int:
    if isinstance(tree, tuple):
        return sum(map(_num_gradients, tree))
    return int(isinstance(tree, Given) and tree.gradient)


def _without_gradient(tree: Any, place: int) -> Any:
    """The tree with the gradient of the tensor left out that is number ``place`` of those that have one."""
    if isinstance(tree, tuple):
        before = itertools.accumulate(map(_num_gradients, tree), initial=0)
        return tuple(_without_gradient(item, place - passed) for item, passed in zip(tree, before, strict=False))
    return replace(tree, gradient=False) if isinstance(tree, Given) and tree.gradient and place == 0 else tree


def cuts_to_try(signature: Signature) -> LetterCuts:
    """For each letter the plain cut, one between pairs and one of two segments; divided dims by each common unit."""
    found: dict[str, tuple[Cut, ...]] = {}
    for letter in signature.splittable():
        size = signature.sizes[letter]
        if letter in signature.parts:
            sizes = signature.parts[letter]
            units = [units for units in range(2, math.gcd(*sizes) + 1) if math.gcd(*sizes) % units == 0]
            cuts = [widen(Cut(((1, sizes[0], sizes[0] // count),)), sizes) for count in units]
            found[letter] = tuple(cut for cut in cuts if cut is not None)
        elif letter in signature.joint:
            cuts = [Cut.plain(size), Cut(((1, size, 2),))] if size % 2 == 0 else [Cut.plain(size)]
            found[letter] = tuple(cut for cut in cuts if fits_joint(signature, letter, cut))
        elif size % 2 == 0 and size > 2:
            found[letter] = (Cut.plain(size), Cut(((1, size, 2),)), Cut(((2, size // 2, 1),)))
        else:
            found[letter] = (Cut.plain(size),)
    return LetterCuts(found, frozenset())


def all_strategies(
    whole: OnOneDevice, signature: Signature | None, mesh_shape: tuple[int, ...]
) -> tuple[Strategy, ...]:
    values = whole.graph.values
    flows = (
        [values[value].requires_grad for value in whole.operator.inputs],
        [values[value].requires_grad for value in whole.operator.outputs],
    )
    letters = None if signature is None else cuts_to_try(signature)
    return strategies([axis_choices(signature, letters, flows, size) for size in mesh_shape], mesh_shape)


def check_sample(
    sample: Sample, mesh_shape: tuple[int, ...], rule: Callable[..., Signature | None] = signature_of
) -> int:
    """Check every strategy of a sample on a mesh; how many there were."""
    whole = on_one_device(sample)
    signature = rule(whole.operator, whole.graph)
    found: Sequence[Strategy] = all_strategies(whole, signature, mesh_shape)
    if signature is not None and signature.random and not signature.counted:
        assert all(choice.letter is None for strategy in found for choice in strategy.axes), f"{sample} draws numbers"
        return len(found)
    if len(mesh_shape) > 1:  # what one axis does is tried on one axis
        found = [strategy for strategy in found if all(choice.letter for choice in strategy.axes)]
        found = found[:: -(-len(found) // MOST_ON_TWO_AXES)]
    if signature is not None and signature.chunked is not None and signature.chunked.is_offered:
        found = [*found, *(replace(strategy, form=CHUNKS) for strategy in found)]
    for strategy in found:
        check_strategy(whole, strategy, mesh_shape, str(sample))
    return len(found)


def check_strategy(whole: OnOneDevice, strategy: Strategy, mesh_shape: tuple[int, ...], what: str) -> None:
    """Run one strategy on all devices and compare outputs and gradients with those of one device."""
    mesh = Mesh(mesh_shape, NAMES[: len(mesh_shape)])
    scope = Scope(mesh, 1, forms={whole.operator.id: strategy.form})
    names = [f"x{index}" for index in range(len(whole.inputs))]
    text = call(whole.operator, names, strategy.inputs, strategy.outputs, whole.graph, mesh, scope)
    source = "\n".join([*scope.constants(), "", f"def local({', '.join(names)}): return {text}"])
    program = compile(source, "local call", "exec")
    generator = torch.Generator().manual_seed(1)
    terms = [
        _terms(t.detach(), layout, PARTIAL, mesh, generator)
        for t, layout in zip(whole.inputs, strategy.inputs, strict=True)
    ]
    given = [
        None if g is None else _terms(g, layout, SUMMED_GRADIENT, mesh, generator)
        for g, layout in zip(whole.output_gradients, strategy.outputs, strict=True)
    ]

    def run(rank: int, bound: bool) -> tuple[list[torch.Tensor], tuple[torch.Tensor | None, ...]]:
        place = mesh.coordinates(rank)
        inputs = []
        for tensor, layout, parts in zip(whole.inputs, strategy.inputs, terms, strict=True):
            local = _piece(parts[_key(layout, PARTIAL, place)], layout, mesh, place).clone()
            inputs.append(local.requires_grad_(tensor.requires_grad))
        along = [
            None if parts is None else _piece(parts[_key(layout, SUMMED_GRADIENT, place)], layout, mesh, place)
            for layout, parts in zip(strategy.outputs, given, strict=True)
        ]
        result = _local_function(program, mesh, place, bound)(*inputs)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        for output, expected in zip(outputs, along, strict=True):
            if expected is not None and output.shape != expected.shape:
                raise WrongRule(
                    f"rank {rank}: a local shape of {list(output.shape)}, {list(expected.shape)} by the layout"
                )
        found = gradients(outputs, along, inputs)
        return [output.detach() for output in outputs], found

    single = any(tensor.dtype == torch.float32 for tensor in (*whole.inputs, *whole.outputs))
    tolerance = 1e-5 if single else 1e-10

    def described() -> str:
        return f"{what} on {mesh}, split {strategy.label!r} {strategy.form}: {text}"

    try:
        if scope.runtime_names & TALKS and mesh.num_devices > 1:
            results = run_ranks(mesh.num_devices, run, True)
        else:
            results = [run(rank, False) for rank in range(mesh.num_devices)]
        for index, (tensor, layout) in enumerate(zip(whole.outputs, strategy.outputs, strict=True)):
            if "empty" not in whole.operator.target:
                parts: list[torch.Tensor | None] = [outputs[index] for outputs, _ in results]
                _compare(tensor.detach(), parts, layout, PARTIAL, mesh, f"output {index}", tolerance)
        for index, (tensor, layout) in enumerate(zip(whole.input_gradients, strategy.inputs, strict=True)):
            if tensor is not None:
                parts = [found[index] for _, found in results]
                _compare(tensor, parts, layout, SUMMED_GRADIENT, mesh, f"gradient {index}", tolerance)
    except WrongRule as error:
        raise WrongRule(f"{described()}: {error}") from None
    except Exception as error:
        error.add_note(described())
        raise


def _local_function(program: CodeType, mesh: Mesh, place: Place, bound: bool) -> Callable[..., Any]:
    """The local call as the generated program would have it."""
    known = runtime.Mesh(**dict(zip(mesh.names, mesh.shape, strict=True)))
    if bound:
        known.bind()
    else:  # nothing is sent: places are all that is needed
        for axis in known.axes:
            axis._place = place[axis.index]
    scope = PROGRAM_NAMES | {"mesh": known}
    exec(program, scope)
    function: Callable[..., Any] = scope["local"]
    return function


def _key(layout: Layout, state: Whole, place: Place) -> Place:
    return tuple(c if layout[axis] == state else 0 for axis, c in enumerate(place))


def _terms(
    tensor: torch.Tensor, layout: Layout, state: Whole, mesh: Mesh, generator: torch.Generator
) -> dict[Place, torch.Tensor]:
    """The tensor as a sum of random terms, one per coordinate of the axes in ``state``."""
    ranges = [range(size if layout[axis] == state else 1) for axis, size in enumerate(mesh.shape)]
    places = list(itertools.product(*ranges))
    found = {}
    rest = tensor
    for place in places[1:]:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            term = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype) - 0.5
        else:
            term = torch.randint(-3, 4, tensor.shape, generator=generator).to(tensor.dtype)
        found[place] = term
        rest = rest - term
    found[places[0]] = rest
    return found


def _piece(tensor: torch.Tensor, layout: Layout, mesh: Mesh, place: Place) -> torch.Tensor:
    for dim, size in enumerate(tensor.shape):
        splits = splits_of(layout, dim, mesh.shape, place)
        if splits:
            tensor = tensor.index_select(dim, _held(size, splits))
    return tensor


@cache
def _held(size: int, splits: tuple[Split, ...]) -> torch.Tensor:
    return torch.from_numpy(indices(size, splits))


def _compare(
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor | None],
    layout: Layout,
    state: Whole,
    mesh: Mesh,
    what: str,
    tolerance: float,
) -> None:
    """Sums over the axes in ``state``, pieces along the axes that shard, and the same on all others."""
    sums: dict[Place, torch.Tensor] = {}
    for rank, part in enumerate(parts):
        place = mesh.coordinates(rank)
        key = tuple(0 if layout[axis] == state else c for axis, c in enumerate(place))
        if part is None:
            raise WrongRule(f"{what}: rank {rank} has none")
        sums[key] = sums[key] + part if key in sums else part
    exact = not (whole.dtype.is_floating_point or whole.dtype.is_complex)
    for place, total in sums.items():
        expected = _piece(whole, layout, mesh, place)
        if total.shape != expected.shape:
            raise WrongRule(f"{what} at {place} has shape {list(total.shape)}, expected {list(expected.shape)}")
        if total.dtype != expected.dtype and not exact:
            raise WrongRule(f"{what} at {place} is {total.dtype}, expected {expected.dtype}")
        if exact:
            right = bool((total == expected).all())
        else:
            finite = expected.abs()[expected.isfinite()]
            scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
            right = torch.allclose(total, expected, rtol=0, atol=tolerance * scale, equal_nan=True)
        if not right:
            raise WrongRule(f"{what} at {place} differs from the whole")
