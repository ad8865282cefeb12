"""Micro-batches: what is found coupled, and that the scaled sum over micro-batches is the whole batch's loss and gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.codegen import generate
from autopar.graph import Operator, OpGraph, Ref
from autopar.micro_batches import CLASS_LOSSES, Term, combined, coupling, terms
from autopar.tracing import Traced, trace
from autopar.verifier.double import in_double
from tests.support.interpret import run_operator, state_values
from tests.support.models import ZOO, cross_entropy
from tests.support.pipelines import pipeline_plan
from tests.support.running import assert_equal, run_program, values_of

Batch = dict[str, torch.Tensor]
Values = dict[str, torch.Tensor]

SIZES = (4, 3, 1)  # of the micro-batches
WIDTH, CLASSES = 6, 5


# -- the oracle: the graph, operator by operator, with what ``terms`` says ---------------------------------------------


def scaled(operator: Operator, term: Term, share: float, values: Values) -> tuple[Operator, Values]:
    """The operator with some of its tensor inputs multiplied by the share."""
    found, index = dict(values), iter(range(len(operator.inputs)))

    def marked(tree: Any) -> Any:
        if isinstance(tree, Ref):
            at = next(index)
            if at not in term.inputs:
                return tree
            found[f"scaled {at}"] = values[tree.value] * share
            return Ref(f"scaled {at}")
        return tuple(marked(item) for item in tree) if isinstance(tree, tuple) else tree

    args = marked(operator.args)
    kwargs = tuple((name, marked(value)) for name, value in operator.kwargs)
    return Operator(operator.id, operator.target, args, kwargs, operator.outputs), found


def divided(operator: Operator, values: Values, count: torch.Tensor) -> torch.Tensor:
    """A loss of classes with the whole batch's count."""
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    x, labels = (values[value] for value in operator.inputs[:2])
    options = {name: operator.argument(at, name) for name, at in zip(names, (2, 3, 4, 5), strict=True)}
    weight = values[options["weight"].value] if options["weight"] else None
    ignored = -100 if options["ignore_index"] is None else options["ignore_index"]
    if "nll" in operator.target:
        return F.nll_loss(x, labels, weight, reduction="sum", ignore_index=ignored) / count
    smoothing = options["label_smoothing"] or 0.0
    return F.cross_entropy(x, labels, weight, None, ignored, None, "sum", smoothing) / count


def number_of_labels(operator: Operator, values: Values) -> torch.Tensor:
    labels = values[operator.inputs[1]]
    ignored = operator.argument(4, "ignore_index", -100)
    valid = labels != (-100 if ignored is None else ignored)
    weight = operator.argument(2, "weight")
    return valid.sum() if weight is None else (values[weight.value][labels.where(valid, 0)] * valid).sum()


def run(
    graph: OpGraph,
    given: Values,
    size: int,
    share: float,
    found: Mapping[str, Term],
    counts: Mapping[str, torch.Tensor] | None,
) -> tuple[Values, Values]:
    """All values of a micro-batch, and its own part of every count; without ``counts`` nothing is scaled."""
    values, own = dict(given), {}
    for operator in graph.operators:
        term = found.get(operator.id, Term("sum"))
        if term.kind == "count" and counts is not None and operator.target in CLASS_LOSSES:
            outputs = [divided(operator, values, counts[term.count])]
        elif term.kind == "count" and counts is not None:
            outputs = [counts[term.count]]
        elif term.kind == "share" and counts is not None:
            called, around = scaled(operator, term, share, values)
            outputs = [
                out if term.inputs else out * share for out in run_operator(called, around, size, graph.batch_size)
            ]
        else:
            outputs = run_operator(operator, values, size, graph.batch_size)
        if term.kind == "count":
            own[term.count] = number_of_labels(operator, values) if operator.target in CLASS_LOSSES else outputs[0]
        values.update((value, x) for value, x in zip(operator.outputs, outputs, strict=True) if value)
    return values, own


