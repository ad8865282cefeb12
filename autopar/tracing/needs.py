"""Which results of an operator need a gradient: torch itself is asked, once for each kind, on tensors without data."""

from __future__ import annotations

from typing import Any

import torch

from autopar.graph import refs
from autopar.tracing.autocast import Lowering
from autopar.tracing.targets import resolve_target


class Gradients:
    """Answers for the operators of one lowering, and remembers."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self._known: dict[Any, tuple[bool, ...]] = {}

    def needed(self, target: str, args: Any, kwargs: dict[str, Any], outputs: list[Any]) -> tuple[bool, ...]:
        """For each output, whether it needs a gradient."""
        values = self._lowering.lowered.values
        flags = tuple(values[ref.value].requires_grad for ref in refs((args, tuple(kwargs.values()))))
        floats = tuple(isinstance(o, torch.Tensor) and (o.is_floating_point() or o.is_complex()) for o in outputs)
        if not any(flags) or not any(floats):
            return (False,) * len(outputs)
        key = (target, flags, floats)
        if key not in self._known:
            self._known[key] = self._asked(target, args, kwargs, floats)
        return self._known[key]

    def _asked(self, target: str, args: Any, kwargs: dict[str, Any], floats: tuple[bool, ...]) -> tuple[bool, ...]:
        to_torch = self._lowering.to_torch
        try:
            with self._lowering.capture.fake_mode, torch.enable_grad():
                result = resolve_target(target)(*to_torch(args, True), **to_torch(kwargs, True))
        except Exception:  # an operator that does not run on tensors without data twice: torch's usual rule
            return floats
        found = list(result) if isinstance(result, (tuple, list)) else [result]
        gradients = [isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in found]
        return tuple(gradients + [False] * (len(floats) - len(gradients)))
