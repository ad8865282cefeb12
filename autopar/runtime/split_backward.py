"""Backward in two parts, as zero-bubble schedules want it: gradients of a stage's inputs first, those of its weights later.

A node of the autograd graph is *on the path* when an input of the stage can be reached from it. A weight enters the path at
the nodes where something computed of weights alone meets it. The first part runs the path alone and keeps the gradients
that arrive at those nodes; the second runs each such node again, towards its weights only.

Where a weight enters at several nodes, running them again would run, and send, what lies between them a second time
(and counted gradients twice in torch.distributed.pipelining, pytorch issue 180952): such a backward is not split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Entry:
    """A node where weights enter the path, and the gradients of its results, once it has run."""

    node: Node
    weights: list[Tensor]
    gradients: list[Tensor | None] = field(default_factory=list)

    def keep(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.gradients = list(gradients)


class WeightPart:
    """The second part of one backward."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = entries

    def run(self) -> None:
        """Add to the gradients of the weights."""
        while self._entries:
            entry = self._entries.pop(0)
            known = [(at, gradient) for at, gradient in enumerate(entry.gradients) if gradient is not None]
            if known:
                edges = [GradientEdge(entry.node, at) for at, _ in known]
                torch.autograd.backward(edges, [gradient for _, gradient in known], inputs=entry.weights)


def backward_of_inputs(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightPart] | None:
    """Gradients of ``inputs`` and the part that is left; None, with nothing done, where backward cannot be split."""
    entries = _entries(outputs, inputs, weights)
    if entries is None:
        return None
    handles = [entry.node.register_prehook(entry.keep) for entry in entries]
    try:
        found = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return list(found), WeightPart(entries)


def _entries(outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[_Entry] | None:
    """Where the weights enter the path; None where one does not enter it at exactly one node."""
    roots = [output.node for output in outputs]
    parents = _parents(roots)
    path = _above([get_gradient_edge(given).node for given in inputs], parents)
    found: dict[Node, _Entry] = {}
    for weight in weights:
        node = get_gradient_edge(weight).node
        if node not in parents:
            continue  # not used
        places = _meets(node, parents, path, set(roots))
        if len(places) != 1 or not places <= path:
            return None
        place = next(iter(places))
        found.setdefault(place, _Entry(place, [])).weights.append(weight)
    return list(found.values())


def _parents(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """For every node of the graph the nodes that hand it a gradient."""
    parents: dict[Node, list[Node]] = {}
    waiting: deque[Node] = deque()
    for root in roots:
        if root not in parents:
            parents[root] = []
            waiting.append(root)
    while waiting:
        node = waiting.popleft()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in parents:
                parents[child] = []
                waiting.append(child)
            parents[child].append(node)
    return parents


def _above(starts: Sequence[Node], parents: dict[Node, list[Node]]) -> set[Node]:
    """The nodes from which one of ``starts`` is reached, and these."""
    found = {node for node in starts if node in parents}
    waiting = list(found)
    while waiting:
        for parent in parents[waiting.pop()]:
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def _meets(node: Node, parents: dict[Node, list[Node]], path: set[Node], roots: set[Node]) -> set[Node]:
    """The first nodes of the path above ``node``, and roots that it reaches beside the path; no more than two or so."""
    found: set[Node] = set()
    seen, waiting = {node}, [node]
    while waiting and len(found) < 2:
        current = waiting.pop()
        if current in roots:
            found.add(current)
        for parent in parents[current]:
            if parent in path:
                found.add(parent)
            elif parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return found
