"""Halos between processes over gloo, also in a compiled program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autopar.runtime import Mesh, Split, halo
from tests.e2e.test_runtime_gloo import spawn

pytestmark = pytest.mark.e2e


def run_convolution() -> None:
    mesh = Mesh(space=2)
    mesh.bind()
    torch.manual_seed(0)
    x, weight = torch.rand(2, 3, 7, 4, dtype=torch.float64), torch.rand(3, 3, 5, 3, dtype=torch.float64)
    expected = x.clone().requires_grad_()
    whole = F.conv2d(expected, weight, padding=(2, 1)).sin()
    whole.sum().backward()
    ((first, stop),) = Split(7, (mesh.space, None)).intervals()

    def local(piece: torch.Tensor) -> torch.Tensor:
        return F.conv2d(halo(piece, 2, mesh.space, 2, 2), weight, padding=(0, 1)).sin()

    for function in (local, torch.compile(local, fullgraph=True, backend="aot_eager")):
        piece = x[:, :, first:stop].clone().requires_grad_()
        y = function(piece)
        y.sum().backward()
        torch.testing.assert_close(y, whole[:, :, first:stop], rtol=0, atol=1e-12)
        torch.testing.assert_close(piece.grad, expected.grad[:, :, first:stop], rtol=0, atol=1e-12)


def test_halos_between_processes() -> None:
    spawn(run_convolution)
