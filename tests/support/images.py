"""Models of images, volumes and fields: small ones with everything that those of practice have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models import Cluster

Inputs = dict[str, Tensor]


def slow_links(num_devices: int) -> Cluster:
    """Devices with so little between them that a plan sends as few bytes as it can: halos and sums, not whole images."""
    cluster = Cluster.local(num_devices, kind="cpu", memory_bytes=2**34, num_cores=num_devices)
    (node,) = cluster.nodes
    return replace(cluster, nodes=(replace(node, link=replace(node.link, bandwidth_bytes_per_second=1e4)),))


class ResidualBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, num_blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(*(ResidualBlock(4 if not at else 8, 8, 1 if at else 2) for at in range(num_blocks)))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.pool(self.blocks(self.stem(x))).flatten(1)), labels)


class UNet3d(nn.Module):
    """One level down and up again. ``up``: ``transposed``, ``nearest`` or ``trilinear``; ``norm``: ``group``, ``batch`` or
    ``instance``."""

    def __init__(self, up: str, norm: str) -> None:
        super().__init__()

        def twice(width: int, out: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for channels in (width, out):
                norms = {"group": nn.GroupNorm(2, out), "batch": nn.BatchNorm3d(out)}
                layers += [nn.Conv3d(channels, out, 3, padding=1)]
                layers += [norms.get(norm) or nn.InstanceNorm3d(out, affine=True), nn.SiLU()]
            return nn.Sequential(*layers)

        self.down, self.bottom, self.last = twice(1, 4), twice(4, 4), twice(8, 4)
        self.up: nn.Module = nn.ConvTranspose3d(4, 4, 4, 2, 1) if up == "transposed" else nn.Upsample(None, 2.0, up)
        self.pool = nn.MaxPool3d(2) if up == "transposed" else nn.AvgPool3d(2)
        self.head = nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first = self.down(x)
        joined = torch.cat([self.up(self.bottom(self.pool(first))), first], 1)
        return F.cross_entropy(self.head(self.last(joined)), labels)


class SpectralConv2d(nn.Module):
    """The lowest frequencies of both signs along the first dim, times weights (Li et al., ICLR 2021)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.positive = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.complex64) / width)
        self.negative = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.complex64) / width)

    def forward(self, x: Tensor) -> Tensor:
        modes, given = self.modes, torch.fft.rfft2(x)
        made = torch.zeros(*given.shape, dtype=given.dtype, device=x.device)
        made[:, :, :modes, :modes] = torch.einsum("bixy,ioxy->boxy", given[:, :, :modes, :modes], self.positive)
        made[:, :, -modes:, :modes] = torch.einsum("bixy,ioxy->boxy", given[:, :, -modes:, :modes], self.negative)
        return torch.fft.irfft2(made, s=x.shape[-2:])


class FourierOperator2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.spectral = nn.Conv2d(3, 4, 1), SpectralConv2d(4, 3)
        self.local, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.lift(x)
        return F.mse_loss(self.head(F.gelu(self.spectral(x) + self.local(x))), target)


class FourierOperator1d(nn.Module):
    def __init__(self, modes: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.lift, self.head = nn.Linear(2, 6), nn.Linear(6, 1)
        self.weight = nn.Parameter(torch.randn(6, 6, modes, dtype=torch.complex64) / 6)
        self.local = nn.Conv1d(6, 6, 5, padding="same")

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.lift(x).transpose(1, 2)
        product = torch.einsum("bix,iox->box", torch.fft.rfft(x)[..., : self.modes], self.weight)
        x = F.gelu(torch.fft.irfft(product, n=x.shape[-1]) + self.local(x))
        return F.mse_loss(self.head(x.transpose(1, 2)), target)


def image_model(name: str) -> tuple[nn.Module, Inputs]:
    """``resnet``, ``resnet-deep``, ``unet-<up>-<norm>``, ``fno1d`` or ``fno2d``, with inputs."""
    torch.manual_seed(0)
    kind, *how = name.split("-")
    made: dict[str, Any] = {
        "resnet": lambda: (ResNet(2 if how else 1), {"x": torch.randn(2, 3, 32, 24), "labels": torch.tensor([1, 3])}),
        "unet": lambda: (UNet3d(*how), {"x": torch.randn(2, 1, 8, 8, 4), "labels": torch.randint(0, 2, (2, 8, 8, 4))}),
        "fno1d": lambda: (FourierOperator1d(), {"x": torch.randn(2, 15, 2), "target": torch.randn(2, 15, 1)}),
        "fno2d": lambda: (FourierOperator2d(), {"x": torch.randn(2, 3, 9, 8), "target": torch.randn(2, 1, 9, 8)}),
    }
    model, inputs = made[kind]()
    return model, inputs
