"""Parameter slots: layouts at rest and in use, ZeRO levels, traffic, chunks, optimizers."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import layout as planned
from autopar import reshard
from autopar.runtime import Engine, Mesh, ProgramError, collectives, load_program, parameter
from autopar.runtime import zero as zeros
from autopar.runtime.gathered import Gathers
from autopar.runtime.gradients import GradientReducer
from autopar.runtime.parameters import ParameterSlot, local_of
from autopar.simulation import run_ranks
from tests.unit.runtime import programs
from tests.unit.runtime.training import check_pieces, make_engine

SHAPE = (12, 7)

# use, store: ZeRO axes are those where use has G and store has S
LAYOUTS = [
    ("G,S0", "S1,S0"),
    ("G,S0", "S0,S0"),  # nested on the same dim
    ("G,S0[3x4/2]", "S1,S0[3x4/2]"),
    ("G,S0[3x4/2]", "S0,S0[3x4/2]"),
    ("G,G", "S0,S0"),
    ("G,G", "S1,R"),  # sharded over the first axis, summed over the second
    ("G,G", "G,S0"),
    ("G,R", "S1,R"),
    ("R,G", "R,S1"),
    ("S1,G", "S1,S0"),
    ("S1,G", "S1,S1"),
    ("G,G", "S1[1x3/1+1x4/2],S0"),
]


def use_whole(slot: ParameterSlot, mesh: Mesh, use: planned.Layout, gradient: Tensor) -> Tensor:
    """A loss whose gradient with respect to the whole parameter is ``gradient``: this rank's term of it."""
    place = [axis.place for axis in mesh.axes]
    for axis, state in enumerate(use):
        if state == planned.SUMMED_GRADIENT:
            weights = torch.arange(1.0, mesh.shape[axis] + 1, dtype=torch.float64)
            gradient = gradient * (weights / weights.sum())[place[axis]]
    for dim in range(gradient.dim()):
        held = planned.indices(gradient.shape[dim], planned.splits_of(use, dim, mesh.shape, place))
        gradient = gradient.index_select(dim, torch.from_numpy(held))
    weight: Tensor = slot()
    assert weight.shape == gradient.shape
    return (weight * gradient).sum()


def layout_of(text: str) -> planned.Layout:
    words = [f"{word}[1x{SHAPE[int(word[1:])]}/1]" if word[1:].isdigit() else word for word in text.split(",")]
    return planned.parse_layout(",".join(words))


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_rest_and_use(mesh_shape: tuple[int, int], zero: int) -> None:
    """Values in use, gradients at rest, and bytes equal to the planner's, for every pair of layouts."""

    def ranks(rank: int) -> None:
        for use_text, store_text in LAYOUTS:
            mesh = Mesh(a=mesh_shape[0], b=mesh_shape[1])
            mesh.bind()
            slot = parameter(mesh, "weight", SHAPE, torch.float64, use=use_text, store=store_text, zero=zero)
            slot.allocate(mesh.device)
            reducer = GradientReducer([slot])
            generator = torch.Generator().manual_seed(5)
            whole = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
            gradient = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
            slot.fill(partial(torch.clone, whole))
            mesh.keep_ledger(True)
            slot.refresh()
            slot.refresh()
            use = layout_of(use_text)
            use_whole(slot, mesh, use, gradient).backward()
            reducer.finish()
            check_pieces(slot, slot.storage, whole)
            check_pieces(slot, slot.storage.grad, gradient)
            if rank == 0:
                check_traffic(mesh, use, layout_of(store_text))
            use_whole(slot, mesh, use, gradient).backward()
            reducer.finish()
            check_pieces(slot, slot.storage.grad, 2 * gradient)

    run_ranks(mesh_shape[0] * mesh_shape[1], ranks)