def parts(graph: OpGraph, values: Values, sizes: Sequence[int]) -> list[Values]:
    """The inputs of each micro-batch."""
    dims = {entry.value: entry.batch_dim for entry in graph.inputs}
    found: list[Values] = [{} for _ in sizes]
    for value, tensor in values.items():
        pieces = [tensor] * len(sizes) if dims[value] is None else tensor.split(list(sizes), dims[value])
        for one, piece in zip(found, pieces, strict=True):
            one[value] = piece
    return found


def gradients_of(model: nn.Module, loss: torch.Tensor) -> Values:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: x for name, x in zip(named, found, strict=True) if x is not None}


def check_against_whole_batch(traced: Traced, model: nn.Module, batch: Any, sizes: Sequence[int] = SIZES) -> None:
    """The loss, the gradients and the outputs of the whole batch are those of the micro-batches put together."""
    graph, found, outputs = in_double(traced.graph), terms(traced.graph), combined(traced.graph)
    assert coupling(graph) == ()
    states, given = state_values(graph, model, traced.constants), traced.inputs(batch)
    whole, _ = run(graph, states | given, sum(sizes), 1.0, found, None)
    micro_batches = list(zip(parts(graph, given, sizes), sizes, strict=True))
    counts: Values = {}
    for part, size in micro_batches:
        for name, own in run(graph, states | part, size, 1.0, found, None)[1].items():
            counts[name] = (counts[name] + own if name in counts else own).detach()
    results = [run(graph, states | part, size, size / sum(sizes), found, counts)[0] for part, size in micro_batches]
    for value, how in outputs.items():
        each = [result[value] for result in results]
        if how == "concatenate":
            together = torch.cat(each, graph.values[value].batch_dims[0])
        else:
            together = torch.stack(each).sum(0) if how == "sum" else each[0]
        torch.testing.assert_close(together, whole[value], rtol=1e-12, atol=1e-12)
    if graph.loss is None:
        return
    wanted = gradients_of(model, whole[graph.loss])
    got = gradients_of(model, torch.stack([result[graph.loss] for result in results]).sum())
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


# -- models ------------------------------------------------------------------------------------------------------------


def as_double(batch: Batch) -> Batch:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def zoo(name: str, training: bool = True) -> tuple[Traced, nn.Module, Batch]:
    """A model's trace at a batch of 4, and a batch of 8 whose first micro-batch has few valid labels."""
    torch.manual_seed(0)
    model, example = ZOO[name](4)
    model = model.double().train(training)
    traced = trace(model, as_double(example), loss_fn=cross_entropy if name == "mlp" else None)
    batch = as_double(ZOO[name](sum(SIZES))[1])
    for key in batch.keys() & {"target", "labels"}:
        batch[key] = labels = batch[key].clone()
        labels[:3] = -100
        if labels.dim() == 2:
            labels[3, 2:] = -100
            labels[5, :1] = -100
    return traced, model, batch


@pytest.mark.parametrize("name", [name for name in ZOO if name != "resnet"])
def test_model_in_micro_batches_is_the_whole_batch(name: str) -> None:
    traced, model, batch = zoo(name)
    assert {term.kind for term in terms(traced.graph).values()} == {"share" if name == "unet" else "count"}
    check_against_whole_batch(traced, model, batch)


def test_batch_norm_couples_in_training_only() -> None:
    traced, model, batch = zoo("resnet", training=False)
    check_against_whole_batch(traced, model, batch)
    reasons = coupling(zoo("resnet")[0].graph)
    assert any("batch_norm" in reason and "statistics of the whole batch" in reason for reason in reasons)
    assert all("modeling_resnet.py:" in reason for reason in reasons if "batch_norm (" in reason)


# -- small models: a layer, then what is to be looked at ----------------------------------------------------------------


