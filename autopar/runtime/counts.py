"""Numbers of the whole step that its micro-batches divide by, found before the first of them runs.

Enters: the program's ``COUNTS``, and this rank's shares of the inputs of all micro-batches. Leaves: ``mesh.count(name)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autopar.runtime import collectives
from autopar.runtime.mesh import Mesh
from autopar.runtime.program import Count


class Counts:
    """The counts of one program."""

    def __init__(self, counts: Sequence[Count], mesh: Mesh) -> None:
        self._mesh = mesh
        self._counted: list[tuple[Count, nn.Module]] = [(count, count.make().to(mesh.device)) for count in counts]

    @torch.no_grad()
    def find(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Set the mesh's counts: sums over all micro-batches, and over the axes that cut the labels."""
        self._mesh.counts = {}
        for count, module in self._counted:
            terms = [
                _number(module(**{name: shares[name] for name in count.takes}), count.ignore_index)
                for shares in micro_batches
            ]
            total = torch.stack(terms).sum(0)
            for axis in count.axes:
                total = collectives.all_reduce(total, axis)
            self._mesh.counts[count.name] = total


def _number(found: Tensor, ignore_index: int | None) -> Tensor:
    """How many labels count; or the number itself, where the module returns one."""
    return found if ignore_index is None else (found != ignore_index).sum()