@pytest.mark.parametrize("bucket_bytes", [1, 1500, 2**20])
@pytest.mark.parametrize("zero", [1, 2])
def test_shards_travel_together(bucket_bytes: int, zero: int) -> None:
    """Many parameters in buckets of any size: the same values and the same bytes as one by one."""

    def ranks(rank: int) -> None:
        mesh = Mesh(a=2, b=2)
        mesh.bind()
        generator = torch.Generator().manual_seed(6)
        slots, wholes, wanted = [], [], Counter[tuple[str, str]]()
        for number, (use, store) in enumerate(LAYOUTS):
            slot = parameter(mesh, f"w{number}", SHAPE, torch.float64, use=use, store=store, zero=zero)
            slot.allocate(mesh.device)
            wholes.append(torch.randn(SHAPE, generator=generator, dtype=torch.float64))
            slot.fill(partial(torch.clone, wholes[-1]))
            slots.append(slot)
            for kind, axis, num_bytes in traffic_of(mesh, layout_of(use), layout_of(store)):
                wanted[kind, axis] += num_bytes
        reducer = GradientReducer(slots, bucket_bytes)
        mesh.keep_ledger(True)
        assert mesh.ledger is not None
        zeros.refresh(slots, bucket_bytes)
        zeros.refresh(slots, bucket_bytes)
        losses = [
            use_whole(slot, mesh, layout_of(use), whole)
            for slot, whole, (use, _) in zip(slots, wholes, LAYOUTS, strict=True)
        ]
        torch.stack(losses).sum().backward()
        reducer.finish()
        for slot, whole in zip(slots, wholes, strict=True):
            check_pieces(slot, slot.storage.grad, whole)
        if rank == 0:
            assert mesh.ledger.totals() == dict(wanted)

    run_ranks(4, ranks)


def check_traffic(mesh: Mesh, use: planned.Layout, store: planned.Layout) -> None:
    """The ledger has the planner's collectives between rest and use, forward and backward."""
    assert mesh.ledger is not None
    assert sorted((s.kind, s.axis, s.num_bytes) for s in mesh.ledger.entries) == sorted(traffic_of(mesh, use, store))


def traffic_of(mesh: Mesh, use: planned.Layout, store: planned.Layout) -> list[tuple[str, str, int]]:
    """Kind, axis and bytes of what the planner says a step sends for one parameter."""
    rest = tuple(stored if isinstance(stored, planned.Shard) else used for used, stored in zip(use, store, strict=True))
    ahead, back = reshard.traffic(rest, use, SHAPE, mesh.shape, 8)
    local = 8
    for size in planned.local_shape(SHAPE, rest, mesh.shape):
        local *= size
    wanted = [(t.kind, mesh.axes[t.axis].name, t.num_bytes) for t in (*ahead, *back)]
    wanted += [
        ("all_reduce", mesh.axes[i].name, local) for i, state in enumerate(rest) if state == planned.SUMMED_GRADIENT
    ]
    return wanted


def test_zero_1_gathers_again_only_after_a_change() -> None:
    def ranks(rank: int) -> None:
        mesh = Mesh(data=2)
        mesh.bind()
        slot = parameter(mesh, "weight", (1, 3), torch.float32, use="G", store="S0", zero=1)  # nothing rests on rank 1
        slot.allocate(mesh.device)
        slot.fill(lambda: torch.ones(1, 3))
        mesh.keep_ledger(True)
        assert mesh.ledger is not None
        slot.refresh()
        slot.refresh()
        assert len(mesh.ledger.entries) == 1
        reducer = GradientReducer([slot])
        for foreach in (True, False):
            optimizer = torch.optim.SGD([slot.storage], lr=0.1, foreach=foreach)
            slot().sum().backward()
            reducer.finish()
            slot.refresh()  # a look at the outputs before the optimizer's step
            optimizer.step()
            mesh.ledger.clear()
            slot.refresh()
            assert [entry.kind for entry in mesh.ledger.entries] == ["all_gather"]
            slot.storage.grad = None
            slot.refresh()  # once more: there was a gradient when it was gathered
            mesh.ledger.clear()
            slot.refresh()
            assert not mesh.ledger.entries
        slot.storage.data.zero_()
        slot.invalidate()
        slot.refresh()
        assert torch.equal(slot(), torch.zeros(1, 3))

    run_ranks(2, ranks)