class Small(nn.Module):
    """x [B, S, W], labels [B, S], mask [B, S], weight [classes] -> what ``then`` makes of the layer's result."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.then = then

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> Any:
        loss = self.then(self, self.layer(x), labels, mask, weight)
        return loss if isinstance(loss, dict) else {"loss": loss}


def small_batch(size: int) -> Batch:
    labels = torch.randint(0, CLASSES, (size, 7))
    labels[:3] = -100
    labels[3, 1:4] = -100
    mask = torch.rand(size, 7).double().round()
    mask[:, 0] = 1.0
    return {
        "x": torch.randn(size, 7, WIDTH).double(),
        "labels": labels,
        "mask": mask,
        "weight": torch.rand(CLASSES).double(),
    }


def small(then: Callable[..., Any], size: int = 4) -> tuple[Traced, nn.Module, Batch]:
    """A model's trace at a batch of ``size``, and a batch of 8 whose labels are unlike in number."""
    torch.manual_seed(0)
    model = Small(then).double()
    return trace(model, small_batch(size), batch_dims={"weight": None}), model, small_batch(sum(SIZES))


def flat(y: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y.flatten(0, 1), labels.flatten()


def penalty(m: Small) -> torch.Tensor:
    return 0.1 * m.layer.weight.square().sum()


def rows_loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.transpose(1, 2), labels, reduction="none")


