"""nn.Module + example inputs -> :class:`~autopar.graph.OpGraph`.

Enters: a model on any device (meta included) and one batch of inputs. Leaves: a :class:`Traced`. The model is exported
in torch's training IR on tensors without data, so that a model of any size traces in seconds and nothing of it is
copied; a second, shortened trace at another batch size shows which literals follow the batch.

Example::

    traced = autopar.tracing.trace(model, {"input_ids": ids, "labels": ids})
    traced.graph.operators, traced.graph.block_groups
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.collection import without_collection
from autopar.errors import InputError
from autopar.graph import Input, OpGraph, Value
from autopar.options import Precision
from autopar.tracing.batch import mark_batch
from autopar.tracing.blocks import find_blocks
from autopar.tracing.capture import Capture, Cuts, LossFunction, capture
from autopar.tracing.examples import Example, choose_batch_dims, read_example
from autopar.tracing.lower import lower
from autopar.tracing.lowered import Lowered


@dataclass(frozen=True)
class Traced:
    """A traced model: its graph, and what leads from the user's inputs to the graph's and back to the user's outputs.

    ``constants`` has the data of every tensor written in the model's code, by value id.
    """

    graph: OpGraph
    constants: dict[str, torch.Tensor]
    example: Example
    output_leaves: tuple[Any, ...]
    output_structure: Any

    def inputs(self, given: Any) -> dict[str, torch.Tensor]:
        """Input tensors by value id, from inputs of the example's structure (and of any batch size)."""
        by_path = self.example.flatten(given)
        return {entry.value: by_path[entry.path] for entry in self.graph.inputs}

    def outputs(self, values: Mapping[str, torch.Tensor]) -> Any:
        """The model's output in its own structure, from tensors by value id."""
        supply = iter(self.graph.outputs)
        leaves = [values[next(supply).value] if leaf is ... else leaf for leaf in self.output_leaves]
        return pytree.tree_unflatten(leaves, self.output_structure)


def trace(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    batch_dims: Mapping[str, int | None] | None = None,
    loss_fn: LossFunction | None = None,
    precision: Precision | None = None,
    outputs: str = "all",
) -> Traced:
    """Trace a model's forward, and its loss, into a graph of ATen operators.

    ``example_inputs``: a tuple (positional), a dict (by name), one tensor, or ``(args_tuple, kwargs_dict)``; left out,
    the model's own ``dummy_inputs``. Only shapes and dtypes count. Inputs that are no tensors are fixed.
    ``batch_dims``: the batch dim of an input by its path, None for no batch; by default dim 0 of each tensor.
    ``loss_fn(outputs, inputs)``: the loss as a scalar, from the model's output and the inputs in the form given (a dict
    or tuple may then hold targets that forward does not take). By default the output's ``loss``, or a scalar output.
    ``precision``: the types that the forward computes in, by default the model's own. Floating-point inputs of the forward
    are then cast in the graph, and ``loss_fn`` gets the inputs as they are and outputs in float32 at least.
    ``outputs``: ``all`` that the model returns, or the ``loss`` alone: what only other outputs need is then not computed, and
    these are None.

    Raises :class:`~autopar.errors.InputError` for inputs that do not fit, :class:`~autopar.errors.TraceError` for a
    forward that depends on values. The model is the same object afterwards, with the same parameters.
    """
    example = read_example(model, example_inputs, for_loss=loss_fn is not None)
    dims, batch_size, warnings = choose_batch_dims(example, batch_dims)
    policy = precision or Precision()

    def run(batch: int, cuts: Cuts) -> tuple[Capture, Lowered]:
        shapes = [_resized(leaf.value.shape, dims[leaf.path], batch) for leaf in example.tensors]
        captured = capture(model, example, shapes, loss_fn, cuts, policy)
        if outputs == "loss" and captured.loss_index is None:
            raise InputError(f"outputs='loss': {type(model).__name__} returns no loss; give loss_fn=, or outputs='all'")
        return captured, lower(captured, [leaf.path for leaf in example.tensors], policy, outputs)

    with without_collection():
        captured, lowered = run(batch_size, {})
        order, groups = find_blocks(lowered)
        operators = {operator.id: operator for operator in lowered.operators}
        following: Mapping[str, tuple[int, ...]] = {}
        if any(dim is not None for dim in dims.values()):
            marked = mark_batch(lowered, groups, batch_size, _containers(model), lambda b, cuts: run(b, cuts)[1])
            operators = {operator.id: operator for operator in marked.operators}
            following = marked.batch_dims
            if marked.reason is not None:
                warnings.append(f"the batch of {batch_size} is not split, since no other size works: {marked.reason}")
                dims = dict.fromkeys(dims)
    inputs = tuple(Input(*place, dims[place[1]]) for place in lowered.inputs)
    following = {**following, **{x.value: (x.batch_dim,) for x in inputs if x.batch_dim is not None}}
    graph = OpGraph(
        model=type(model).__name__,
        values={name: _following(value, following.get(name, ())) for name, value in lowered.values.items()},
        inputs=inputs,
        parameters=tuple(lowered.parameters),
        buffers=tuple(lowered.buffers),
        constants=tuple(lowered.constants),
        operators=tuple(operators[name] for name in order),
        outputs=tuple(lowered.outputs),
        loss=lowered.loss,
        batch_size=batch_size,
        block_groups=groups,
        warnings=tuple(warnings),
        training=model.training,
    )
    return Traced(graph, lowered.tensors, example, _leaves(captured, lowered), captured.output_structure)


def _leaves(captured: Capture, lowered: Lowered) -> tuple[Any, ...]:
    """The leaves of the model's output: ``...`` for tensors that the graph has as outputs, None for those left out."""
    kept = {output.path for output in lowered.outputs}
    paths = iter(captured.output_paths)
    return tuple((... if next(paths) in kept else None) if leaf is ... else leaf for leaf in captured.output_leaves)


def _following(value: Value, batch_dims: tuple[int, ...]) -> Value:
    return replace(value, batch_dims=batch_dims) if batch_dims else value


def _resized(shape: Sequence[int], dim: int | None, batch: int) -> list[int]:
    return [batch if index == dim else int(size) for index, size in enumerate(shape)]


def _containers(model: nn.Module) -> dict[str, int]:
    """Lists of modules, numbered from 0, by path with their lengths: those that a second trace may shorten."""
    return {
        path: len(module._modules)
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and list(module._modules) == [str(index) for index in range(len(module._modules))]
    }