def test_zero_3_keeps_no_whole_weight_between_forward_and_backward() -> None:
    """Saved weights, and views of them, are handles; each use gathers once more in backward."""

    def ranks(rank: int) -> None:
        mesh = Mesh(data=2)
        mesh.bind()
        gathers = Gathers()
        slots = [parameter(mesh, f"w{i}", (8, 8), torch.float64, use="G", store="S0", zero=3) for i in range(3)]
        for slot in slots:
            slot.allocate(mesh.device)
            slot.gathers = gathers
            slot.fill(lambda: torch.eye(8, dtype=torch.float64))
        x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        mesh.keep_ledger(True)
        assert mesh.ledger is not None
        alive = []
        with gathers.saving():
            y = x
            for slot in slots:
                y = torch.nn.functional.linear(y, slot()).sin()  # saves a transposed view
                alive.append(len(gathers))
                weight: Tensor = slot()
                y = y @ weight + (y * 2) @ weight.t()  # two uses of one gathered weight
                del weight
        kinds = [entry.kind for entry in mesh.ledger.entries]
        assert kinds == ["all_gather"] * 6
        collectives.all_reduce(
            torch.zeros(1), mesh.data
        )  # a slower rank may be in the last gather still, holding the result
        gc.collect()
        assert len(gathers) == 0
        assert max(alive) <= 1  # the threaded group may hold on to its last result
        mesh.ledger.clear()
        y.sum().backward()
        kinds = [entry.kind for entry in mesh.ledger.entries]
        assert kinds.count("all_gather") == 6
        assert kinds.count("reduce_scatter") == 6
        assert len(gathers) == 0

    run_ranks(2, ranks)


def test_frozen_parameters_have_no_gradient_and_no_traffic() -> None:
    def ranks(rank: int) -> None:
        mesh = Mesh(data=2)
        mesh.bind()
        frozen = parameter(mesh, "frozen", (4,), torch.float32, use="G", trainable=False)
        number = parameter(mesh, "number", (4,), torch.int64, use="R")
        for slot in (frozen, number):
            slot.allocate(mesh.device)
            slot.fill(partial(torch.ones, 4, dtype=slot.dtype))
        reducer = GradientReducer([frozen, number])
        mesh.keep_ledger(True)
        x = torch.ones(4, requires_grad=True)
        (x * frozen() * number()).sum().backward()
        reducer.finish()
        assert mesh.ledger is not None
        assert not mesh.ledger.entries
        assert frozen.storage.grad is None
        assert not frozen.storage.requires_grad

    run_ranks(2, ranks)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd momentum foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_uneven_and_segmented_pieces(name: str) -> None:
    def ranks(rank: int) -> None:
        mesh = Mesh(a=2, b=2)
        mesh.bind()
        slots, wholes = [], []
        for number, (use, store) in enumerate(LAYOUTS):
            slot = parameter(mesh, f"w{number}", SHAPE, torch.float64, use=use, store=store, zero=1)
            slot.allocate(mesh.device)
            generator = torch.Generator().manual_seed(number)
            wholes.append(nn.Parameter(torch.randn(SHAPE, generator=generator, dtype=torch.float64)))
            slot.fill(wholes[-1].detach)
            slots.append(slot)
        empty = parameter(mesh, "empty", (1, 2), torch.float64, use="G,R", store="S0,R", zero=2)
        empty.allocate(mesh.device)
        empty.fill(lambda: torch.ones(1, 2, dtype=torch.float64))
        slots.append(empty)
        wholes.append(nn.Parameter(torch.ones(1, 2, dtype=torch.float64)))
        make = OPTIMIZERS[name]
        mine, theirs = make([slot.storage for slot in slots]), make(wholes)
        for number in range(3):
            for slot, whole in zip(slots, wholes, strict=True):
                generator = torch.Generator().manual_seed(100 + number)
                whole.grad = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
                local = torch.empty_like(slot.local)
                for chunk, piece in zip(slot.chunks(), slot.chunks(local), strict=True):
                    at = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                    piece.tensor.copy_(whole.grad[at])
                slot.storage.grad = None
                slot.add_gradient(local)
            mine.step()
            theirs.step()
        for slot, whole in zip(slots, wholes, strict=True):
            check_pieces(slot, slot.storage, whole)
            for key, value in mine.state[slot.storage].items():
                if isinstance(value, Tensor) and value.dim():
                    check_pieces(slot, value, theirs.state[whole][key])

    run_ranks(4, ranks)


