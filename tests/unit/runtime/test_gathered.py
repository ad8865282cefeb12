"""What autograd keeps while saved tensors pass through Gathers."""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.gathered import Gathers
from autopar.runtime.split_backward import backward_of_inputs


def test_a_split_backward_leaves_nothing_behind() -> None:
    """The first part keeps its graph for the second, so that only the last reference frees it."""
    weight = torch.ones(4, 4, requires_grad=True)
    given = torch.ones(3, 4, requires_grad=True)
    with Gathers().saving():
        product = given @ weight
        bent = product.tanh()  # saves its own result
        result = (bent * product).sum()
    kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in (product, bent)]
    edges = [get_gradient_edge(result)]
    del product, bent, result
    split = backward_of_inputs(edges, [torch.ones(())], [given], [weight])
    assert split is not None
    split[1].run()
    del split, edges
    assert weight.grad is not None
    assert all(reference.expired() for reference in kept)
