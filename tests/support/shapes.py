"""Small models whose blocks hang together in unusual ways, for tests of what is made from repeated blocks."""

from __future__ import annotations

import torch
from torch import nn


class _Layer(nn.Module):
    """A residual layer that also returns a statistic of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.up(x).relu()
        return x + self.down(h), h.mean()


class _Base(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(num_layers))
        self.head = nn.Linear(8, 3)


class Collecting(_Base):
    """Every layer's statistic is read after the last layer."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = []
        for layer in self.layers:
            x, statistic = layer(x)
            found.append(statistic)
        return {"loss": self.head(x).square().mean() + torch.stack(found).sum(), "last": found[-1]}


class Adding(_Base):
    """Every layer's statistic is added to a sum between the layers."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        total = x.new_zeros(())
        for layer in self.layers:
            x, statistic = layer(x)
            total = total + statistic
        return {"loss": self.head(x).square().mean() + total}


class Showing(_Base):
    """Every layer's result is an output."""

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        hidden = []
        for layer in self.layers:
            x, _ = layer(x)
            hidden.append(x)
        return {"loss": self.head(x).square().mean(), "hidden": hidden}


class Skipping(_Base):
    """A layer also reads what stood two layers before."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        before = [x, x]
        for layer in self.layers:
            x, _ = layer(x + before[-2])
            before.append(x)
        return {"loss": self.head(x).square().mean()}


class _Shared(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight * scale + self.bias)


class Tying(nn.Module):
    """All layers share one weight and read a constant and a buffer; the output is the input beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.layers = nn.ModuleList(_Shared(weight) for _ in range(3))
        self.register_buffer("scale", torch.rand(8))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        given = x
        for layer in self.layers:
            x = layer(x, self.scale)
        signs = torch.tensor([1.0, -1.0] * 4, dtype=x.dtype)
        return {"loss": (x * signs * self.frozen).square().mean(), "given": given, "weight": self.layers[0].weight}


SHAPES = {"collecting": Collecting, "adding": Adding, "showing": Showing, "skipping": Skipping, "tying": Tying}


def shape(name: str, batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model in training mode and a batch for it."""
    return SHAPES[name]().train(), {"x": torch.randn(batch, 8)}
