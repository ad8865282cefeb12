"""Dropout: the same elements under every plan, and on one device."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import Parallelism, PlanOptions
from autopar.codegen import generate
from autopar.planner import plan_graph
from autopar.runtime import Engine, Mesh, dropout, load_program
from autopar.runtime.draws import Draws
from autopar.runtime.layouts import parse_words, take_share
from autopar.runtime.random import whole_dropout
from autopar.simulation import run_ranks
from autopar.tracing import trace
from autopar.verifier import dropping
from autopar.verifier.double import default_dtype, in_double
from cost_models import Cluster


def gpt2(attention: str = "sdpa", layers: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, vocab_size=61, n_positions=16, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    ids = torch.arange(6 * 12).view(6, 12) % 61
    return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


PLANS = {
    "data 2": (2, Parallelism(data=2, pipeline=1)),
    "data 4, uneven": (4, Parallelism(data=4, pipeline=1)),
    "tensor 3": (3, Parallelism(tensor=3, pipeline=1)),
    "data 2 x tensor 2, recomputed": (4, Parallelism(data=2, tensor=2, pipeline=1, recompute="full")),
    "zero-3, selective": (2, Parallelism(data=2, zero=3, pipeline=1, recompute="selective")),
    "micro-batches": (2, Parallelism(data=2, pipeline=1, micro_batch_size=2)),
    "pipeline": (2, Parallelism(pipeline=2, schedule="1f1b", micro_batch_size=2)),
    "pipeline x data, recomputed": (
        4, Parallelism(pipeline=2, data=2, schedule="1f1b", micro_batch_size=2, recompute="full"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_drops_what_one_device_drops(name: str) -> None:
    model, inputs = gpt2()
    devices, forced = PLANS[name]
    plan = autopar.plan(model, Cluster.local(devices), inputs, parallelism=forced)
    found = autopar.verify(model, plan, inputs, count_collectives=True)
    assert found.passed, str(found)


def test_other_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison is worth: with the numbers of another site the plain model is another one."""

    def elsewhere(x: torch.Tensor, p: float, site: str, draws: Draws, batch_dims: tuple[int, ...]) -> torch.Tensor:
        return whole_dropout(x, p, site + "'", draws, batch_dims)

    monkeypatch.setattr(dropping, "whole_dropout", elsewhere)
    model, inputs = gpt2(layers=1)
    plan = autopar.plan(model, Cluster.local(2), inputs, parallelism=Parallelism(data=2, pipeline=1))
    assert not autopar.verify(model, plan, inputs).passed


def losses(devices: int, parallelism: Parallelism, num_steps: int, seed: int = 0) -> list[float]:
    """Of a training of that many steps in float64."""
    model, inputs = gpt2()
    graph = in_double(trace(model, inputs).graph)  # the model's own loss is in float32, whatever its parameters are in
    plan = plan_graph(graph, Cluster.local(devices), PlanOptions(parallelism=parallelism))
    source, values = generate(plan, graph), {name: value.double() for name, value in model.state_dict().items()}

    def train(rank: int) -> list[float]:
        engine = Engine(load_program(source), seed=seed)
        engine.load(values.__getitem__)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
        found = []
        for _ in range(num_steps):
            found.append(float(engine.step(**inputs)))
            optimizer.step()
            optimizer.zero_grad()
        return found

    with default_dtype(torch.float64):
        return run_ranks(devices, train)[0] if devices > 1 else train(0)


def test_ten_steps_are_the_same_on_any_number_of_devices() -> None:
    alone = losses(1, Parallelism(), 10)
    assert len({round(loss, 12) for loss in alone}) == 10
    for devices, forced in (
        (2, Parallelism(tensor=2, pipeline=1)),
        (3, Parallelism(data=3, pipeline=1, recompute="full")),
        (4, Parallelism(data=2, pipeline=2, schedule="1f1b", micro_batch_size=2)),
    ):
        for one, other in zip(alone, losses(devices, forced, 10), strict=True):
            assert abs(one - other) <= 1e-10 * abs(one)


