"""Programs of several stages on simulated ranks against the model on one device, under every schedule."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime import Engine, ProgramError, load_program, stages
from autopar.runtime.split_backward import backward_of_inputs
from autopar.simulation import run_ranks
from tests.unit.runtime import chains
from tests.unit.runtime.training import check_pieces, make_engine

ONE_A_RANK = ("gpipe", "1f1b")
SEVERAL_A_RANK = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


def train(rank: int, source: str, model: nn.Module, batch: int, steps: int = 2) -> None:
    """Steps of the program and the model side by side."""
    own = copy.deepcopy(model)
    engine = make_engine(source, own)
    whole = dict(own.named_parameters())
    mine = torch.optim.AdamW(engine.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(own.parameters(), lr=0.01)
    for number in range(steps):
        inputs = chains.chain_batch(number, batch)
        theirs.zero_grad()
        wanted = own(**inputs)[0]
        wanted.backward()
        loss = engine.step(**inputs)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-11, atol=1e-11)
        for name, slot in engine.slots.items():
            check_pieces(slot, slot.storage.grad, whole[name].grad, tolerance=1e-11)
        norm = engine.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(own.parameters(), 0.1), rtol=1e-11, atol=1e-11)
        mine.step()
        theirs.step()
        engine.zero_grad()
        for name, slot in engine.slots.items():
            check_pieces(slot, slot.storage, whole[name], tolerance=1e-9)
    inputs = chains.chain_batch(9, batch)
    found, wanted_outputs = engine.forward(**inputs), own(**inputs)
    for name, value in zip(("loss", "logits", "early"), wanted_outputs, strict=True):
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-9, atol=1e-9)


def run(number: int, schedule: str, micro_batches: int, batch: int, ranks: int = 2, **options: Any) -> None:
    torch.manual_seed(0)
    model = chains.Chain(number, options.get("shared", True))
    source = chains.chain_program(number, schedule, micro_batches, batch, ranks, **options)
    world = ranks * options.get("data", 1) * options.get("tensor", 1)
    run_ranks(world, train, source, model, batch)


@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("schedule", ONE_A_RANK)
def test_one_stage_a_rank(schedule: str, micro_batches: int) -> None:
    run(2, schedule, micro_batches, 8)


@pytest.mark.parametrize("schedule", SEVERAL_A_RANK)
def test_two_stages_a_rank(schedule: str) -> None:
    run(4, schedule, 4, 9, shared=False)


@pytest.mark.parametrize("schedule", SEVERAL_A_RANK)
def test_a_weight_that_is_used_twice(schedule: str) -> None:
    run(4, schedule, 4, 8, shared=True)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (2, 2)])
def test_micro_batches_of_one_stage(mesh: tuple[int, int], zero: int) -> None:
    run(1, "single", 3, 10, ranks=1, data=mesh[0], tensor=mesh[1], zero=zero, recompute=zero == 3)


@pytest.mark.parametrize("schedule", ["1f1b", *SEVERAL_A_RANK])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_data_parallelism(schedule: str, zero: int) -> None:
    run(2 if schedule in ONE_A_RANK else 4, schedule, 4, 10, data=2, zero=zero, shared=zero % 2 == 0)


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_with_tensor_parallelism_and_another_order_of_ranks(schedule: str) -> None:
    run(2 if schedule in ONE_A_RANK else 4, schedule, 4, 9, tensor=2, zero=1, shared=False, rank_order=(3, 1, 0, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("zero", [0, 3])
def test_with_recomputation(schedule: str, zero: int) -> None:
    run(2 if schedule in ONE_A_RANK else 4, schedule, 4, 10, data=2, zero=zero, recompute=True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_four_pipeline_ranks(schedule: str) -> None:
    run(4, schedule, 4, 8, ranks=4)


@pytest.mark.parametrize("schedule", SEVERAL_A_RANK)
def test_eight_stages_on_four_pipeline_ranks(schedule: str) -> None:
    run(8, schedule, 8, 8, ranks=4)


def test_messages_and_what_they_are_counted_as() -> None:
    """Two stages, micro-batches of 3, 3 and 2 samples: x, skip, kind and odd go there, gradients of two come back."""
    torch.manual_seed(0)
    model = chains.Chain(2)
    source = chains.chain_program(2, "gpipe", 3, 8)

    def ranks(rank: int) -> dict[tuple[str, str], int]:
        engine = make_engine(source, model)
        engine.set_ledger(True)
        engine.step(**chains.chain_batch(0, 8))
        assert engine.ledger is not None
        return engine.ledger.totals()

    hidden, ids = 8 * chains.LENGTH * chains.WIDTH * 8, 8 * chains.LENGTH * 8
    embedding = chains.VOCABULARY * chains.WIDTH * 8
    common = {("all_reduce", "stages"): embedding, ("broadcast", "stages"): 16}
    there, back = run_ranks(2, ranks)
    assert there == {("send_recv", "stages"): 2 * hidden + ids + ids // 8, **common}
    assert back == {("send_recv", "stages"): 2 * hidden, **common}


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
def test_backward_is_split_only_where_nothing_is_done_twice(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[bool]] = {}

    def noting(*args: Any) -> Any:
        split = backward_of_inputs(*args)
        found[name].append(split is not None)
        return split

    monkeypatch.setattr(stages, "backward_of_inputs", noting)
    for name, options in {
        "plain": {"shared": False},
        "shared": {"shared": True},
        "gathered": {"shared": False, "zero": 3, "data": 2},
        "recomputed": {"shared": False, "recompute": True},
    }.items():
        found[name] = []
        run(4, schedule, 4, 8, **options)
    assert found["plain"] and all(found["plain"])
    assert any(found["shared"]) and not all(found["shared"])  # not where the weight is used twice
    assert not found["gathered"] and not found["recomputed"]


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
@pytest.mark.parametrize("batch", [10, 12])
def test_local_shares_and_gradients_of_several_steps(schedule: str, batch: int) -> None:
    torch.manual_seed(0)
    number = 2 if schedule == "gpipe" else 4
    model = chains.Chain(number)
    source = chains.chain_program(number, schedule, 4, 10, data=2)

    def ranks(rank: int) -> None:
        engine = make_engine(source, model)
        own = copy.deepcopy(model)
        for step in range(2):
            inputs = chains.chain_batch(step, batch)
            own(**inputs)[0].backward()
            share = {key: value.chunk(2)[engine.data_rank] for key, value in inputs.items()}
            engine.step(**share, local=True)
        whole = dict(own.named_parameters())
        for name, slot in engine.slots.items():
            check_pieces(slot, slot.storage.grad, whole[name].grad, tolerance=1e-11)
        found = engine.forward(**share, local=True)
        for name, value in zip(("loss", "logits", "early"), own(**inputs), strict=True):
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-9, atol=1e-9)
        small = chains.chain_batch(7, 2)  # fewer samples than micro-batches can be evaluated
        torch.testing.assert_close(engine.forward(**small)["logits"], own(**small)[1].detach(), rtol=1e-9, atol=1e-9)

    run_ranks(4, ranks)


REFUSED = [
    ("1f1b", 2, 1, "1f1b cannot run 1 micro-batches through 2 stages on 2 pipeline ranks: .*greater than"),
    ("dualpipev", 4, 3, "dualpipev cannot run 3 micro-batches.*at least as many microbatches as stages"),
    ("interleaved_1f1b", 4, 5, "interleaved_1f1b cannot run 5 .*multiple of the number of rounds"),
    ("interleaved_zero_bubble", 4, 5, "interleaved_zero_bubble cannot run 5 .*multiple of the number of rounds"),
    ("zbv", 2, 2, "zbv cannot run .*exactly 2 stages per rank"),
    ("gpipe", 4, 4, "gpipe cannot run .*one stage a rank"),
    ("interleaved_1f1b", 3, 4, "interleaved_1f1b cannot run .*as many stages"),
    ("gpipe", 1, 2, "a program of one stage runs on one pipeline rank under 'single'"),
    ("wave", 2, 2, "unknown schedule 'wave'"),
]


@pytest.mark.parametrize(("schedule", "number", "micro_batches", "message"), REFUSED)
def test_what_torch_refuses_is_refused_before_anything_is_sent(
    schedule: str, number: int, micro_batches: int, message: str
) -> None:
    source = chains.chain_program(number, schedule, micro_batches, 8)

    def ranks(rank: int) -> None:
        with pytest.raises(ProgramError, match=message):
            Engine(load_program(source))

    run_ranks(2, ranks)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("schedule", SEVERAL_A_RANK)
def test_every_other_combination_runs(schedule: str, micro_batches: int) -> None:
    with nullcontext() if is_run(schedule, micro_batches) else pytest.raises(ProgramError, match="cannot run"):
        run(4, schedule, micro_batches, 8)


def is_run(schedule: str, micro_batches: int) -> bool:
    """Whether torch runs four stages on two ranks."""
    if schedule == "zbv":
        return True
    return micro_batches >= 4 if schedule == "dualpipev" else micro_batches % max(1, micro_batches // 2) == 0


def test_batches_that_do_not_fit() -> None:
    source = chains.chain_program(2, "gpipe", 4, 32, data=2)

    def ranks(rank: int) -> None:
        engine = make_engine(source, chains.Chain(2))
        wanted = r"multiples of 2 from 8 \(4 micro-batches\) as global batch, and got a global batch of "
        with pytest.raises(ProgramError, match=wanted + "6; .*drop_last=True.*pad it"):
            engine.step(**chains.chain_batch(0, 6))
        with pytest.raises(ProgramError, match=wanted + "9; .*drop_last=True.*pad it"):
            engine.step(**chains.chain_batch(0, 9))
        engine.step(**chains.chain_batch(0, 8))

    run_ranks(4, ranks)


def test_a_failed_step_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = chains.Chain(2)
    source = chains.chain_program(2, "gpipe", 2, 4).replace(
        "F.gelu(F.linear", "(mesh.missing if mesh.fails else F.gelu)(F.linear"
    )

    def ranks(rank: int) -> None:
        engine = make_engine(source, model)
        inputs = chains.chain_batch(0, 4)
        vars(engine.mesh)["fails"] = True
        if rank == 0:
            with pytest.raises(AttributeError, match="missing"):
                engine.step(**inputs)
        vars(engine.mesh)["fails"] = False
        assert all(parameter.grad is None for parameter in engine.parameters())
        loss = engine.step(**inputs)
        torch.testing.assert_close(loss, model(**inputs)[0].detach(), rtol=1e-11, atol=1e-11)

    run_ranks(2, ranks)


def test_several_stages_want_several_ranks() -> None:
    with pytest.raises(ProgramError, match="2 stages on one pipeline rank"):
        Engine(load_program(chains.chain_program(2, "zbv", 2, 4, ranks=1)))


def test_a_loss_that_nothing_trainable_leads_to_is_refused_on_every_rank() -> None:
    model = chains.Chain(2)
    source = chains.chain_program(2, "gpipe", 2, 4)

    def ranks(rank: int) -> None:
        for text, message in (
            ('{"loss": reduce_from(loss, mesh.data).detach()', "depends on no trainable parameter"),
            ('{"lost": reduce_from(loss, mesh.data)', "returns no 'loss' to train on, only early, lost, logits"),
        ):
            changed = source.replace('{"loss": reduce_from(loss, mesh.data)', text)
            if "lost" in text:
                changed = changed.replace("('loss', 'logits')", "('lost', 'logits')")
            engine = make_engine(changed, model)
            with pytest.raises(ProgramError, match=message):
                engine.step(**chains.chain_batch(0, 4))

    run_ranks(2, ranks)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_zero_bubble"])
def test_compiled_stages(schedule: str) -> None:
    """A compiled stage's backward is one node of autograd: it is not split."""
    torch.manual_seed(0)
    number = 2 if schedule == "gpipe" else 4
    model = chains.Chain(number)
    source = chains.chain_program(number, schedule, 2, 4)

    def ranks(rank: int) -> None:
        own = copy.deepcopy(model)
        engine = make_engine(source, own)
        engine.compile(backend="eager")
        inputs = chains.chain_batch(0, 4)
        loss = own(**inputs)[0]
        loss.backward()
        torch.testing.assert_close(engine.step(**inputs), loss.detach(), rtol=1e-11, atol=1e-11)
        for name, slot in engine.slots.items():
            check_pieces(slot, slot.storage.grad, dict(own.named_parameters())[name].grad, tolerance=1e-11)

    run_ranks(2, ranks)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_zero_bubble"])
