"""A mixture of experts written as einsums: the search may split the experts over devices as it splits any other dim.

python examples/mixture_of_experts.py                      shows how experts are split on one node of 8 H100
autopar run examples/mixture_of_experts.py:model --cluster local:2 --steps 5
"""

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.report import text


class Experts(nn.Module):
    """Top-1 routing with room for ``capacity`` tokens of each sequence in each expert; the rest passes by."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        mask = F.one_hot(chosen, self.experts).to(x.dtype)
        place = (mask.cumsum(1) * mask - 1).long()
        slots = F.one_hot(place.clamp(0, self.capacity - 1), self.capacity).to(x.dtype)
        dispatch = slots * (mask * (place < self.capacity)).unsqueeze(-1)
        tokens = torch.einsum("bsec,bsm->becm", dispatch, x)
        hidden = F.gelu(torch.einsum("becm,emh->bech", tokens, self.up))
        out = torch.einsum("bech,ehm->becm", hidden, self.down)
        return x + torch.einsum("becm,bsec->bsm", out, dispatch * weight[..., None, None])


class Net(nn.Module):
    """Embedding, layers of experts, head; returns the loss."""

    def __init__(self, vocabulary: int, width: int, layers: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Experts(width, experts, capacity) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(self.embed(ids))).flatten(0, 1), labels.flatten())


def model(width=64, layers=2, experts=8, batch=8, sequence=32):
    torch.manual_seed(0)
    ids = torch.randint(256, (batch, sequence))
    return Net(256, width, layers, experts, capacity=sequence // 4), {"ids": ids, "labels": ids.roll(-1, 1)}


if __name__ == "__main__":
    with torch.device("meta"):
        large, batch = model(width=4096, layers=8, experts=16, batch=16, sequence=512)
    print(text(autopar.plan(large, autopar.Cluster.homogeneous(num_nodes=1, devices_per_node=8), batch).report()))
