"""Samples of mixtures of experts, and of what balances their load."""

from __future__ import annotations

from typing import Any

from autopar.graph import Slot, TorchName
from tests.properties.sample import Given, I, N, Sample, T


def _row(number: int) -> Slot:
    return Slot("row", number)


def _step(target: str, *args: Any, widths: tuple[int, ...], **kwargs: Any) -> tuple[Any, ...]:
    """A step of a mixture's body."""
    return target, args, tuple(kwargs.items()), tuple((width, TorchName("torch.float64")) for width in widths)


def mixtures() -> list[Sample]:
    """Experts with a gate, whose halves lie side by side or take turns, with biases, of one and of several layers."""
    weights = [Slot("parameter", index) for index in range(4)]
    gated = (
        _step("linear", _row(0), weights[0], widths=(8,)),
        _step("aten.chunk.default", _row(1), 2, -1, widths=(4, 4)),
        _step("aten.gelu.default", _row(2), widths=(4,), approximate="tanh"),
        _step("aten.mul.Tensor", _row(4), _row(3), widths=(4,)),
        _step("linear", _row(5), weights[1], widths=(3,)),
    )
    turning = (
        _step("matmul", _row(0), weights[0], widths=(8,)),
        _step("bias", weights[1], widths=(8,)),
        _step("aten.add.Tensor", _row(1), _row(2), widths=(8,)),
        _step("aten.slice.Tensor", _row(3), -1, 0, None, 2, widths=(4,)),
        _step("aten.slice.Tensor", _row(3), -1, 1, None, 2, widths=(4,)),
        _step("aten.mul.Tensor", _row(4), _row(5), widths=(4,)),
        _step("matmul", _row(6), weights[2], widths=(3,)),
        _step("bias", weights[3], widths=(3,)),
        _step("aten.add.Tensor", _row(7), _row(8), widths=(3,)),
    )
    bent = (  # what follows the second layer is not linear, so that the width between the two may not be split
        _step("linear", _row(0), weights[0], widths=(4,)),
        _step("aten.tanh.default", _row(1), widths=(4,)),
        _step("linear", _row(2), weights[1], widths=(3,)),
        _step("aten.tanh.default", _row(3), widths=(3,)),
    )
    single = (_step("linear", _row(0), weights[0], widths=(3,)),)

    found = [Sample("aten.histc.default", (N(12, low=0.0, high=4.0), 4, 0, 4))]

    def mixture(body: tuple[Any, ...], *parameters: Given, experts: int, chosen: int = 2, **how: Any) -> None:
        routing = (T(8, 5), I(experts, 8, chosen), T(8, chosen))
        meshes = how.get("meshes", ((4,), (2, 2)))
        found.append(Sample("autopar.experts.default", (*routing, parameters, body, how.get("dtype")), (), meshes))

    mixture(gated, T(4, 8, 5), T(4, 3, 4), experts=4)
    mixture(gated, T(6, 8, 5), T(6, 3, 4), experts=6, chosen=3)
    mixture(turning, T(5, 5, 8), T(5, 8), T(5, 4, 3), T(5, 3), experts=5, dtype=TorchName("torch.float64"))
    mixture(bent, T(4, 4, 5), T(4, 3, 4), experts=4)
    mixture(single, T(4, 3, 5), experts=4, chosen=1, meshes=((4,),))
    return found
