"""Every step, forward and backward, on simulated ranks against the whole tensor, and its bytes against the price."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from autopar import reshard
from autopar.layout import PARTIAL, SUMMED_GRADIENT, Layout, Shard, State, indices, layout_text, parse_layout, splits_of
from autopar.runtime import Axis, Mesh, Split, steps
from autopar.simulation import run_ranks


def layout_of(text: str, shape: Sequence[int]) -> Layout:
    """``S0,R`` for a tensor of ``shape``: plain cuts may be left out."""
    words = [f"{word}[1x{shape[int(word[1:])]}/1]" if word[1:].isdigit() else word for word in text.split(",")]
    return parse_layout(",".join(words))


def is_partial(state: State, backward: bool) -> bool:
    """Whether the value, or its gradient, is a sum of terms."""
    return state == (SUMMED_GRADIENT if backward else PARTIAL)


def share(whole: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], place: Sequence[int]) -> torch.Tensor:
    """What the device at ``place`` holds of a sharded or replicated value."""
    for dim in range(whole.dim()):
        splits = splits_of(layout, dim, mesh_shape, place)
        whole = whole.index_select(dim, torch.from_numpy(indices(whole.shape[dim], splits)))
    return whole


def term(whole: torch.Tensor, partial_axes: Sequence[bool], place: Sequence[int], seed: int = 0) -> torch.Tensor:
    """A tensor that adds up to ``whole`` over the axes of ``partial_axes``."""
    generator = torch.Generator().manual_seed(seed)
    for axis, partial in enumerate(partial_axes):
        if partial:
            others = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
            whole = whole - others if place[axis] == 0 else others
    return whole


def local(
    whole: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], place: Sequence[int], backward: bool = False
) -> torch.Tensor:
    """This device's part of a value, or of a gradient, in ``layout``: shares of terms of a sum."""
    partial = [is_partial(state, backward) for state in layout]
    if sum(partial) > 1:
        raise NotImplementedError("one partial axis at a time keeps the oracle simple")
    if any(partial) and mesh_shape[partial.index(True)] > 2:
        size = mesh_shape[partial.index(True)]
        weights = torch.arange(1, size + 1, dtype=torch.float64)
        return share(whole * (weights / weights.sum())[place[partial.index(True)]], layout, mesh_shape, place)
    return share(term(whole, partial, place), layout, mesh_shape, place)


def splits_for(layout: Layout, dim: int, size: int, axes: Sequence[Axis]) -> Split:
    """The runtime's split of one dim in a layout."""
    cuts = [
        (axes[axis], None if state.cut.is_plain else str(state.cut))
        for axis, state in enumerate(layout)
        if isinstance(state, Shard) and state.dim == dim
    ]
    return Split(size, *cuts)


def apply_step(step: reshard.Step, before: Layout, shape: Sequence[int], x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Call the runtime's function for ``step``."""
    axis = mesh.axes[step.axis]
    function: Callable[..., torch.Tensor] = getattr(steps, step.name)
    after = (*before[: step.axis], step.target, *before[step.axis + 1 :])
    if step.name == "all_to_all":
        source, target = step.source, step.target
        assert isinstance(source, Shard) and isinstance(target, Shard)
        return function(
            x,
            axis,
            source.dim,
            target.dim,
            splits_for(before, source.dim, shape[source.dim], mesh.axes),
            splits_for(after, target.dim, shape[target.dim], mesh.axes),
        )
    if isinstance(step.source, Shard):
        return function(
            x, axis, step.source.dim, splits_for(before, step.source.dim, shape[step.source.dim], mesh.axes)
        )
    if isinstance(step.target, Shard):
        return function(x, axis, step.target.dim, splits_for(after, step.target.dim, shape[step.target.dim], mesh.axes))
    return function(x, axis)


def check_way(rank: int, source: Layout, target: Layout, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    """Walk from ``source`` to ``target`` and back, compare values, gradients and bytes."""
    mesh = Mesh(**dict(zip(("a", "b"), mesh_shape, strict=False)))
    mesh.bind()
    place = [axis.place for axis in mesh.axes]
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = local(whole, source, mesh_shape, place).requires_grad_()
    mesh.keep_ledger(True)
    assert mesh.ledger is not None
    y, current = x, source
    for step in reshard.steps(source, target):
        y = apply_step(step, current, shape, y, mesh)
        current = (*current[: step.axis], step.target, *current[step.axis + 1 :])
    ahead, back = reshard.traffic(source, target, shape, mesh_shape, 8)
    if rank == 0:
        sent = [(entry.kind, entry.axis, entry.num_bytes) for entry in mesh.ledger.entries]
        assert sent == [(t.kind, "ab"[t.axis], t.num_bytes) for t in ahead if t.num_bytes]
    compare(y.detach(), whole, target, mesh, backward=False)
    mesh.ledger.clear()
    y.backward(local(gradient, target, mesh_shape, place, backward=True))
    if rank == 0:
        sent = [(entry.kind, entry.axis, entry.num_bytes) for entry in mesh.ledger.entries]
        assert sent == [(t.kind, "ab"[t.axis], t.num_bytes) for t in back if t.num_bytes]
    assert x.grad is not None
    compare(x.grad, gradient, source, mesh, backward=True)


def compare(found: torch.Tensor, whole: torch.Tensor, layout: Layout, mesh: Mesh, backward: bool) -> None:
    """Sum partial axes, then compare with this device's share of the whole."""
    for axis, state in enumerate(layout):
        if is_partial(state, backward):
            found = steps.reduce_from(found, mesh.axes[axis])
    wanted = share(whole, layout, mesh.shape, [axis.place for axis in mesh.axes])
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


ONE_AXIS = ["R", "G", "P", "S0", "S1", "S0[2x6/1]", "S0[1x8/2+1x4/2]", "S1[1x7/7]"]


@pytest.mark.parametrize("size", [2, 3])
def test_one_axis(size: int) -> None:
    shape = (12, 7)
    layouts = [layout_of(text, shape) for text in ONE_AXIS]

    def ranks(rank: int) -> None:
        for source, target in itertools.product(layouts, layouts):
            if source != target:
                check_way(rank, source, target, shape, (size,))

    run_ranks(size, ranks)


TWO_AXES = [
    "S0,S0", "S0,R", "R,S0", "G,S0", "S0,G", "R,R", "S1,S0", "S0,S1", "P,S0", "S1,S1", "G,R", "S0[2x6/3],S0[2x6/1]",
    "S1[1x4/2+1x7/1],S0", "G,S1[1x4/2+1x7/1]",
]  # fmt: skip


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3)])
def test_two_axes(mesh_shape: tuple[int, int]) -> None:
    shape = (12, 11)
    layouts = [layout_of(text, shape) for text in TWO_AXES]
    count = [0]

    def ranks(rank: int) -> None:
        for source, target in itertools.product(layouts, layouts):
            if source == target:
                continue
            try:
                reshard.steps(source, target)
            except AssertionError:
                continue
            try:
                check_way(rank, source, target, shape, mesh_shape)
            except Exception as error:
                raise AssertionError(f"{layout_text(source)} -> {layout_text(target)}: {error}") from error
            count[0] += rank == 0

    run_ranks(mesh_shape[0] * mesh_shape[1], ranks)
    assert count[0] > 100


def test_names_are_those_of_reshard() -> None:
    assert set(steps.PAIRS) == set(reshard.COLLECTIVES)
