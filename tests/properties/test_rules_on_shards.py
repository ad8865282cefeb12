"""Every rule, proved on shards: each strategy on one, two and three devices equals one device, gradients included."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.graph import Operator, OpGraph
from autopar.strategies.registry import RULES, signature_of
from autopar.strategies.rule import Signature
from tests.properties.rule_samples import Sample, T, samples
from tests.support.shards import WrongRule, check_sample, saved_bytes, with_one_gradient_less

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_rule_has_a_sample() -> None:
    sampled = {sample.target for sample in samples()}
    assert not sorted(set(RULES) - sampled), "rules without a sample in rule_samples.py"


@pytest.mark.parametrize("sample", samples(), ids=str)
def test_rule_on_shards(sample: Sample) -> None:
    tried = sum(check_sample(sample, shape) for shape in ((1,), (2,), (3,), *sample.meshes))
    assert tried >= 3, "not even the replicated strategies were tried"


# Kept by CPU kernels beside what the rules say, or less than it; small, rare, or not differentiable.
NOT_EXACT = {
    "aten.isfinite.default", "aten.sgn.default", "aten.argsort.default", "aten.argsort.stable", "aten.kl_div.default",
    "aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default",
    "autopar.experts.default",  # the runtime's own: in tests/unit/test_experts.py
}  # fmt: skip


@pytest.mark.parametrize("sample", [sample for sample in samples() if sample.target not in NOT_EXACT], ids=str)
def test_saved_for_backward(sample: Sample) -> None:
    """What a rule says is kept for backward is what autograd keeps on the CPU: an upper estimate, within a few numbers."""
    real, said = saved_bytes(sample)
    assert real <= said + 128, "more is kept than the rule says"
    assert said <= real + 128, "less is kept than the rule says"


# Which of attention's kernels runs depends on what needs a gradient; experts are several operators in one.
OF_SEVERAL_KERNELS = ("aten.scaled_dot_product_attention.default", "autopar.experts.default")


def test_saved_where_an_input_has_no_gradient() -> None:
    """What is kept only for an input's gradient is not kept where that input has none: a frozen weight, the model's input."""
    exact = [sample for sample in samples() if sample.target not in {*NOT_EXACT, *OF_SEVERAL_KERNELS}]
    for sample in itertools.chain.from_iterable(map(with_one_gradient_less, exact)):
        real, said = saved_bytes(sample)
        assert abs(real - said) <= 128, f"{sample} keeps {real} bytes, its rule says {said}"


LINEAR = Sample("aten.linear.default", (T(5, 6), T(7, 6), T(7)))


def _changed(**fields: object):
    def rule(operator: Operator, graph: OpGraph) -> Signature | None:
        right = signature_of(operator, graph)
        assert right is not None
        return replace(right, **fields)

    return rule


@pytest.mark.parametrize(
    "wrong",
    [
        _changed(additive=frozenset()),  # the bias would count once per device
        _changed(linear=(frozenset({0}),)),  # and here too
        _changed(replicated_after=frozenset({"k"})),  # a partial result taken for the whole
    ],
    ids=["bias not additive", "bias beside partial input", "sum left out"],
)
def test_wrong_rules_are_found(wrong) -> None:
    check_sample(LINEAR, (2,))
    with pytest.raises(WrongRule):
        check_sample(LINEAR, (2,), wrong)


def test_wrong_softmax_is_found() -> None:
    """A rule that lets the softmax dim be split."""

    def wrong(operator: Operator, graph: OpGraph) -> Signature:
        term = (("a",), ("b",))
        return Signature((term,), (term,), {"a": 5, "b": 6})

    with pytest.raises(WrongRule, match="split 'b'"):
        check_sample(Sample("aten.softmax.int", (T(5, 6), -1)), (2,), wrong)
