"""Rules that are found by running: what is found, what is refused, and that plans made with them compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import probe_rule, prove_rule
from autopar.errors import RuleError
from autopar.strategies import registry
from cost_models import Cluster
from tests.support import own_operators as own


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@dataclass(frozen=True)
class Case:
    """An operator with example arguments, and the (input or output, dim) groups that go together as one letter."""

    target: str
    arguments: tuple[Any, ...]
    together: frozenset[tuple[tuple[int, int], ...]]
    keywords: tuple[tuple[str, Any], ...] = ()


def groups(*found: tuple[tuple[int, int], ...]) -> frozenset[tuple[tuple[int, int], ...]]:
    return frozenset(found)


X, W, MASK = rand(4, 6), rand(5, 6), rand(4, 6) > 0.3
PLACES = torch.tensor([[0, 3, 6], [1, 1, 2], [4, 5, 0]])
CASES = [
    Case("own::scaled_linear", (X, W), groups(((0, 0), (2, 0)), ((0, 1), (1, 1)), ((1, 0), (2, 1)))),
    Case("own::gated", (X, rand(4, 6)), groups(((0, 0), (1, 0), (2, 0)), ((0, 1), (1, 1), (2, 1)))),
    Case("own::row_softmax", (rand(4, 5, 6), 2.0), groups(((0, 0), (1, 0)), ((0, 1), (1, 1)))),
    Case(
        "own::distances",
        (rand(4, 6, 3), rand(4, 5, 3)),
        groups(((0, 0), (1, 0), (2, 0)), ((0, 1), (2, 1)), ((1, 1), (2, 2)), ((0, 2), (1, 2))),
    ),
    Case("own::rms_norm", (rand(4, 5, 6), rand(6)), groups(((0, 0), (2, 0)), ((0, 1), (2, 1)))),
    Case("own::low_and_high", (X,), groups(((0, 0), (1, 0), (2, 0)))),
    Case("own::masked_sum", (X,), groups(((0, 0), (1, 0), (2, 0)), ((0, 1), (1, 1))), (("mask", MASK),)),
    Case(
        "own::with_bias", (X, rand(6, 5), rand(5)), groups(((0, 0), (3, 0)), ((0, 1), (1, 0)), ((1, 1), (2, 0), (3, 1)))
    ),
    Case("own::looked_up", (rand(7, 5), PLACES), groups(((0, 1), (2, 2)), ((1, 0), (2, 0)), ((1, 1), (2, 1)))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.target)
def test_all_legal_splits_are_found(case: Case) -> None:
    found = probe_rule(case.target, *case.arguments, **dict(case.keywords))
    tensors = found.text.replace("->", ",").split(",")
    places: dict[str, list[tuple[int, int]]] = {}
    for index, term in enumerate(tensors):
        for dim, letter in enumerate(term.split()):
            places.setdefault(letter, []).append((index, dim))
    assert {tuple(places[letter]) for letter in found.splits} == case.together, found.text
    assert found.differentiable


def test_what_is_linear_and_what_is_added_is_found() -> None:
    found = probe_rule("own::with_bias", X, rand(6, 5), rand(5), register=False)
    assert found.additive == (2,)
    assert set(found.linear) == {(0, 2), (1, 2)}


@pytest.mark.parametrize("target", ["own::over_its_norm", "own::rolled"])
def test_what_cannot_be_split_is_refused(target: str) -> None:
    with pytest.raises(RuleError, match="cannot be split along any dim"):
        probe_rule(target, rand(4, 6))


# Rules of which each allows something that is wrong: forward, in a gradient, or on partial values.
WRONG: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("own::scaled_linear", "b k, n k -> n b", (rand(4, 6), rand(4, 6) ** 2), {}),
    ("own::scaled_linear", "b k, n k -> b n", (X, W), {"linear": [(0, 1)]}),
    ("own::masked_sum", "a b, a c -> a", (X, MASK), {}),
    ("own::scaled_linear", "b k, k n -> b n", (rand(4, 4), rand(4, 4)), {}),
    ("own::gated", "b k, b j -> b k", (X, rand(4, 6)), {}),
    ("own::gated", "b k, b k -> b k", (X, rand(4, 6)), {"linear": [(0, 1)]}),
    ("own::gated", "b k, b k -> b k", (X, rand(4, 6)), {"linear": [(1,)]}),
    ("own::row_softmax", "a b c -> a b c", (rand(4, 5, 6), 2.0), {}),
    ("own::row_softmax", "a b c -> a b c", (rand(4, 5, 6), 2.0), {"whole": ["c"], "linear": [(0,)]}),
    ("own::distances", "b n d, b m d -> b n m", (rand(4, 6, 3), rand(4, 5, 3)), {"linear": [(0,)]}),
    ("own::distances", "b n d, b m d -> b m n", (rand(4, 5, 3), rand(4, 5, 3)), {}),
    ("own::rms_norm", "a b c, c -> a b c", (rand(4, 5, 6), rand(6)), {}),
    ("own::rms_norm", "a b c, c -> a b c", (rand(4, 5, 6), rand(6)), {"whole": ["c"], "linear": [(0,)]}),
    ("own::low_and_high", "a b -> a, a", (X,), {}),
    ("own::low_and_high", "a b -> b, a", (rand(4, 4),), {"whole": ["b"]}),
    ("own::with_bias", "b k, k n, n -> b n", (X, rand(6, 5), rand(5)), {}),
    ("own::with_bias", "b k, k n, n -> b n", (X, rand(6, 5), rand(5)), {"additive": [2], "linear": [(0,)]}),
    ("own::over_its_norm", "a b -> a b", (X,), {}),
    ("own::rolled", "a b -> a b", (X,), {"whole": ["b"]}),
    ("own::looked_up", "v d, a b -> a b d", (rand(7, 5), torch.randint(0, 7, (4, 6))), {}),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_wrong_rules_are_refused(index: int) -> None:
    target, text, arguments, allowed = WRONG[index]
    with pytest.raises(RuleError, match="is wrong"):
        prove_rule(target, text, *arguments, **allowed)


def test_a_right_rule_is_proved() -> None:
    assert prove_rule("own::scaled_linear", "b k, n k -> b n", X, W, linear=[(0,), (1,)]) >= 20


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(8, 6))
        self.scale = nn.Parameter(rand(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = own.rms_norm(own.scaled_linear(x, self.weight), self.scale)
        return (own.row_softmax(hidden, 2.0) - labels).square().mean() + own.row_softmax(hidden, 3.0).square().mean()


def planned() -> tuple[nn.Module, autopar.Plan, dict[str, torch.Tensor]]:
    model, inputs = Classifier(), {"x": rand(12, 6), "labels": rand(12, 8)}
    return model, autopar.plan(model, Cluster.local(2), inputs, parallelism=autopar.Parallelism(data=2)), inputs


def replicated(plan: autopar.Plan) -> dict[str, int]:
    return {entry["target"]: entry["occurrences"] for entry in plan.report()["fallbacks"]}


def test_a_plan_splits_what_was_probed_and_nothing_else() -> None:
    assert set(replicated(planned()[1])) == {
        f"own.{name}.default" for name in ("scaled_linear", "rms_norm", "row_softmax")
    }
    probe_rule("own::scaled_linear", X, W)
    probe_rule("own::rms_norm", rand(4, 6), rand(6))
    probe_rule("own::row_softmax", rand(4, 6), 2.0)
    model, plan, inputs = planned()
    assert replicated(plan) == {"own.row_softmax.default": 1}, "with another temperature it was not probed"
    found = autopar.verify(model, plan, inputs)
    assert found.passed, str(found)


@pytest.mark.parametrize(
    ("target", "arguments", "fault"),
    [
        ("own::not_there", (X,), "there is no operator own.not_there.default"),
        ("aten::relu_", (X,), "changes its arguments"),
        ("aten::rand_like", (X,), "it is random"),
        ("aten::ones", ([2, 3],), "none of the example's arguments is a tensor"),
        ("own::scaled_linear", (X, rand(5, 7)), "fails on the example"),
        ("no operator", (X,), "not an operator"),
    ],
)
def test_bad_examples_are_explained(target: str, arguments: tuple[Any, ...], fault: str) -> None:
    with pytest.raises(RuleError, match=fault):
        probe_rule(target, *arguments)