def test_what_a_stage_sends_is_not_kept_for_backward(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its edge in autograd's graph is: here nothing saves the sum that is sent, so its memory is free once it is sent."""
    torch.manual_seed(0)
    number = 2 if schedule == "gpipe" else 4
    model = chains.Chain(number, shared=False)
    source = chains.chain_program(number, schedule, 2, 4, shared=False)
    sent: list[StorageWeakRef] = []
    alive: list[int] = []
    send, backward = stages.RunnableStage._send, stages.RunnableStage.backward_one_chunk

    def noting_send(self: Any, tensors: Any, stage: int) -> Any:
        if self.stage_index == 0 and stage == 1:
            sent.append(StorageWeakRef(tensors[0].untyped_storage()))
        return send(self, tensors, stage)

    def noting_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.stage_index == 0:
            alive.append(sum(not reference.expired() for reference in sent))
        return backward(self, *args, **kwargs)

    monkeypatch.setattr(stages.RunnableStage, "_send", noting_send)
    monkeypatch.setattr(stages.RunnableStage, "backward_one_chunk", noting_backward)

    def ranks(rank: int) -> None:
        make_engine(source, model).step(**chains.chain_batch(0, 4))

    run_ranks(2, ranks)
    assert len(sent) == 2 and alive == [0, 0]
