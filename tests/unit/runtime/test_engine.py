"""Programs on simulated ranks against the model on one device: loss, gradients, parameters after optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime import Engine, ProgramError, load_program
from autopar.simulation import run_ranks
from tests.unit.runtime import programs
from tests.unit.runtime.training import Batch, check_pieces, make_engine, train


def run(source: str, model: nn.Module, batch: Batch, num_ranks: int = 4, **optimizer: Any) -> None:
    def ranks(rank: int) -> None:
        own = copy.deepcopy(model)
        train(make_engine(source, own), own, batch, lambda p: torch.optim.AdamW(p, lr=0.01, **optimizer))

    run_ranks(num_ranks, ranks)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_mlp(zero: int) -> None:
    torch.manual_seed(0)
    run(programs.mlp_program(zero), programs.Mlp(), programs.mlp_batch)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_language(zero: int) -> None:
    torch.manual_seed(0)
    run(programs.language_program(zero), programs.Language(), programs.language_batch)


@pytest.mark.parametrize("mesh", [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_language_on_other_meshes(mesh: tuple[int, int]) -> None:
    torch.manual_seed(0)
    source = programs.language_program(2, *mesh).replace("BATCH_MULTIPLE = 3", "BATCH_MULTIPLE = None")
    run(source, programs.Language(), programs.language_batch, num_ranks=mesh[0] * mesh[1])


def test_one_process_needs_no_groups() -> None:
    torch.manual_seed(0)
    model = programs.Language()
    engine = make_engine(programs.language_program(3, 1, 1), model)
    train(engine, model, programs.language_batch, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


def test_gradients_add_up_and_other_batches_and_local_shares_work() -> None:
    torch.manual_seed(0)
    model = programs.Language()

    def ranks(rank: int) -> None:
        engine = make_engine(programs.language_program(1), model)
        own = copy.deepcopy(model)
        assert (engine.data_rank, engine.data_size) == (rank // 2, 2)
        for number, batch in enumerate((4, 6)):
            inputs = programs.language_batch(number, batch)
            wanted, _ = own(**inputs)
            wanted.backward()
            if number:
                share = {key: value.chunk(2)[engine.data_rank] for key, value in inputs.items()}
                loss = engine.step(**share, local=True)
            else:
                loss = engine.step(inputs["ids"], labels=inputs["labels"])
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        whole = dict(own.named_parameters())
        for name, slot in engine.slots.items():
            check_pieces(slot, slot.storage.grad, whole[name].grad)
        inputs = programs.language_batch(3, 8)
        torch.testing.assert_close(
            engine.forward(**inputs)["logits"], own(**inputs)[1].detach(), rtol=1e-12, atol=1e-12
        )

    run_ranks(4, ranks)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_the_norm_counts_every_element_once(norm_type: float) -> None:
    torch.manual_seed(0)
    model = programs.Language()
    inputs = programs.language_batch(0)
    model(**inputs)[0].backward()
    wanted = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)

    def ranks(rank: int) -> None:
        for zero in (0, 1, 3):
            engine = make_engine(programs.language_program(zero), model)
            engine.step(**inputs)
            engine.set_ledger(True)
            norm = engine.clip_grad_norm_(0.1, norm_type)
            torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=1e-12)
            whole = dict(model.named_parameters())
            for name, slot in engine.slots.items():
                check_pieces(slot, slot.storage.grad, whole[name].grad)
            assert engine.ledger is not None
            axes = ["data", "tensor"] if zero else ["tensor"]
            assert [(s.kind, s.axis, s.num_bytes) for s in engine.ledger.entries] == [
                ("all_reduce", a, 8) for a in axes
            ]

    run_ranks(4, ranks)


def test_nonfinite_norms_can_be_refused() -> None:
    engine = make_engine(programs.language_program(0, 1, 1), programs.Language())
    engine.step(**programs.language_batch(0))
    gradient = engine.slots["wte.weight"].storage.grad
    assert gradient is not None
    gradient[0, 0] = float("nan")
    with pytest.raises(ProgramError, match="norm"):
        engine.clip_grad_norm_(1.0, error_if_nonfinite=True)


WRONG: list[tuple[Mapping[str, Any], str]] = [
    ({"ids": 1}, r"missing: labels"),
    ({"ids": 1, "labels": 1, "mask": 1}, r"unknown: mask"),
    ({"ids": 1, "labels": 1}, r"must be a tensor, got int"),
    ({"ids": torch.zeros(4, 5), "labels": torch.zeros(4, 5).long()}, r"'ids': expected torch.int64, got torch.float32"),
    ({"ids": torch.zeros(4, 6).long(), "labels": torch.zeros(4, 5).long()}, r"global shape \(4, 5\), got \(4, 6\)"),
    ({"ids": torch.zeros(4).long(), "labels": torch.zeros(4, 5).long()}, r"global shape \(4, 5\), got \(4,\)"),
    ({"ids": torch.zeros(4, 5).long(), "labels": torch.zeros(2, 5).long()}, r"'labels': expected the global shape"),
    ({"ids": torch.zeros(5, 5).long(), "labels": torch.zeros(5, 5).long()}, r"multiples of 2 .* global batch of 5"),
    ({"ids": torch.zeros(0, 5).long(), "labels": torch.zeros(0, 5).long()}, r"multiples of 2 .* global batch of 0"),
    ({"ids": torch.zeros(4, 5).long(), "labels": torch.zeros(4, 5).long(), "local": True}, r"leave local=True away"),
]


def test_wrong_inputs_are_named() -> None:
    model = programs.Language()

    def ranks(rank: int) -> None:
        engine = make_engine(programs.language_program(0), model)
        for inputs, message in WRONG:
            with pytest.raises(ProgramError, match=message):
                engine.step(**inputs)
        inputs = programs.language_batch(0)
        with pytest.raises(ProgramError, match="given twice: ids"):
            engine.step(inputs["ids"], **inputs)
        with pytest.raises(ProgramError, match="takes 2 inputs"):
            engine.step(1, 2, 3)
        fixed = make_engine(programs.language_program(0).replace("BATCH_MULTIPLE = 2", "BATCH_MULTIPLE = None"), model)
        share = {key: value[:2] for key, value in inputs.items()}
        with pytest.raises(ProgramError, match=r"only 4 as global batch.*batch of 2.*looks like one rank's share"):
            fixed.step(**share)

    run_ranks(4, ranks)


def test_the_world_must_fit_the_mesh() -> None:
    with pytest.raises(ProgramError, match="torchrun"):
        Engine(load_program(programs.language_program(0)))

    def ranks(rank: int) -> None:
        with pytest.raises(ProgramError, match=r"runs on 4 ranks .*data=2 x tensor=2.*has 2"):
            Engine(load_program(programs.language_program(0)))

    run_ranks(2, ranks)


def test_a_failed_step_leaves_no_gradient_behind() -> None:
    model = programs.Language()
    engine = make_engine(
        programs.language_program(0, 1, 1).replace('{"loss"', '{"loss" if x.requires_grad and ids[0, 0] else "lost"'),
        model,
    )
    inputs = programs.language_batch(0)
    inputs["ids"][0, 0] = 0
    with pytest.raises(ProgramError, match="no scalar 'loss'"):
        engine.step(**inputs)
    assert all(parameter.grad is None for parameter in engine.parameters())


def test_a_program_must_be_one() -> None:
    with pytest.raises(ProgramError, match="does not define INPUTS"):
        load_program("from autopar.runtime import Mesh\nmesh = Mesh(data=1)\n")
    source = programs.mlp_program(0).replace("data=2, tensor=2", "data=1, tensor=1")
    program = load_program(source.replace('"scale"', '"down.bias"'))
    with pytest.raises(ProgramError, match=r"called 'down\.bias'"):
        Engine(program)


def test_the_mode_reaches_the_stage() -> None:
    engine = make_engine(programs.language_program(0, 1, 1), programs.Language())
    assert not engine.eval().stage.training
    assert engine.train().stage.training
