"""Operators that know the mesh against torch on the whole tensors, values and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import (
    Mesh,
    ProgramError,
    Split,
    batch_norm,
    cross_entropy,
    partial_mean,
    reduce_from,
    vocab_embedding,
)
from autopar.simulation import run_ranks


def close(found: Tensor | None, wanted: Tensor | None) -> None:
    assert found is not None
    assert wanted is not None
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", [None, "1x257/100+1x0/1", "5x51/1+1x2/1"])
def test_vocab_embedding(text: str | None) -> None:
    if text == "1x257/100+1x0/1":
        text = "1x200/100+1x57/57"  # the second rank has the tail of one segment only
    torch.manual_seed(0)
    ids, whole = torch.randint(257, (4, 6)), torch.randn(257, 5, dtype=torch.float64)
    gradient = torch.randn(4, 6, 5, dtype=torch.float64)
    table = whole.clone().requires_grad_()
    wanted = F.embedding(ids, table, padding_idx=int(ids[0, 0]))
    wanted.backward(gradient)

    def ranks(rank: int) -> None:
        mesh = Mesh(t=3)
        mesh.bind()
        split = Split(257, (mesh["t"], text))
        weight = split.take(whole, 0).clone().requires_grad_()
        y = reduce_from(vocab_embedding(ids, weight, split, padding_idx=int(ids[0, 0])), mesh["t"])
        close(y.detach(), wanted.detach())
        y.backward(gradient)
        assert table.grad is not None
        close(weight.grad, split.take(table.grad, 0))

    run_ranks(3, ranks)


def test_vocab_embedding_without_rows_here() -> None:
    def ranks(rank: int) -> None:
        mesh = Mesh(t=4)
        mesh.bind()
        split = Split(5, (mesh["t"], None))  # 2 + 2 + 1 + 0
        whole = torch.arange(10.0).view(5, 2)
        weight = split.take(whole, 0).clone().requires_grad_()
        y = reduce_from(vocab_embedding(torch.tensor([4, 0]), weight, split), mesh["t"])
        assert torch.equal(y, whole[[4, 0]])
        y.sum().backward()
        assert weight.grad is not None

    run_ranks(4, ranks)


CASES = list(itertools.product(["mean", "sum", "none"], [False, True], [0.0, 0.2]))


@pytest.mark.parametrize(("reduction", "weighted", "smoothing"), CASES)
def test_cross_entropy(reduction: str, weighted: bool, smoothing: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, 257, 2, dtype=torch.float64) * 3
    labels = torch.randint(257, (7, 2)).masked_fill(torch.rand(7, 2) < 0.3, 5)
    weight = torch.rand(257, dtype=torch.float64) if weighted else None
    whole = logits.clone().requires_grad_()
    options = {"weight": weight, "reduction": reduction, "ignore_index": 5, "label_smoothing": smoothing}
    wanted = F.cross_entropy(whole, labels, **options)
    gradient = torch.randn(wanted.shape, dtype=torch.float64)
    wanted.backward(gradient)
    assert whole.grad is not None

    def ranks(rank: int) -> None:
        mesh = Mesh(data=2, tensor=3)
        mesh.bind()
        mesh.keep_ledger(True)
        rows, vocab = Split(7, (mesh.data, None)), Split(257, (mesh.tensor, None))
        for split in (None, vocab):
            mine = rows.take(logits, 0)
            mine = (mine if split is None else split.take(mine, 1)).clone().requires_grad_()
            loss = cross_entropy(mine, rows.take(labels, 0), **options, batch_axes=(mesh.data,), vocab=split)
            if reduction == "none":
                close(loss.detach(), rows.take(wanted.detach(), 0))
                loss.backward(rows.take(gradient, 0))
            else:
                close(reduce_from(loss.detach(), mesh.data), wanted.detach())
                loss.backward(gradient)
            assert whole.grad is not None
            share = rows.take(whole.grad, 0)
            close(mine.grad, share if split is None else split.take(share, 1))
        assert mesh.ledger is not None
        totals = mesh.ledger.totals()
        num_exchanges = 4 if smoothing else 3
        assert totals["all_reduce", "tensor"] == num_exchanges * rows.local * 2 * 8
        assert totals.get(("all_reduce", "data"), 0) == (
            0 if reduction == "none" else 8 * 2 * (reduction == "mean") + 8 * 2 * 1
        )

    run_ranks(6, ranks)


@pytest.mark.parametrize(("weighted", "smoothing"), [(False, 0.0), (False, 0.2), (True, 0.0), (True, 0.2)])
def test_cross_entropy_over_a_count(weighted: bool, smoothing: float) -> None:
    """Micro-batches of unlike sizes and numbers of valid labels, one without any, on split rows and classes."""
    torch.manual_seed(4)
    logits, labels = torch.randn(9, 11, dtype=torch.float64), torch.randint(11, (9,))
    labels[:4] = -100  # all of the first micro-batch, and one row of the second
    weight = torch.rand(11, dtype=torch.float64) if weighted else None
    whole = logits.clone().requires_grad_()
    wanted = F.cross_entropy(whole, labels, weight, label_smoothing=smoothing)
    wanted.backward()
    count = (labels != -100).sum() if weight is None else weight[labels[4:]].sum()
    assert whole.grad is not None
    whole_gradient = whole.grad

    def ranks(rank: int) -> None:
        mesh = Mesh(data=2, tensor=2)
        mesh.bind()
        mesh.keep_ledger(True)
        vocab = Split(11, (mesh.tensor, None))
        for split in (None, vocab):
            total = torch.zeros((), dtype=torch.float64)
            for some, them, theirs in zip(*(x.split([3, 4, 2]) for x in (logits, labels, whole_gradient)), strict=True):
                rows = Split(len(them), (mesh.data, None))
                mine, gradient = rows.take(some, 0), rows.take(theirs, 0)
                mine = (mine if split is None else split.take(mine, 1)).clone().requires_grad_()
                own = rows.take(them, 0)
                loss = cross_entropy(mine, own, weight, label_smoothing=smoothing, vocab=split, count=count)
                loss.backward()
                close(mine.grad, gradient if split is None else split.take(gradient, 1))
                total = total + loss.detach()
            close(reduce_from(total, mesh.data), wanted.detach())
        assert mesh.ledger is not None
        assert mesh.ledger.totals()["all_reduce", "data"] == 2 * 8  # the count itself is not exchanged again

    run_ranks(4, ranks)


def test_cross_entropy_sums_half_precision_in_float32() -> None:
    logits = torch.zeros(40000, 8, dtype=torch.float16).requires_grad_()  # 40000 times 2.08 is no float16
    labels = torch.zeros(40000, dtype=torch.int64)
    loss = cross_entropy(logits, labels, count=torch.tensor(80000))
    assert loss.dtype == torch.float16
    torch.testing.assert_close(loss.float(), torch.tensor(8.0).log() / 2, rtol=1e-3, atol=0.0)


def test_cross_entropy_low_precision_and_more_ranks_than_classes() -> None:
    torch.manual_seed(2)
    logits, labels = torch.randn(6, 5, dtype=torch.bfloat16), torch.randint(5, (6,))

    def ranks(rank: int) -> None:
        mesh = Mesh(t=4)
        mesh.bind()
        vocab = Split(5, (mesh["t"], None))
        mine = vocab.take(logits, 1).clone().requires_grad_()
        loss = cross_entropy(mine, labels, vocab=vocab)
        assert loss.dtype == torch.bfloat16
        torch.testing.assert_close(loss.float(), F.cross_entropy(logits.float(), labels), rtol=1e-2, atol=1e-2)
        loss.backward()
        assert mine.grad is not None

    run_ranks(4, ranks)


def test_cross_entropy_refuses_split_probabilities() -> None:
    def ranks(rank: int) -> None:
        mesh = Mesh(t=2)
        mesh.bind()
        with pytest.raises(ProgramError, match="class indices"):
            cross_entropy(torch.zeros(2, 2), torch.zeros(2, 4), vocab=Split(4, (mesh["t"], None)))

    run_ranks(2, ranks)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(affine: bool) -> None:
    torch.manual_seed(3)
    x = torch.randn(7, 4, 3, 2, dtype=torch.float64) * 2 + 5
    gradient = torch.randn_like(x)
    weight, bias = (torch.randn(4, dtype=torch.float64) if affine else None for _ in range(2))
    mean, var = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    whole = [t.clone().requires_grad_() if t is not None else None for t in (x, weight, bias)]
    new_mean, new_var = mean.clone(), var.clone()
    wanted = F.batch_norm(whole[0], new_mean, new_var, whole[1], whole[2], True, 0.1, 1e-5)
    wanted.backward(gradient)

    def ranks(rank: int) -> None:
        mesh = Mesh(data=3, other=2)
        mesh.bind()
        rows = Split(7, (mesh.data, None))
        mine = rows.take(x, 0).clone().requires_grad_()
        own = [t.clone().requires_grad_() if t is not None else None for t in (weight, bias)]
        y, found_mean, found_var = batch_norm(mine, own[0], own[1], mean, var, True, 0.1, 1e-5, axes=(mesh.data,))
        close(y.detach(), rows.take(wanted.detach(), 0))
        close(found_mean, new_mean)
        close(found_var, new_var)
        y.backward(rows.take(gradient, 0))
        assert whole[0] is not None
        assert whole[0].grad is not None
        close(mine.grad, rows.take(whole[0].grad, 0))
        for here, there in zip(own, whole[1:], strict=True):
            if here is not None and there is not None:
                assert here.grad is not None
                close(reduce_from(here.grad, mesh.data), there.grad)
        y, kept_mean, _ = batch_norm(mine, own[0], own[1], mean, var, False, 0.1, 1e-5, axes=(mesh.data,))
        close(y.detach(), rows.take(F.batch_norm(x, mean, var, weight, bias, False, 0.1, 1e-5), 0))
        close(kept_mean, mean)

    run_ranks(6, ranks)


def test_partial_mean() -> None:
    x = torch.randn(7, 4, dtype=torch.float64)

    def ranks(rank: int) -> None:
        mesh = Mesh(data=2)
        mesh.bind()
        mine = Split(7, (mesh.data, None)).take(x, 0)
        close(reduce_from(partial_mean(mine, None, False, 28), mesh.data), x.mean())
        close(reduce_from(partial_mean(mine, 0, True, 7), mesh.data), x.mean(0, keepdim=True))
        close(reduce_from(partial_mean(mine, (0, 1), False, 28), mesh.data), x.mean((0, 1)))

    run_ranks(2, ranks)
