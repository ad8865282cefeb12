"""Runs an OpGraph operator by operator with torch: the oracle for everything that is made from a graph.

Slow and plain on purpose. ``batch`` rescales the batch literals, so that a graph can be run at another batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.graph import BatchLiteral, DeviceArgument, Operator, OpGraph, Ref, Slot, TorchName
from autopar.runtime.draws import Draws
from autopar.runtime.random import whole_dropout
from autopar.strategies.loss import FUSED


def run_graph(graph: OpGraph, values: Mapping[str, torch.Tensor], batch: int | None = None) -> dict[str, torch.Tensor]:
    """All values of the graph, from those of its inputs, parameters, buffers and constants."""
    found = dict(values)
    batch = graph.batch_size if batch is None else batch
    for operator in graph.operators:
        outputs = run_operator(operator, found, batch, graph.batch_size)
        for value, tensor in zip(operator.outputs, outputs, strict=True):
            if value:
                described = graph.values[value]
                assert str(tensor.dtype) == f"torch.{described.dtype}", (value, tensor.dtype, described)
                assert batch != graph.batch_size or tuple(tensor.shape) == described.shape, (
                    value,
                    tensor.shape,
                    described,
                )
                assert tensor.requires_grad == described.requires_grad, (value, tensor.requires_grad, described)
                found[value] = tensor
    return found


def run_operator(
    operator: Operator, values: Mapping[str, torch.Tensor], batch: int, traced_batch: int
) -> list[torch.Tensor]:
    """The outputs of one operator."""

    def to_torch(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return values[tree.value]
        if isinstance(tree, TorchName):
            return getattr(torch, tree.name.removeprefix("torch."))
        if isinstance(tree, DeviceArgument):
            return torch.device("cpu")
        if isinstance(tree, BatchLiteral):
            assert tree.value * batch % traced_batch == 0
            return tree.value * batch // traced_batch
        return tuple(to_torch(item) for item in tree) if isinstance(tree, tuple) else tree

    args = [to_torch(item) for item in operator.args]
    kwargs = {name: to_torch(item) for name, item in operator.kwargs}
    if operator.target == "autopar.experts.default":
        return [_mixture(*args)]
    if operator.target == FUSED:
        x, weight, bias, labels, class_weight, reduction, ignored, smoothing, dtype = args
        logits = torch.nn.functional.linear(x, weight, bias).to(dtype or x.dtype).flatten(0, -2)
        return [torch.ops.aten.cross_entropy_loss(logits, labels.flatten(), class_weight, reduction, ignored, smoothing)]
    function: Any = torch.ops
    for part in operator.target.split("."):
        function = getattr(function, part)
    if operator.target == "aten.dropout.default" and args[1] and args[2]:
        return [whole_dropout(args[0], args[1], operator.id, Draws())]
    if operator.target == "aten.batch_norm.default" and len(operator.outputs) == 3:
        args[3], args[4] = args[3].clone(), args[4].clone()
        return [function(*args, **kwargs), args[3], args[4]]
    result = function(*args, **kwargs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _mixture(
    tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, parameters: Any, body: Any, dtype: torch.dtype | None
) -> torch.Tensor:
    """Every choice of every token on its own, with copies of its expert's weights."""
    num_tokens, num_chosen = ids.shape
    chosen = ids.reshape(-1)
    rows = [tokens.repeat_interleave(num_chosen, 0)]

    def found(item: Any) -> Any:
        if not isinstance(item, Slot):
            return item
        return rows[item.index] if item.kind == "row" else parameters[item.index][chosen]

    for target, args, kwargs, _ in body:
        given = [found(item) for item in args]
        if target == "bias":
            rows.append(given[0])
        elif target in ("linear", "matmul"):
            rows.append(torch.einsum("si,soi->so" if target == "linear" else "si,sio->so", *given))
        else:
            function: Any = torch.ops
            for part in target.split("."):
                function = getattr(function, part)
            result = function(*given, **dict(kwargs))
            rows += result if isinstance(result, (tuple, list)) else [result]
    weighted = rows[-1] * weights.reshape(-1, 1)
    weighted = weighted if dtype is None else weighted.to(dtype)
    return weighted.view(num_tokens, num_chosen, -1).sum(1)


def state_values(
    graph: OpGraph, model: torch.nn.Module, constants: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The model's own parameters and buffers, and the constants, by value id."""
    values = {parameter.value: model.get_parameter(parameter.name) for parameter in graph.parameters}
    values |= {buffer.value: model.get_buffer(buffer.name).clone() for buffer in graph.buffers}
    return values | dict(constants)
