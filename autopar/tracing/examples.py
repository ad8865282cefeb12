"""Example inputs: bound to the model's forward, flattened into named leaves, with the dim of each that is the batch.

Enters: the model and whatever the user gave as ``example_inputs`` and ``batch_dims``. Leaves: an :class:`Example`,
whose tensor leaves are the graph's inputs and whose other leaves (flags, ints, None) are fixed for good.
"""

from __future__ import annotations

import inspect
from collections import Counter, namedtuple
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.errors import InputError


@dataclass(frozen=True)
class Leaf:
    """A tensor or a fixed value among the inputs; ``path`` is its name or place (``batch["x"][1]``)."""

    path: str
    value: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


@dataclass(frozen=True)
class Example:
    """The example inputs as given (``structure`` rebuilds them from the leaves) and how forward takes them."""

    leaves: tuple[Leaf, ...]
    structure: Any
    parameter_names: tuple[str, ...]
    num_positional: int
    extra_names: tuple[str, ...]

    @property
    def tensors(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.is_tensor)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The inputs in the structure given by the user, with these tensors instead of the example's."""
        supply = iter(tensors)
        values = [next(supply) if leaf.is_tensor else leaf.value for leaf in self.leaves]
        return pytree.tree_unflatten(values, self.structure)

    def call(self, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What of the given inputs goes to the model's forward: the rest is only for the loss function."""
        args, kwargs = split_inputs(given)
        kept = {name: value for name, value in kwargs.items() if name not in self.extra_names}
        return args[: self.num_positional], kept

    def flatten(self, given: Any) -> dict[str, torch.Tensor]:
        """Tensor by path of other inputs of the same structure."""
        values, structure = pytree.tree_flatten(given)
        if structure != self.structure:
            raise InputError(f"the inputs have the structure {structure}, the example had {self.structure}")
        return {leaf.path: value for leaf, value in zip(self.leaves, values, strict=True) if leaf.is_tensor}


def split_inputs(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of any accepted form of inputs."""
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, (tuple, list)):
        if len(given) == 2 and isinstance(given[0], tuple) and _is_keywords(given[1]):
            return given[0], dict(given[1])
        return tuple(given), {}
    raise InputError(
        f"example_inputs is a {type(given).__name__}: give a tuple (positional), a dict (by name), one tensor, "
        "or (args_tuple, kwargs_dict)"
    )


def _is_keywords(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def read_example(model: nn.Module, example_inputs: Any, *, for_loss: bool) -> Example:
    """Bind the example to ``model.forward``; with ``for_loss``, inputs that forward does not take go to the loss only.

    Raises :class:`InputError` with forward's signature when the inputs do not fit it.
    """
    given = _own_example(model) if example_inputs is None else example_inputs
    if isinstance(given, Mapping) and type(given) is not dict:
        given = dict(given)
    args, kwargs = split_inputs(given)
    signature = inspect.signature(model.forward)
    num_positional = len(args)
    extra: tuple[str, ...] = ()
    if for_loss:
        num_positional, extra = _beyond_forward(signature, args, kwargs)
    try:
        signature.bind(*args[:num_positional], **{name: kwargs[name] for name in kwargs if name not in extra})
    except TypeError as error:
        names = list(kwargs) if kwargs else f"{len(args)} positional"
        raise InputError(
            f"example_inputs do not fit {type(model).__name__}.forward{signature}: {error}; given: {names}"
            + ("" if example_inputs is not None else " (the model's own dummy_inputs: give example_inputs instead)")
        ) from error
    values, structure = pytree.tree_flatten(given)
    paths = _paths(given, _positional_names(signature))
    assert len(paths) == len(values), "every leaf has a path"
    leaves = tuple(Leaf(path, value) for path, value in zip(paths, values, strict=True))
    for leaf in leaves:
        if type(leaf.value).__module__.split(".")[0] == "numpy":
            raise InputError(f"input {leaf.path} is a numpy {type(leaf.value).__name__}: give torch.from_numpy of it")
        if leaf.is_tensor and (
            leaf.value.layout is not torch.strided or leaf.value.is_nested or leaf.value.is_quantized
        ):
            raise InputError(
                f"input {leaf.path} is a sparse, nested or quantized tensor ({leaf.value.layout}, {leaf.value.dtype}): give "
                "a dense one"
            )
    if not any(leaf.is_tensor for leaf in leaves):
        raise InputError(f"example_inputs hold no tensor; {type(model).__name__}.forward{signature} needs one")
    return Example(leaves, structure, tuple(signature.parameters), num_positional, extra)


def _own_example(model: nn.Module) -> Any:
    try:
        own = getattr(model, "dummy_inputs", None)
    except Exception:  # a model's own property: whatever it raises, it has no example to give
        own = None
    if own:
        return dict(own) if isinstance(own, Mapping) else own
    signature = inspect.signature(model.forward)
    raise InputError(
        f"{type(model).__name__} has no example inputs of its own: give example_inputs, a tuple or dict of tensors for "
        f"forward{signature}"
    )


def _beyond_forward(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, tuple[str, ...]]:
    """How many positional inputs forward takes, and the names that it does not take."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        num_positional = len(args)
    else:
        num_positional = min(len(args), len(_positional_names(signature)))
    extra = () if takes_any_name else tuple(name for name in kwargs if name not in signature.parameters)
    return num_positional, extra


def _positional_names(signature: inspect.Signature) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in positional]


def _paths(given: Any, names: list[str]) -> list[str]:
    """The path of every leaf, in the order of ``tree_flatten`` of the inputs as given."""
    if isinstance(given, torch.Tensor):
        return [names[0] if names else "args[0]"]
    args, kwargs = split_inputs(given)
    tops = [(names[i] if i < len(names) else f"args[{i}]", arg) for i, arg in enumerate(args)]
    tops += list(kwargs.items())
    return [path for name, value in tops for path, _ in named_leaves(value, name)]


def named_leaves(tree: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """The leaves of nested tuples, lists, dicts and registered nodes with their paths, in ``tree_flatten``'s order.

    The names of a top-level dict stand alone (``logits``); deeper ones are written as one would index (``x["a"][0]``).
    """
    node = pytree.SUPPORTED_NODES.get(_node_type(tree))
    if node is None:
        yield path or "output", tree
        return
    children, _ = node.flatten_fn(tree)
    if isinstance(tree, Mapping):
        keys = [str(key) if not path else f'{path}["{key}"]' for key in tree]
    elif hasattr(tree, "_fields"):
        keys = [name if not path else f"{path}.{name}" for name in tree._fields]
    else:
        keys = [f"{path}[{index}]" for index in range(len(children))]
    for key, child in zip(keys, children, strict=True):
        yield from named_leaves(child, key)


def _node_type(tree: Any) -> Any:
    is_named = isinstance(tree, tuple) and hasattr(tree, "_fields") and type(tree) not in pytree.SUPPORTED_NODES
    return namedtuple if is_named else type(tree)  # pytree keeps all named tuples under this one key


def choose_batch_dims(
    example: Example, batch_dims: Mapping[str, int | None] | None
) -> tuple[dict[str, int | None], int, list[str]]:
    """The batch dim of each tensor input by path, the batch size (1 without a batch), and warnings.

    By default dim 0 of every tensor that has one; where sizes disagree the most common (then first) size is the batch.
    """
    given = dict(batch_dims or {})
    shapes = {leaf.path: tuple(leaf.value.shape) for leaf in example.tensors}
    for path, dim in given.items():
        if path not in shapes:
            raise InputError(f"batch_dims names {path!r}, which is no tensor input; there are {list(shapes)}")
        if dim is not None and type(dim) is not int:
            raise InputError(
                f"batch_dims[{path!r}] is {dim!r}: give the number of a dim, or None where there is no batch"
            )
        if dim is not None and not -len(shapes[path]) <= dim < len(shapes[path]):
            raise InputError(f"batch_dims[{path!r}] is {dim}, but that input has the shape {list(shapes[path])}")
    dims: dict[str, int | None] = {}
    for path, shape in shapes.items():
        dim = given.get(path, 0 if shape else None)
        dims[path] = dim % len(shape) if dim is not None else None
    sizes = {path: shapes[path][dim] for path, dim in dims.items() if dim is not None}
    told = {size for path, size in sizes.items() if path in given}
    if len(told) > 1:
        chosen = {path: sizes[path] for path in given if path in sizes}
        raise InputError(f"the batch dims given disagree about the batch size: {chosen}")
    if not sizes:
        return dims, 1, []
    batch_size = told.pop() if told else Counter(sizes.values()).most_common(1)[0][0]
    odd = [path for path, size in sizes.items() if size != batch_size]
    warnings = [
        f"input {path} has {sizes[path]} in dim 0 where others have a batch of {batch_size}: taken as having no batch "
        "dim (say batch_dims= otherwise)"
        for path in odd
    ]
    dims.update(dict.fromkeys(odd))
    if batch_size < 1:
        raise InputError("the example's batch is empty: give at least one sample")
    return dims, batch_size, warnings