def routed(m: Small, y: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A loss, and two more that are put together as a list is."""
    losses = [F.cross_entropy(*flat(y, labels)), y.square().mean(), 0.01 * y.abs().sum((0, 1)).mean()]
    return torch.stack([*losses, sum(losses)]).mean()


SEPARATE: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "cross-entropy": (lambda m, y, labels, mask, weight: F.cross_entropy(*flat(y, labels)), {"count"}),
    "weights": (lambda m, y, labels, mask, weight: F.cross_entropy(*flat(y, labels), weight=weight), {"count"}),
    "smoothing": (
        lambda m, y, labels, mask, weight: F.cross_entropy(*flat(y, labels), weight=weight, label_smoothing=0.1), {"count"}),
    "ignored": (lambda m, y, labels, mask, weight: F.cross_entropy(*flat(y, labels % 5), ignore_index=2), {"count"}),
    "shifted": (
        lambda m, y, labels, mask, weight: F.cross_entropy(*flat(y, F.pad(labels, (0, 1), value=-100)[:, 1:])), {"count"}),
    "classes second": (lambda m, y, labels, mask, weight: F.cross_entropy(y.transpose(1, 2), labels), {"count"}),
    "likelihood": (
        lambda m, y, labels, mask, weight: F.nll_loss(y.log_softmax(-1).flatten(0, 1), labels.flatten(), weight), {"count"}),
    "sum": (lambda m, y, labels, mask, weight: F.cross_entropy(*flat(y, labels), reduction="sum"), {"sum"}),
    "probabilities": (lambda m, y, labels, mask, weight: F.cross_entropy(y[:, 0], y[:, 1].softmax(-1).detach()), {"share"}),
    "batch after sequence": (
        lambda m, y, labels, mask, weight: F.cross_entropy(y.transpose(0, 1).reshape(-1, CLASSES), labels.T.reshape(-1)),
        {"count"}),
    "merged and parted": (
        lambda m, y, labels, mask, weight: (y.reshape(-1, CLASSES).softmax(-1).view(-1, 7, CLASSES)[:, :3] ** 2).mean(),
        {"share"}),
    "square error": (lambda m, y, labels, mask, weight: F.mse_loss(y[..., 0], mask), {"share"}),
    "mean over the batch": (lambda m, y, labels, mask, weight: (y.mean((0, 1)) * weight).sum(), {"share"}),
    "mean of each sample, then of the batch": (lambda m, y, labels, mask, weight: y.square().mean((1, 2)).mean(), {"share"}),
    "product over the batch": (
        lambda m, y, labels, mask, weight: torch.einsum("bsc,bs->c", y, mask).sum() / 3.0, {"sum"}),
    "by the batch size": (lambda m, y, labels, mask, weight: y.square().sum() / y.shape[0], {"sum", "share"}),
    "each by the batch size": (
        lambda m, y, labels, mask, weight: (y.square() / (y.shape[0] * y.shape[1])).sum(), {"sum", "share"}),
    "batch mean": (
        lambda m, y, labels, mask, weight: F.kl_div(y.log_softmax(-1), weight.softmax(0).expand_as(y), reduction="batchmean"),
        {"sum", "share"}),
    "penalty": (lambda m, y, labels, mask, weight: F.cross_entropy(*flat(y, labels)) + penalty(m), {"count", "share"}),
    "penalty taken off": (lambda m, y, labels, mask, weight: penalty(m) - y.square().mean(), {"share"}),
    "several losses": (routed, {"count", "share", "sum"}),
    "masked mean": (
        lambda m, y, labels, mask, weight: (y.square().mean(-1) * mask).sum() / mask.sum(), {"sum", "count"}),
    "masked mean of integers": (
        lambda m, y, labels, mask, weight: rows_loss(y, labels).sum() / (labels != -100).sum().clamp(min=1), {"sum", "count"}),
    "masked mean by size": (
        lambda m, y, labels, mask, weight: rows_loss(y, labels).sum() / (mask.sum() + 1e-6), {"sum", "count"}),
    "mask scaled before": (
        lambda m, y, labels, mask, weight: (y.square().mean(-1) * (mask / mask.sum())).sum(), {"sum", "count"}),
    "two divisors": (
        lambda m, y, labels, mask, weight: (y[..., 0] * mask).sum() / mask.sum() + y.sum() / (labels >= 0).sum(),
        {"sum", "count"}),
    "last token": (
        lambda m, y, labels, mask, weight: y[
            torch.arange(y.shape[0], device=y.device), mask.long().sum(-1) - 1].square().mean(), {"share"}),
    "cumulative along the sequence": (lambda m, y, labels, mask, weight: y.cumsum(1).square().mean(), {"share"}),
    "repeated": (
        lambda m, y, labels, mask, weight: y.repeat(2, 1, 1).view(2, -1, 7, CLASSES).softmax(0).square().mean(), {"share"}),
    "products over the batch": (
        lambda m, y, labels, mask, weight: (y.flatten(0, 1).T @ y.flatten(0, 1)).sum() / y.shape[0], {"sum", "share"}),
    "learnt weight of a loss": (
        lambda m, y, labels, mask, weight: F.cross_entropy(*flat(y, labels)) * m.layer.bias[0].exp() - m.layer.bias[0],
        {"count", "share"}),
    "mean of each sample's masked mean": (
        lambda m, y, labels, mask, weight: ((y.square().mean(-1) * mask).sum(1) / mask.sum(1)).mean(), {"share"}),
    "masked mean of each token": (
        lambda m, y, labels, mask, weight: ((y.square().mean(-1) * mask).sum(0) / mask.sum(0).clamp(min=1)).mean(),
        {"sum", "count"}),
    "zeros first": (lambda m, y, labels, mask, weight: y.new_zeros(()) + y.square().mean(), {"share"}),
    "outputs": (
        lambda m, y, labels, mask, weight: {
            "loss": F.cross_entropy(*flat(y, labels)), "y": y, "merged": y.flatten(0, 1),
            "right": (y.argmax(-1) == labels).sum(), "mean": y.mean(), "penalty": penalty(m), "many": y.transpose(0, 1) * 2},
        {"count", "share", "sum"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SEPARATE)
def test_small_model_in_micro_batches_is_the_whole_batch(name: str) -> None:
    then, kinds = SEPARATE[name]
    traced, model, batch = small(then)
    assert coupling(traced.graph) == ()
    assert {term.kind for term in terms(traced.graph).values()} == kinds
    check_against_whole_batch(traced, model, batch)
    check_against_whole_batch(traced, model, batch, (2, 2, 2, 2))


# -- programs ----------------------------------------------------------------------------------------------------------

PROGRAMS = [
    *((name, (2, 2), 2) for name in SEPARATE),
    *((name, (2,), 3) for name in ("cross-entropy", "weights", "square error", "penalty", "masked mean", "last token")),
    *(
        (name, (1,), 3)
        for name in ("likelihood", "probabilities", "by the batch size", "several losses", "two divisors")
    ),
]


@pytest.mark.parametrize(("name", "mesh_shape", "num_micro_batches"), PROGRAMS)
def test_program_in_micro_batches_is_the_plain_model(
    name: str, mesh_shape: tuple[int, ...], num_micro_batches: int
) -> None:
    """Loss and gradients of a step on simulated ranks; three micro-batches of eight samples are of unlike sizes."""
    traced, model, batch = small(SEPARATE[name][0], 8)
    plan = pipeline_plan(traced.graph, (), mesh_shape, "single", num_micro_batches)
    source = generate(plan, traced.graph)
    loss = model(**batch)["loss"]
    loss.backward()
    ran = run_program(source, traced, values_of(model), batch, plan.num_devices)
    assert_equal(ran, model, loss.detach())


def test_program_of_one_micro_batch_has_nothing_of_this() -> None:
    traced, _, _ = small(SEPARATE["two divisors"][0])
    source = generate(pipeline_plan(traced.graph, (), (2,), "single", 1), traced.graph)
    assert not any(word in source for word in ("mesh.share", "mesh.count", "COUNTS", "count="))


def test_count_module_computes_the_labels_only() -> None:
    traced, _, _ = small(SEPARATE["shifted"][0])
    source = generate(pipeline_plan(traced.graph, (), (2,), "single", 2), traced.graph)
    module = source[source.index("class LossCount") :].split("\n\n\n")[0]
    assert "F.pad(labels, (0, 1), value=-100" in module
    assert "F.linear" not in module
    assert 'Count("loss_count", LossCount, takes=("labels",)' in source


def test_outputs_are_put_together_by_what_they_are() -> None:
    traced, _, _ = small(SEPARATE["outputs"][0])
    words = {output.path: combined(traced.graph)[output.value] for output in traced.graph.outputs}
    assert words == {
        "loss": "sum", "y": "concatenate", "merged": "concatenate", "right": "sum", "mean": "sum", "penalty": "same",
        "many": "concatenate",
    }  # fmt: skip


def random_labels(m: Small, y: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> Any:
    return F.cross_entropy(*flat(y, labels.where(torch.rand_like(mask) < 0.5, -100)))


COUPLED: dict[str, tuple[Callable[..., Any], str]] = {
    "softmax": (lambda m, y, labels, mask, weight: y.softmax(0).square().mean(), "softmax.int"),
    "largest": (lambda m, y, labels, mask, weight: y.amax(0).mean(), "amax"),
    "sorted": (lambda m, y, labels, mask, weight: y.sort(0).values[0].mean(), "sort"),
    "running sum": (lambda m, y, labels, mask, weight: y.cumsum(0).square().mean(), "cumsum"),
    "rolled": (lambda m, y, labels, mask, weight: (y * y.roll(1, 0)).mean(), "roll"),
    "first sample": (lambda m, y, labels, mask, weight: (y - y[0]).square().mean(), "select"),
    "variance": (lambda m, y, labels, mask, weight: y.var(0).mean(), "var"),
    "less its mean": (lambda m, y, labels, mask, weight: (y - y.mean(0)).square().mean(), "sub"),
    "product of means": (lambda m, y, labels, mask, weight: y[..., 0].mean() * y[..., 1].mean(), "mul"),
    "square of a mean": (lambda m, y, labels, mask, weight: y.mean().square(), "square"),
    "root of a mean": (lambda m, y, labels, mask, weight: y.square().mean().sqrt(), "sqrt"),
    "by what depends on parameters": (lambda m, y, labels, mask, weight: y.sum() / y.abs().sum(), "div"),
    "similarity": (lambda m, y, labels, mask, weight: F.cross_entropy(y[:, 0] @ y[:, 1].T, labels[:, 0]), "matmul"),
    "pairs": (lambda m, y, labels, mask, weight: (y[: y.shape[0] // 2] * y[y.shape[0] // 2 :]).mean(), "slice"),
    "batch taken apart": (lambda m, y, labels, mask, weight: y.view(2, -1, 7, CLASSES).softmax(0).mean(), "softmax"),
    "places": (
        lambda m, y, labels, mask, weight: (y * torch.arange(y.shape[0], device=y.device)[:, None, None]).mean(), "places"),
    "by its size": (lambda m, y, labels, mask, weight: (y * y.shape[0]).mean(), "batch size"),
    "up to its size": (
        lambda m, y, labels, mask, weight: (y * torch.linspace(0, y.shape[0], 7)[:, None]).mean(), "batch size"),
    "in steps of its size": (
        lambda m, y, labels, mask, weight: (y * torch.arange(0, 7 * y.shape[0], y.shape[0])[:, None]).mean(), "batch size"),
    "filled with its size": (
        lambda m, y, labels, mask, weight: (y * torch.full((7, 1), y.shape[0], dtype=y.dtype)).mean(), "batch size"),
    "mean of a mask": (lambda m, y, labels, mask, weight: (y.sum(-1) * mask).mean() / mask.mean(), "div"),
    "divisor of a divisor": (
        lambda m, y, labels, mask, weight: y.sum() / ((mask / mask.sum()) ** 2).sum(), "div"),
    "random divisor": (lambda m, y, labels, mask, weight: y.sum() / (torch.rand_like(mask) * mask).sum(), "div"),
    "share of experts": (
        lambda m, y, labels, mask, weight: (
            y.softmax(-1).mean((0, 1)) * F.one_hot(y.argmax(-1), CLASSES).double().mean((0, 1))).sum(), "mul"),
    "every other sample": (lambda m, y, labels, mask, weight: y[::2].mean(), "slice"),
    "of another sample": (lambda m, y, labels, mask, weight: y[labels[:, 0].clamp(min=0)].mean(), "index"),
    "sorted losses": (lambda m, y, labels, mask, weight: rows_loss(y, labels).flatten().sort().values[-4:].mean(), "sort"),
    "perplexity": (lambda m, y, labels, mask, weight: F.cross_entropy(*flat(y, labels)).exp(), "exp"),
    "number added": (lambda m, y, labels, mask, weight: y.mean() + 1.0, "add"),
    "random labels": (random_labels, "random numbers"),
    "no batch": (lambda m, y, labels, mask, weight: {"loss": penalty(m), "y": y}, "no sum or mean over the batch"),
    "own rule missing": (lambda m, y, labels, mask, weight: torch.cdist(y, y).mean(), "has no rule"),
}  # fmt: skip


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples_is_named(name: str) -> None:
    then, words = COUPLED[name]
    traced, _, _ = small(then)
    reasons = coupling(traced.graph)
    assert any(words in reason for reason in reasons), reasons
    assert all("test_micro_batches.py:" in reason for reason in reasons if "(" in reason), reasons


def test_counter_in_a_buffer_couples() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.steps += 1
            return {"loss": self.layer(x).mean()}

    assert any(
        "the buffer steps" in reason for reason in coupling(trace(Counting(), {"x": torch.randn(4, WIDTH)}).graph)
    )


def test_one_batch_size_only_couples() -> None:
    traced = trace(
        Small(SEPARATE["square error"][0]).double(), small_batch(4), batch_dims=dict.fromkeys(small_batch(4))
    )
    assert "only one batch size" in coupling(traced.graph)[0]


def test_an_unscaled_mean_is_noticed() -> None:
    """The oracle can fail."""
    traced, model, batch = small(SEPARATE["square error"][0])
    assert set(terms(traced.graph).values()) == {Term("share")}
    traced.graph._cache["micro_batches"] = replace(traced.graph._cache["micro_batches"], terms={})
    with pytest.raises(AssertionError):
        check_against_whole_batch(traced, model, batch)