def test_chunks_tile_the_whole() -> None:
    for use in ["S0,S0", "S0[3x4/2],R", "S0[3x4/2],S1", "S1,S0[1x5/5+1x7/1]", "R,R"]:

        def ranks(rank: int, use: str = use) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
            mesh = Mesh(a=2, b=2)
            mesh.bind()
            slot = parameter(mesh, "w", SHAPE, torch.float32, use=use)
            slot.allocate(mesh.device)
            slot.fill(lambda: torch.arange(84.0).view(SHAPE))
            for offsets, sizes, view in slot.chunks():
                at = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                assert torch.equal(view, torch.arange(84.0).view(SHAPE)[at])
                assert view.untyped_storage().data_ptr() == local_of(slot.storage).untyped_storage().data_ptr()
            return [(chunk.offsets, chunk.sizes) for chunk in slot.chunks()]

        counts = torch.zeros(SHAPE)
        for offsets, sizes in set(itertools.chain.from_iterable(run_ranks(4, ranks))):
            counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert torch.equal(counts, torch.ones(SHAPE)), use


def test_storage_is_a_dtensor_that_aliases_the_leaf() -> None:
    def ranks(rank: int) -> None:
        engine = make_engine(programs.language_program(0), programs.Language())
        for slot in engine.slots.values():
            assert isinstance(slot.storage, nn.Parameter)
            assert isinstance(slot.storage, DTensor)
            assert slot.storage.shape == slot.shape
            assert slot().data_ptr() == local_of(slot.storage).data_ptr()
        assert "head.weight" not in dict(engine.named_parameters())
        assert engine.slot("head.weight") is engine.slot("wte.weight")

    run_ranks(4, ranks)


def test_bad_layouts_are_refused() -> None:
    mesh = Mesh(a=2)
    for use, store, zero in [
        ("S0", "R", 0),
        ("S0", "S1", 3),
        ("G", "S0", 0),
        ("P", None, 0),
        ("G", "S0", 4),
        ("G,G", None, 0),
    ]:
        with pytest.raises(ProgramError):
            parameter(mesh, "w", SHAPE, torch.float32, use=use, store=store, zero=zero)
    with pytest.raises(ProgramError, match="not a layout"):
        parameter(mesh, "w", SHAPE, torch.float32, use="S2")
    with pytest.raises(ProgramError, match="cut"):
        parameter(Mesh(a=1), "w", SHAPE, torch.float32, use="S0[2x5/1]").allocate(torch.device("cpu"))


def test_fill_checks_what_it_is_given() -> None:
    engine = Engine(load_program(programs.mlp_program(0).replace("data=2, tensor=2", "data=1, tensor=1")))
    with pytest.raises(ProgramError, match="has shape"):
        engine.fill("up.weight", lambda: torch.zeros(6, 10))
    with pytest.raises(ProgramError, match="meta"):
        engine.fill("up.weight", lambda: torch.zeros(10, 6, device="meta"))
    with pytest.raises(ProgramError, match="no parameter or buffer"):
        engine.fill("up.wait", lambda: torch.zeros(6, 10))
