"""Masks that are the causal triangle, written as what they are: ``is_causal``.

Models build their mask from ``arange`` and comparisons, for every batch and with the same outcome. Attention that knows that
it is causal needs no mask in memory, computes half of the scores, and can be split along the sequence with the same work on
every device. So what a mask is computed from is looked at here: where it is constants only, it is computed, and where that
gives the triangle the mask goes.

Values are computed with dims along which they do not change left at size 1; a comparison of a growing column with a growing
row, which may be too large to compute, is the triangle if it is right beside the diagonal.

Enters: the lowered program. Leaves: the same, with attention called as causal in place of such masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.graph import DeviceArgument, Operator, Ref, TorchName
from autopar.tracing.lowered import Lowered
from autopar.tracing.targets import resolve_target

_ATTENTION = "aten.scaled_dot_product_attention.default"
_MOST_COMPUTED = 1 << 24  # elements of a value that is computed
_COMPARING = {"le": torch.le, "lt": torch.lt, "ge": torch.ge, "gt": torch.gt}
_TOGETHER = ("__and__", "bitwise_and", "logical_and", "mul")
_HANDING_ON = ("expand", "unsqueeze", "slice", "clone", "contiguous", "alias", "detach")
_POINTWISE = (
    *_COMPARING,
    *_TOGETHER,
    "eq",
    "ne",
    "add",
    "sub",
    "__or__",
    "bitwise_or",
    "logical_or",
    "where",
    "masked_fill",
)
_NOT_CONSTANT = ("rand", "normal", "dropout", "bernoulli", "empty", "multinomial")


@dataclass(frozen=True)
class _Triangle:
    """True where the last dim's place is no later than the one before it."""


_Known = Tensor | _Triangle | None  # None: not known, or too large


def fold_causal_masks(lowered: Lowered) -> None:
    """Have attention called as causal where its mask is that."""
    masks = _Masks(lowered)
    with torch.device("cpu"):  # whatever the caller's default: masks are computed, not traced
        lowered.operators = [
            _as_causal(operator) if operator.target == _ATTENTION and masks.is_causal(operator) else operator
            for operator in lowered.operators
        ]


def _as_causal(operator: Operator) -> Operator:
    kept = tuple((name, value) for name, value in operator.kwargs if name in ("scale", "enable_gqa"))
    return replace(operator, args=(*operator.args[:3], None, 0.0, True), kwargs=kept)


