"""Both sides in float64: the traced graph with its types changed, and a mode under which the plain model casts to
float64.

Structure, names and literals of the graph stay, so that a plan of the graph is a plan of the changed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import InputError
from autopar.graph import Operator, OpGraph, Subgraph, TorchName

_WIDER = {"float32": "float64", "float16": "float64", "bfloat16": "float64", "complex64": "complex128"}
_WIDER_TYPES = {getattr(torch, name): getattr(torch, wide) for name, wide in _WIDER.items()}
_LITERALS = (torch.tensor, torch.as_tensor)
_GROUPED = "_grouped_mm"  # what torch.nn.functional.grouped_mm calls
_CONVERSIONS = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device")
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


def in_double(graph: OpGraph) -> OpGraph:
    """The graph with float64 in place of all lower floating-point types, values and arguments alike.

    A cast stays a copy: backward would else keep what is cast, which may be a parameter that is then gathered once more.
    """

    def wide(tree: Any) -> Any:
        if isinstance(tree, TorchName):
            name = tree.name.removeprefix("torch.")
            return TorchName(f"torch.{_WIDER[name]}") if name in _WIDER else tree
        if isinstance(tree, Subgraph):
            return replace(
                tree,
                operators=tuple(replace(op, args=wide(op.args), kwargs=wide(op.kwargs)) for op in tree.operators),
                values=tuple(replace(value, dtype=_WIDER.get(value.dtype, value.dtype)) for value in tree.values),
            )
        return tuple(wide(item) for item in tree) if isinstance(tree, tuple) else tree

    return replace(
        graph,
        values={
            name: replace(value, dtype=_WIDER.get(value.dtype, value.dtype)) for name, value in graph.values.items()
        },
        operators=tuple(
            replace(op, args=wide(op.args), kwargs=(*wide(op.kwargs), *_copying(op, graph))) for op in graph.operators
        ),
        parameters=tuple(
            replace(entry, master=_WIDER.get(entry.master, entry.master)) if entry.master else entry
            for entry in graph.parameters
        ),
        _cache={},
    )


def _copying(operator: Operator, graph: OpGraph) -> tuple[tuple[str, Any], ...]:
    """What makes a conversion to another type a copy whatever the types are."""
    if operator.target not in _CONVERSIONS or len(operator.args) > 3 or any(name == "copy" for name, _ in operator.kwargs):
        return ()
    before, after = graph.values[operator.inputs[0]].dtype, graph.values[operator.outputs[0]].dtype
    return (("copy", True),) if before != after and before in _WIDER else ()


class InDouble(TorchFunctionMode):
    """While active, whatever asks for a lower floating-point type gets float64.

    Numbers written in the code are rounded first, as they are in the traced graph: to the type asked for, or to
    ``default``, torch's default type while the model was traced.
    """

    def __init__(self, default: torch.dtype) -> None:
        super().__init__()
        self._default = default

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LITERALS and not isinstance(args[0] if args else None, Tensor):
            with default_dtype(self._default):
                made = func(*args, **(kwargs or {}))
            return made.to(wide_type(made.dtype))
        if func in _CASTS:
            return args[0].double()
        if getattr(func, "__name__", "") == _GROUPED and args[0].dtype == torch.float64:
            return _grouped_product(*args, **(kwargs or {}))
        args = tuple(wide_type(item) for item in args)
        return func(*args, **{name: wide_type(item) for name, item in (kwargs or {}).items()})


def _grouped_product(
    x: Tensor, matrices: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Grouped matrix products of rows that end at ``offs``, which torch has in lower precision only."""
    if offs is None or bias is not None or (x.dim(), matrices.dim()) != (2, 3):
        raise InputError(
            f"grouped_mm of {list(x.shape)} by {list(matrices.shape)}, which torch does not have in float64, is verified for "
            "rows [rows, in] by matrices [groups, in, out] only, with offs and without a bias; write it so, or as products"
        )
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    return torch.cat([x[start:end] @ matrix for start, end, matrix in zip(starts, ends, matrices, strict=True)])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """While active, tensors made without a type are of ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def wide_type(item: Any) -> Any:
    """float64 for a lower floating-point type; anything else as it is."""
    return _WIDER_TYPES.get(item, item) if isinstance(item, torch.dtype) else item
