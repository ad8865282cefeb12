"""Checkpoints between layouts and numbers of ranks, bitwise: fused, uneven and nested shards, ties, optimizer states."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from autopar.runtime import Mesh, ProgramError, buffer, parameter, saving
from autopar.runtime.layouts import take_share
from autopar.runtime.pieces import Slot
from autopar.simulation import run_ranks

States = dict[str, Tensor]
Words = Mapping[str, str]

SHAPES = {
    "attention.qkv": (6, 24),
    "embed.weight": (7, 5),
    "cube": (4, 3, 5),
    "short": (2, 3),
    "scale": (4,),
    "temperature": (),
}
TIED = {"embed.weight": ("head.weight",)}

# Layouts of one model: name -> words; what is not named is whole everywhere.
PLANS: dict[str, tuple[dict[str, int], Words]] = {
    "four ranks": (
        {"data": 2, "tensor": 2},
        {"attention.qkv": "G,S1[3x8/4]", "embed.weight": "S0,S0", "cube": "S2,S0", "short": "S0,S0", "scale": "S0,R"},
    ),
    "unequal segments": (
        {"data": 2, "tensor": 2},
        {"attention.qkv": "S0,S1[1x16/4+2x4/2]", "embed.weight": "S0,S1", "cube": "S0,S0"},
    ),
    "three ranks": ({"tensor": 3}, {"attention.qkv": "S1[3x8/4]", "embed.weight": "S0", "cube": "S0", "scale": "S0"}),
    "two ranks": ({"data": 2}, {"attention.qkv": "S0", "embed.weight": "S1", "cube": "S1"}),
    "one rank": ({"data": 1}, {}),
    "no axes": ({}, {}),
}


def values(seed: int = 0) -> States:
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**made, "steps": torch.tensor(41), "table": torch.arange(6, dtype=torch.float64)}


class Rank:
    """The slots of one rank under a plan, filled, and an optimizer on them."""

    def __init__(self, plan: str, whole: States, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        sizes, words = PLANS[plan]
        self.mesh = Mesh(**sizes)
        self.mesh.bind()
        everywhere = ",".join("G" for _ in sizes)
        self.parameters = [
            parameter(self.mesh, name, shape, torch.float32, words.get(name, everywhere), aliases=TIED.get(name, ()))
            for name, shape in SHAPES.items()
        ]
        self.buffers = [
            buffer(self.mesh, "steps", (), torch.int64),
            buffer(self.mesh, "table", (6,), torch.float64, persistent=False),
        ]
        self.slots: list[Slot] = [*self.parameters, *self.buffers]
        for slot in self.slots:
            slot.allocate(torch.device("cpu"))
            slot.fill(lambda name=slot.name: whole[name])  # type: ignore[misc]
        self.optimizer = make_optimizer([slot.storage for slot in self.parameters])

    def step(self, gradients: States) -> None:
        for slot in self.parameters:
            slot.add_gradient(take_share(gradients[slot.name], slot.rest, self.mesh).clone())
        self.optimizer.step()

    def whole_states(self) -> States:
        """Everything that a checkpoint holds, whole."""
        found = saving.full_state_dict(self.slots, self.mesh, all_ranks=True)
        for slot in self.parameters:
            for key, value in self.optimizer.state.get(slot.storage, {}).items():
                is_like_parameter = value.shape == slot.shape and key != "step"
                whole = saving.whole_tensor(slot, self.mesh, value) if is_like_parameter else value
                found[f"{slot.name}:{key}"] = whole.clone()
        return found


def adamw(parameters: list[nn.Parameter], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)


def momentum(parameters: list[nn.Parameter], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def on_ranks(plan: str, function: Callable[[int], Any]) -> list[Any]:
    sizes, _ = PLANS[plan]
    count = int(torch.tensor([1, *sizes.values()]).prod())
    return [function(0)] if not sizes else run_ranks(count, function)


def save(folder: Path, plan: str, make_optimizer: Callable[..., torch.optim.Optimizer] = adamw) -> States:
    """Train a step under ``plan`` and save; what was saved."""

    def run(rank: int) -> States:
        here = Rank(plan, values(), make_optimizer)
        here.step(values(seed=1))
        saving.save(folder, here.slots, here.mesh, here.optimizer)
        return here.whole_states()

    return on_ranks(plan, run)[0]  # type: ignore[no-any-return]


def load(folder: Path, plan: str, make_optimizer: Callable[..., torch.optim.Optimizer] = adamw) -> list[States]:
    """Begin with other values under ``plan`` and load; what every rank then has."""

    def run(rank: int) -> States:
        here = Rank(plan, values(seed=2), lambda parameters: make_optimizer(parameters, lr=7.0))
        saving.load(folder, here.slots, here.mesh, here.optimizer)
        assert here.optimizer.param_groups[0]["lr"] == 0.1
        return here.whole_states()

    return on_ranks(plan, run)


def assert_same(found: States, expected: States) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def saved_under(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, States]]:
    """The folder of a checkpoint saved under a plan, and what was saved; each is written once."""

    @lru_cache
    def make(plan: str) -> tuple[Path, States]:
        folder = tmp_path_factory.mktemp("saved")
        return folder, save(folder, plan)

    return make


PAIRS = [(a, b) for at, a in enumerate(PLANS) for b in [*PLANS, *PLANS][at + 1 : at + 3]] + [("four ranks", "one rank")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_one_plan_to_another(saved_under: Callable[[str], tuple[Path, States]], source: str, target: str) -> None:
    folder, saved = saved_under(source)
    assert len(saved) == len(SHAPES) + len(TIED) + 1 + 3 * len(SHAPES)
    for found in load(folder, target):
        assert_same(found, saved)


def test_other_optimizers_states(tmp_path: Path) -> None:
    saved = save(tmp_path, "four ranks", momentum)
    assert f"{next(iter(SHAPES))}:momentum_buffer" in saved
    for found in load(tmp_path, "three ranks", momentum):
        assert_same(found, saved)


def test_states_the_optimizer_has_already_are_filled_in_place(tmp_path: Path) -> None:
    saved = save(tmp_path, "two ranks")

    def run(rank: int) -> None:
        here = Rank("three ranks", values(seed=2), adamw)
        here.step(values(seed=3))
        before = here.optimizer.state[here.parameters[0].storage]["exp_avg"]
        saving.load(tmp_path, here.slots, here.mesh, here.optimizer)
        assert here.optimizer.state[here.parameters[0].storage]["exp_avg"] is before
        assert_same(here.whole_states(), saved)

    run_ranks(3, run)


def test_training_goes_on_as_without_a_break(tmp_path: Path) -> None:
    save(tmp_path, "four ranks")
    there = Rank("no axes", values(), adamw)
    there.step(values(seed=1))
    for slot in there.parameters:
        slot.storage.grad = None
    there.step(values(seed=4))

    def run(rank: int) -> States:
        here = Rank("three ranks", values(seed=2), adamw)
        saving.load(tmp_path, here.slots, here.mesh, here.optimizer)
        here.step(values(seed=4))
        return here.whole_states()

    for found in run_ranks(3, run):
        assert_same(found, there.whole_states())


def test_what_many_ranks_have_is_written_once(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        mesh = Mesh(data=4)
        mesh.bind()
        slot = parameter(mesh, "big", (256, 256), torch.float32, "G")
        slot.allocate(torch.device("cpu"))
        slot.fill(lambda: torch.ones(256, 256))
        saving.save(tmp_path, [slot], mesh)

    run_ranks(4, run)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert 256 * 256 * 4 <= written < 1.5 * 256 * 256 * 4


def test_zero_copies_follow_what_is_loaded(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        mesh = Mesh(data=2)
        mesh.bind()
        slot = parameter(mesh, "w", (5, 3), torch.float32, "G", store="S0", zero=1)
        slot.allocate(torch.device("cpu"))
        slot.fill(lambda: torch.arange(15.0).view(5, 3))
        saving.save(tmp_path, [slot], mesh)
        slot.fill(lambda: torch.zeros(5, 3))
        slot.refresh()
        saving.load(tmp_path, [slot], mesh)
        slot.refresh()
        assert torch.equal(slot(), torch.arange(15.0).view(5, 3))

    run_ranks(2, run)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_dict_is_for_dcp(tmp_path: Path) -> None:
    """What users save and load themselves, among other things of theirs, and what plain DCP makes of it."""
    whole = values()

    def run(rank: int) -> None:
        here = Rank("four ranks", whole, adamw)
        dcp.save({"model": saving.state_dict(here.slots), "epoch": 3}, checkpoint_id=tmp_path)
        other = Rank("unequal segments", values(seed=1), adamw)
        content = {"model": saving.state_dict(other.slots), "epoch": 0}
        dcp.load(content, checkpoint_id=tmp_path)
        assert content["epoch"] == 3
        assert_same(other.whole_states(), here.whole_states())

    run_ranks(4, run)
    plain = {"model": {name: torch.empty(shape) for name, shape in SHAPES.items()}}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert_same(plain["model"], {name: whole[name] for name in SHAPES})


def test_pieces_are_for_dcp_only() -> None:
    here = Rank("no axes", values(), adamw)
    piece = saving.state_dict(here.slots)["cube"]
    assert tuple(piece.shape) == SHAPES["cube"] and "Piece" in repr(piece)
    with pytest.raises(ProgramError, match=r"for torch\.distributed\.checkpoint only"):
        piece + 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_loads_what_dcp_saved_of_a_plain_model(tmp_path: Path) -> None:
    """Under the other name of a tied parameter, and in another type."""
    whole = values()
    named = {**whole, "head.weight": whole["embed.weight"]}
    del named["embed.weight"]
    dcp.save({name: value.double() for name, value in named.items()}, checkpoint_id=tmp_path, no_dist=True)

    def run(rank: int) -> None:
        here = Rank("four ranks", values(seed=1), adamw)
        saving.load(tmp_path, here.slots, here.mesh)
        found = here.whole_states()
        assert torch.equal(found["embed.weight"], whole["embed.weight"])
        assert torch.equal(found["attention.qkv"], whole["attention.qkv"])

    run_ranks(4, run)


def test_full_state_dict_is_the_first_ranks() -> None:
    def run(rank: int) -> States:
        here = Rank("four ranks", values(), adamw)
        return saving.full_state_dict(here.slots, here.mesh)

    first, *others = run_ranks(4, run)
    assert set(first) == {*SHAPES, "head.weight", "steps"}
    assert first["head.weight"] is first["embed.weight"]
    assert others == [{}] * 3


def test_gathering_a_state_dict_is_not_in_the_ledger() -> None:
    def run(rank: int) -> None:
        here = Rank("four ranks", values(), adamw)
        here.mesh.keep_ledger(True)
        saving.full_state_dict(here.slots, here.mesh)
        assert here.mesh.ledger is not None and not here.mesh.ledger.entries

    run_ranks(4, run)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_saving_again_replaces_the_checkpoint_only(tmp_path: Path) -> None:
    save(tmp_path, "four ranks")
    (tmp_path / "plan.json").write_text("{}")
    here = Rank("no axes", values(seed=5), adamw)
    saving.save(tmp_path, here.slots, here.mesh)
    assert sorted(os.listdir(tmp_path)) == [".metadata", "__0_0.distcp", "plan.json"]  # noqa: PTH208
    other = Rank("no axes", values(), adamw)
    saving.load(tmp_path, other.slots, other.mesh)
    assert torch.equal(other.whole_states()["cube"], here.whole_states()["cube"])


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(tmp_path, "two ranks")

    def run(rank: int) -> None:
        here = Rank("two ranks", values(seed=5), adamw)
        with pytest.raises(ProgramError, match=r"cannot be written to .*disk is full"):
            saving.save(tmp_path, here.slots, here.mesh, here.optimizer)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", fail)
        run_ranks(2, run)
    for found in load(tmp_path, "three ranks"):
        assert_same(found, saved)


def load_error(folder: Path, here: Rank, optimizer: torch.optim.Optimizer | None = None) -> str:
    with pytest.raises(ProgramError) as caught:
        saving.load(folder, here.slots, here.mesh, optimizer)
    return str(caught.value)


def test_errors_say_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    here = Rank("no axes", values(), adamw)
    assert "absent does not exist" in load_error(tmp_path / "absent", here)
    (tmp_path / "__0_0.distcp").write_bytes(b"half")
    assert "no checkpoint, or one whose writing did not finish" in load_error(tmp_path, here)
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    assert "is damaged" in load_error(tmp_path, here)
    with pytest.raises(ProgramError, match="is a file"):
        saving.save(tmp_path / "__0_0.distcp", here.slots, here.mesh)


def test_errors_say_what_does_not_fit(tmp_path: Path) -> None:
    here = Rank("no axes", values(), adamw)
    saving.save(tmp_path, here.slots, here.mesh)
    assert "has no optimizer states: load it without optimizer=" in load_error(tmp_path, here, here.optimizer)
    other = parameter(here.mesh, "cube", (4, 3, 6), torch.float32, "")
    extra = parameter(here.mesh, "extra", (2,), torch.float32, "")
    for slot in (other, extra):
        slot.allocate(torch.device("cpu"))
    here.slots.append(extra)
    assert "lacks extra of this model's 8 tensors; it has attention.qkv, " in load_error(tmp_path, here)
    here.slots = [other]
    assert "other shapes (cube (4, 3, 5) there, (4, 3, 6) here)" in load_error(tmp_path, here)


def test_an_error_of_one_rank_is_everyones(tmp_path: Path) -> None:
    def run(rank: int) -> str:
        here = Rank("two ranks", values(), adamw)
        saving.save(tmp_path, here.slots, here.mesh)
        return load_error(tmp_path if rank == 0 else tmp_path / "elsewhere", here)

    first, second = run_ranks(2, run)
    assert first == second and "elsewhere does not exist" in first


def test_a_foreign_optimizer_is_refused(tmp_path: Path) -> None:
    here = Rank("no axes", values(), adamw)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ProgramError, match=r"build it on parallel\.parameters\(\)"):
        saving.save(tmp_path, here.slots, here.mesh, foreign)


def test_states_of_other_shapes_are_refused(tmp_path: Path) -> None:
    here = Rank("no axes", values(), adamw)
    here.optimizer.state[here.parameters[0].storage]["row"] = torch.ones(6)
    with pytest.raises(ProgramError, match=r"state 'row' of attention\.qkv has the shape \(6,\)"):
        saving.save(tmp_path, here.slots, here.mesh, here.optimizer)


def test_options_follow_groups(tmp_path: Path) -> None:
    here = Rank("no axes", values(), adamw)
    parameters = [slot.storage for slot in here.parameters]
    groups = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:], "weight_decay": 0.25}]
    saved = torch.optim.AdamW(groups, lr=0.1)
    saving.save(tmp_path, here.slots, here.mesh, saved)
    fresh = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=9.0)
    saving.load(tmp_path, here.slots, here.mesh, fresh)
    assert [(group["lr"], group["weight_decay"]) for group in fresh.param_groups] == [(0.5, 0.01), (0.1, 0.25)]
