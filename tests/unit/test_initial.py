"""Initial values of models on meta: the model's own code, one module at a time, the same wherever they are made."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.initial import initial_values, materialized, meta_modules
from tests.support import models


def on_meta(make: Any, *args: Any) -> nn.Module:
    with torch.device("meta"):
        return make(*args)  # type: ignore[no-any-return]


def twin_on_meta(name: str) -> tuple[nn.Module, nn.Module]:
    """A model of the zoo, and the same on meta."""
    torch.manual_seed(0)
    model, _ = models.ZOO[name](2)
    arguments = [model.config] if hasattr(model, "config") else []
    return model, on_meta(type(model), *arguments).train()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5", "resnet", "mlp"])
def test_values_are_as_the_models_own_code_makes_them(name: str) -> None:
    """Of the same spread as those of an ordinary construction, element by element for constants and buffers."""
    model, meta = twin_on_meta(name)
    made = materialized(meta)
    assert [n for n, _ in made.named_parameters()] == [n for n, _ in model.named_parameters()]
    for (path, ours), (_, theirs) in zip(made.named_parameters(), model.named_parameters(), strict=True):
        assert ours.device.type == "cpu" and ours.requires_grad
        if ours.numel() > 200 or theirs.std(correction=0) == 0:
            torch.testing.assert_close(ours.std(correction=0), theirs.std(correction=0), rtol=0.25, atol=0.0, msg=path)
    for (path, ours_), (_, theirs_) in zip(made.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(ours_, theirs_), path
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))


def test_each_module_depends_on_seed_and_path_alone() -> None:
    _, meta = twin_on_meta("gpt2")
    whole = materialized(meta, seed=3).state_dict()
    torch.manual_seed(77)
    before = torch.get_rng_state()
    for path, _, names in reversed(list(meta_modules(meta))):
        for name, value in initial_values(meta, path, names, seed=3).items():
            assert torch.equal(value, whole[f"{path}.{name}"])
    assert torch.equal(torch.get_rng_state(), before)
    other = materialized(meta, seed=4).state_dict()
    assert not torch.equal(other["transformer.wte.weight"], whole["transformer.wte.weight"])
    first, second = (whole[f"transformer.h.{block}.mlp.c_fc.weight"] for block in (0, 1))
    assert not torch.equal(first, second)


def test_tied_tensors_stay_tied() -> None:
    _, meta = twin_on_meta("gpt2")
    made: Any = materialized(meta)
    assert made.lm_head.weight is made.transformer.wte.weight
    names = [f"{path}.{name}" for path, _, names in meta_modules(meta) for name in names]
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names


class Scaled(nn.Module):
    """Initialises a linear layer of its own anew, as attention layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(50, 40)
        self.scale = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.projection.weight, 2.0)
        nn.init.constant_(self.scale, 3.0)


class Root(nn.Module):
    """A model that initialises by a pass over its modules, through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()
        self.embed = nn.Embedding(30, 20)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.5)


def test_modules_around_have_their_say() -> None:
    made: Any = materialized(on_meta(Root))
    assert made.inner.projection.weight.eq(2.0).all() and made.inner.scale.eq(3.0).all()
    assert made.inner.projection.bias.abs().max() <= 1 / math.sqrt(50)
    assert 0.4 < made.embed.weight.std() < 0.6


class Rotary(nn.Module):
    """Keeps what it was made with."""

    def __init__(self, dim: int, base: float = 10000.0, device: Any = None) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("frequencies", base ** (-torch.arange(0, dim, 2, device=device) / dim), persistent=False)


class Forgetful(nn.Module):
    """Does not keep what it was made with."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(size, size).tril())


class Masked(nn.Module):
    """A buffer beside layers, which are not built again with it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.layer = nn.Linear(size, size)
        self.register_buffer("mask", torch.ones(size, size).tril())
        Masked.layers.append(self.layer)

    layers: ClassVar[list[nn.Module]] = []


def test_buffers_are_computed_again_without_parameters() -> None:
    made: Any = materialized(on_meta(Masked, 5))
    assert torch.equal(made.mask, torch.ones(5, 5).tril())
    assert len(Masked.layers) == 2 and Masked.layers[1].weight.is_meta
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_buffers_are_computed_again() -> None:
    made: Any = materialized(nn.Sequential(on_meta(Rotary, 8, 500.0), on_meta(nn.BatchNorm1d, 3)))
    assert torch.equal(made[0].frequencies, Rotary(8, 500.0).frequencies)
    assert torch.equal(made[1].running_var, torch.ones(3)) and int(made[1].num_batches_tracked) == 0


def test_tensors_with_values_are_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3), on_meta(nn.Linear, 3, 3))
    made: Any = materialized(model)
    assert torch.equal(made[0].weight, model[0].weight) and made[1].weight.device.type == "cpu"


class Bare(nn.Module):
    """A parameter made in the constructor only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


def test_errors_name_what_cannot_be_made() -> None:
    with pytest.raises(InputError, match=r"0\.mask is on the meta device .* Forgetful keeps no attribute size"):
        materialized(nn.Sequential(on_meta(Forgetful)))
    with pytest.raises(InputError, match=r"0\.table is on the meta device and Bare has no code that initialises it"):
        materialized(nn.Sequential(on_meta(Bare)))