class _Masks:
    """What is known of values that are computed from nothing."""

    def __init__(self, lowered: Lowered) -> None:
        self._values = lowered.values
        self._producer: Mapping[str, Operator] = {
            value: operator for operator in lowered.operators for value in operator.outputs if value
        }
        self._known: dict[str, _Known] = {}
        self._triangles: dict[int, tuple[Tensor, bool]] = {}  # by the identity of a tensor, which lives as long

    def is_causal(self, operator: Operator) -> bool:
        """Whether an attention's mask is the causal triangle."""
        mask = operator.argument(3, "attn_mask")
        if (
            not isinstance(mask, Ref)
            or operator.argument(4, "dropout_p", 0.0)
            or operator.argument(5, "is_causal", False)
        ):
            return False
        rows, columns = (self._values[operator.inputs[place]].shape[-2] for place in (0, 1))
        if rows != columns or rows < 2 or self._values[mask.value].shape[-2:] != (rows, columns):
            return False
        found = self.known(mask.value)
        if isinstance(found, Tensor):
            if id(found) not in self._triangles:
                self._triangles[id(found)] = found, _is_triangle(found, rows)
            return self._triangles[id(found)][1]
        return isinstance(found, _Triangle)

    def known(self, value: str) -> _Known:
        """A value that follows from constants alone."""
        waiting = [value]
        while waiting:  # not by recursion: models are deep
            operator = self._producer.get(waiting[-1])
            missing = [] if operator is None else [name for name in operator.inputs if name not in self._known]
            if missing and all(self._may_be_constant(name) for name in missing):
                waiting.extend(missing)
                continue
            name = waiting.pop()
            if name not in self._known:
                self._known[name] = None if missing or operator is None else self._computed(operator, name)
        return self._known[value]

    def _may_be_constant(self, value: str) -> bool:
        operator = self._producer.get(value)
        if operator is None or len(operator.outputs) != 1 or self._values[value].requires_grad:
            return False
        return not any(word in operator.target for word in _NOT_CONSTANT)

    def _computed(self, operator: Operator, value: str) -> _Known:
        given = [self._known[name] for name in operator.inputs]
        if any(known is None for known in given) or not self._may_be_constant(value):
            return None
        kind, shape = operator.target.split(".")[1], self._values[value].shape
        if any(isinstance(known, _Triangle) for known in given):
            return self._of_triangle(operator, kind, given)
        tensors = [known for known in given if isinstance(known, Tensor)]
        if kind in _HANDING_ON and len(given) == 1 and self._values[operator.inputs[0]].shape == shape:
            return given[0]  # the same object, which has been looked at in another block
        if kind == "expand" and len(tensors) == 1:
            return tensors[0].reshape((1,) * (len(shape) - tensors[0].dim()) + tensors[0].shape)
        pointwise = kind in _POINTWISE
        if kind in _COMPARING and len(tensors) == 2:
            wide = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
            if wide.numel() > _MOST_COMPUTED:
                return _compared(kind, tensors[0], tensors[1])
        whole = (
            tensors if pointwise else [self._whole(t, name) for t, name in zip(tensors, operator.inputs, strict=True)]
        )
        sizes = torch.broadcast_shapes(*(t.shape for t in whole)) if pointwise and whole else torch.Size(shape)
        if max([sizes.numel(), *(tensor.numel() for tensor in whole)]) > _MOST_COMPUTED:
            return None
        return _narrowed(_run(operator, whole))

    def _whole(self, tensor: Tensor, value: str) -> Tensor:
        return tensor.expand(self._values[value].shape)

    def _of_triangle(self, operator: Operator, kind: str, given: list[_Known]) -> _Known:
        """What an operator makes of the triangle, if it is one again."""
        if kind in _TOGETHER:
            others = [known for known in given if isinstance(known, Tensor)]
            return _Triangle() if all(other.dtype == torch.bool and bool(other.all()) for other in others) else None
        before, after = self._values[operator.inputs[0]].shape, self._values[operator.outputs[0]].shape
        if kind in _HANDING_ON and len(given) == 1 and before[-2:] == after[-2:]:
            in_front = kind != "unsqueeze" or operator.args[1] % (len(before) + 1) < len(before) - 1
            return _Triangle() if in_front else None
        return None


def _run(operator: Operator, tensors: list[Tensor]) -> Tensor:
    supply = iter(tensors)

    def to_torch(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return next(supply)
        if isinstance(tree, TorchName):
            return getattr(torch, tree.name.removeprefix("torch."))
        if isinstance(tree, DeviceArgument):
            return torch.device("cpu")
        return [to_torch(item) for item in tree] if isinstance(tree, tuple) else tree

    args = [to_torch(item) for item in operator.args]
    kwargs = {name: to_torch(item) for name, item in operator.kwargs}
    result: Tensor = resolve_target(operator.target)(*args, **kwargs)
    return result


def _narrowed(tensor: Tensor) -> Tensor:
    """The tensor with every dim along which it does not change at size 1."""
    for dim, size in enumerate(tensor.shape):
        first, last = tensor.narrow(dim, 0, 1), tensor.narrow(dim, size - 1, 1) if size else tensor
        if size > 1 and torch.equal(first, last) and bool((tensor == first).all()):
            tensor = first
    return tensor


def _compared(kind: str, left: Tensor, right: Tensor) -> _Known:
    """A growing row compared with a growing column: by its entries on the diagonal and beside it."""
    row, column = (left, right) if kind in ("le", "lt") else (right, left)
    size = row.shape[-1]
    if row.numel() != size or column.numel() != size or column.dim() < 2 or column.shape[-2] != size:
        return None
    places, limits = row.flatten(), column.flatten()
    compare = torch.le if kind in ("le", "ge") else torch.lt
    grows = bool((places[1:] >= places[:-1]).all())
    inside, outside = bool(compare(places, limits).all()), bool(compare(places[1:], limits[:-1]).any())
    return _Triangle() if grows and inside and not outside else None


def _is_triangle(mask: Tensor, size: int) -> bool:
    """Whether a mask of bool, or one that is added, lets each row see what is no later than itself."""
    if mask.shape[-2:] != (size, size) or mask.numel() != size * size:
        return False
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    mask = mask.reshape(size, size)
    if mask.dtype == torch.bool:
        return torch.equal(mask, seen)
    lowest = torch.finfo(mask.dtype).min  # added to any score it leaves a probability of zero
    return bool((mask[seen] == 0).all()) and bool((mask[~seen] <= lowest).all())