def test_a_seed_and_a_step_have_numbers_of_their_own() -> None:
    first, again, other = (losses(1, Parallelism(), 2, seed) for seed in (0, 0, 1))
    assert first == again
    assert first[0] != other[0]


SHAPES = [((5,), (0,)), ((7, 6), (0,)), ((7, 6), ()), ((3, 4, 5), (1,)), ((4, 3, 6, 5), (0,))]


@pytest.mark.parametrize(("shape", "batch_dims"), SHAPES)
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
def test_every_share_of_a_mask_is_that_of_the_whole(
    shape: tuple[int, ...], batch_dims: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """Under every layout, the second of two micro-batches included."""
    x = torch.rand(shape, dtype=torch.float64) + 1
    whole = whole_dropout(x, 0.4, "site", Draws(3, 5), batch_dims)
    batch = shape[batch_dims[0]] if batch_dims else 1
    for dims in itertools.product(range(len(shape)), repeat=len(sizes)):
        layout = ",".join(f"S{dim}" for dim in dims)
        for place in itertools.product(*(range(size) for size in sizes)):
            mesh = Mesh(**{f"axis{index}": size for index, size in enumerate(sizes)})
            for axis, at in zip(mesh.axes, place, strict=True):
                axis._place = at
            for first, samples in ((0, batch),) if batch < 4 or not batch_dims else ((0, 2), (2, batch - 2)):
                mesh.draws = Draws(3, 5, first, samples, planned=batch)
                part = x.narrow(batch_dims[0], first, samples) if batch_dims else x
                expected = whole.narrow(batch_dims[0], first, samples) if batch_dims else whole
                words = parse_words(layout, mesh, len(shape))
                share = take_share(part, words, mesh)
                found = dropout(share, 0.4, mesh, "site", shape, layout, batch_dims)
                assert torch.equal(found, take_share(expected, words, mesh))


def test_elements_are_dropped_independently_and_as_often_as_said() -> None:
    kept = (whole_dropout(torch.ones(64, 128, 96), 0.3, "site", Draws(), (0,)) != 0).double() - 0.7
    noise = math.sqrt(0.21 / kept.numel())
    assert abs(float(kept.mean())) < 5 * noise
    for dim in range(3):
        neighbours = kept.narrow(dim, 1, kept.shape[dim] - 1) * kept.narrow(dim, 0, kept.shape[dim] - 1)
        assert abs(float(neighbours.mean())) < 5 * 0.21 / math.sqrt(kept.numel())
        others = [at for at in range(3) if at != dim]
        spread = float(kept.mean(others).std()) / math.sqrt(0.21 * kept.shape[dim] / kept.numel())
        assert 0.7 < spread < 1.3
    assert float(whole_dropout(torch.ones(5), 1.0, "site", Draws()).abs().max()) == 0


class Noise(nn.Module):
    """Numbers of torch's own generator, and a loss that shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * torch.rand_like(x)).sum()


def test_what_generators_draw_is_drawn_alike_and_leaves_them_as_they_were() -> None:
    model, inputs = Noise(), {"x": torch.ones(4, 4)}
    plan = autopar.plan(model, Cluster.local(2), inputs, parallelism=Parallelism(data=2, pipeline=1))
    source, values = generate(plan, trace(model, inputs).graph), dict(model.state_dict())
    assert "DRAWS_ALIKE = True" in source
    found = []
    for before in (1, 2):  # as two processes, whose generators are at different places
        torch.manual_seed(before)
        state = torch.random.get_rng_state()
        engine = Engine(load_program(source.replace("Mesh(data=2)", "Mesh(data=1)")), seed=5)
        engine.load(values.__getitem__)
        found.append([float(engine.step(**inputs)) for _ in range(2)])
        assert torch.equal(torch.random.get_rng_state(), state)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "each step has numbers of its own"
