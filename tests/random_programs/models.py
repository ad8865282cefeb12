"""Whole models drawn at random: inputs, lines of all families, repeated blocks, outputs and a loss.

A drawn model is kept only where it trains on one device, and where rounding stays rounding: a second run in which every
operator's result is off in the 13th digit must give the same loss and gradients to 9 digits, so that no comparison, rounding
or maximum stands on a knife's edge.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.random_programs.drawing import Draw, Unfit
from tests.random_programs.families import elementwise, pieces, products, reductions, views
from tests.random_programs.recipe import Body, Recipe, build, value_of, without_dead

Proposals = list[tuple[Callable[[Draw], object], float]]
FAMILIES: dict[str, tuple[Proposals, float]] = {
    "elementwise": (elementwise.PROPOSALS, 3), "views": (views.PROPOSALS, 2.5), "contraction": (products.CONTRACTIONS, 2.5),
    "normalization": (products.NORMALIZATIONS, 1), "attention": (products.ATTENTION, 0.8), "loss": (reductions.LOSSES, 0.8),
    "indexing": (pieces.INDEXING, 1.3), "pieces": (pieces.PIECES, 2), "reduction": (reductions.REDUCTIONS, 1.5),
    "creation": (reductions.CREATION, 1), "pooling": (reductions.POOLING, 1.3), "in place": (pieces.IN_PLACE, 0.8),
}  # fmt: skip
INPUTS = [
    (-1, 6), (-1, 5, 8), (-1, 7, 6), (-1, 4, 12), (-1, 6, 5), (-1, 3, 4, 5), (-1, 4, 6, 6), (-1, 6, 5, 4), (-1, 2, 3, 4, 3),
    (-1, 8), (-1, 2, 4, 6), (4, 6), (5, 7), (-1,),
]  # fmt: skip
BATCHES = (2, 3, 4, 4, 5, 6, 6, 7, 8)
MAX_LOSSES = 5
NOISE = 1e-13
ALLOWED = 1e-9


class NotTrainable(Exception):
    """A drawn model that has no gradient, or one that rounding changes."""


def draw_recipe(seed: str) -> Recipe:
    """A model of at least ten operators that trains. The same seed, the same model."""
    for attempt in range(200):
        try:
            recipe = _drawn(f"{seed}.{attempt}" if attempt else seed)
            if recipe.num_lines >= 10:
                check_trains(recipe)
                return recipe
        except (Unfit, NotTrainable):
            continue
    raise AssertionError(f"no model drawn from seed {seed}")


def _drawn(seed: str) -> Recipe:
    rng = random.Random(seed)
    d = Draw(rng, rng.choice(BATCHES))
    shapes = [rng.choice([shape for shape in INPUTS if -1 in shape])]
    shapes += [rng.choice(INPUTS) for _ in range(rng.choice((0, 0, 1, 2)))]
    for shape in shapes:
        d.leaf("input", shape, -1.5, 1.5)
    weights = {name: weight * rng.choice((0.3, 1, 1, 3)) for name, (_, weight) in FAMILIES.items()}
    bodies: list[tuple[str, Body]] = []
    wanted, with_blocks = rng.randint(10, 22), rng.random() < 0.4
    for _ in range(wanted * 8):
        if len(d.lines) >= wanted:
            break
        if with_blocks and len(d.lines) >= wanted // 3 and len(bodies) < 1:
            _propose_body(d, weights, bodies)
        _propose_line(d, weights)
    losses = _losses(d)
    made = d.names(lambda x: True)
    outputs = rng.sample(made, min(len(made), rng.choice((0, 0, 1, 2, 3))))
    outputs = [name for name in outputs if name.startswith("v") and name not in losses and _is_no_rest(d.here[name])]
    recipe = Recipe(
        seed, d.batch, tuple(d.leaves), tuple(d.lines), tuple(bodies), tuple(dict.fromkeys(outputs)), tuple(losses)
    )
    return without_dead(recipe)


def _propose_line(d: Draw, weights: dict[str, float]) -> None:
    family = d.random.choices(list(weights), list(weights.values()))[0]
    proposals, chances = zip(*FAMILIES[family][0], strict=True)
    d.propose(d.random.choices(proposals, chances)[0])


def _propose_body(d: Draw, weights: dict[str, float], bodies: list[tuple[str, Body]]) -> None:
    """A repeated block on a value whose first dim is the batch: a residual branch of a few lines."""

    def proposal(d: Draw) -> None:
        x = d.pick(lambda t: t.dtype == torch.float64 and t.dim() >= 2 and t.shape[0] == d.batch)
        if d.follows(x) != [True] + [False] * (len(d.shape(x)) - 1):
            raise Unfit
        body = _body(d, x, weights)
        name = f"layers{d.number}"
        for space in (d.here, d.other):
            setattr(space["self"], name, [Block(body, f"{name}{index}.") for index in range(body.count)])
        d.line(f"{{0}} = {d.apart(x)}\nfor block in self.{name}:\n    {{0}} = block({{0}})")
        line = d.lines[-1]
        d.lines[-1] = type(line)(line.text, (*line.reads, name), line.makes)
        bodies.append((name, body))

    d.propose(proposal)


def _body(d: Draw, x: str, weights: dict[str, float]) -> Body:
    inner = Draw(d.random, d.batch, inputs=False, number=d.number)
    for space, other in ((inner.here, False), (inner.other, True)):
        space["x"] = torch.tanh(d.value(x, other)).detach()
    for _ in range(40):
        if len(inner.lines) >= d.random.randint(3, 8):
            break
        _propose_line(inner, {name: w for name, w in weights.items() if name != "loss"})
    inner.number = max(inner.number, d.number)
    shape, count = inner.shape("x"), len(inner.shape("x"))
    floats = [name for name in inner.names(lambda t: t.dtype == torch.float64) if name != "x"]
    alike = [name for name in floats if inner.shape(name) == shape and inner.follows(name) == inner.follows("x")]
    rows = [name for name in floats if inner.follows(name) == [True] + [False] * (len(inner.shape(name)) - 1)]
    if alike and d.random.random() < 0.8:
        made = inner.one(f"x + 0.5 * torch.tanh({alike[-1]})")
    elif [name for name in rows if len(inner.shape(name)) > 1]:
        row = [name for name in rows if len(inner.shape(name)) > 1][-1]
        made = inner.one(f"x * 0.9 + torch.tanh({row}).flatten(1).mean(1).view(b{', 1' * (count - 1)})")
    else:
        raise Unfit
    d.number = inner.number
    return Body(tuple(inner.leaves), tuple(inner.lines), made, d.random.choice((2, 2, 3)))


class Block:
    """What a block computes, while drawing."""

    def __init__(self, body: Body, prefix: str) -> None:
        self.body, self.prefix = body, prefix

    def __call__(self, x: Tensor) -> Tensor:
        own = SimpleNamespace()
        for leaf in self.body.leaves:
            value = getattr(own, leaf.of) if leaf.of else value_of(leaf, 0, self.prefix)
            setattr(own, leaf.name, value.requires_grad_() if leaf.kind == "parameter" else value)
        space: dict[str, Any] = {"torch": torch, "F": F, "aten": torch.ops.aten, "b": x.shape[0], "self": own, "x": x}
        for line in self.body.lines:
            exec(line.text, {}, space)
        made: Tensor = space[self.body.made]
        return made


def _losses(d: Draw) -> list[str]:
    """Scalars of the values that nothing reads."""
    found = []
    ends = [name for name in d.names(lambda x: x.dtype == torch.float64 and x.requires_grad) if name not in d.read]
    for name in ends[-MAX_LOSSES:]:
        terms = [
            f"(0.3 * {name} * {name}).mean()", f"{name}.mean()", f"torch.sin({name}).mean()", f"{name}.sum() * 0.01",
            f"F.mse_loss({name}, torch.zeros_like({name}))", f"torch.tanh({name}).mean(0).sum() * 0.1",
        ]  # fmt: skip
        if d.shape(name) == ():
            terms = [f"{name} * 0.5", f"torch.sin({name})", f"{name} * {name}"]
        found.append(d.one(d.random.choice(terms)))
    if not found:
        raise Unfit
    return found


def _is_no_rest(value: Tensor) -> bool:
    """Whether a value is more than what rounding has left of zero: errors are relative to its largest element."""
    largest = float(value.detach().to(torch.complex128).abs().max())
    return largest == 0 or largest > 1e-4


@dataclass(frozen=True)
class Step:
    """What a training step gives: loss, gradients, outputs and buffers, in this order."""

    tensors: tuple[Tensor, ...]
    has_gradient: bool


def check_trains(recipe: Recipe) -> None:
    """Raise NotTrainable unless the model has a gradient and rounding does not change what it computes."""
    model, inputs, _ = build(recipe)
    exact = _step(model, inputs)
    model, inputs, _ = build(recipe)
    with _Noise():
        noisy = _step(model, inputs)
    largest = max((float(g.detach().abs().max()) for g in exact.tensors if g.numel()), default=0.0)
    if not exact.has_gradient or not 1e-4 < largest < 1e5:
        raise NotTrainable("no gradient")
    for one, other in zip(exact.tensors, noisy.tensors, strict=True):
        if not torch.isfinite(torch.view_as_real(one) if one.is_complex() else one).all():
            raise NotTrainable("not finite")
        if one.numel() and float((one - other).abs().max()) > ALLOWED:
            raise NotTrainable("rounding matters")


def _step(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    torch.manual_seed(0)  # plain dropout draws from torch's generator
    try:
        found = model(**{name: value.clone() for name, value in inputs.items()})
        loss: Tensor = found["loss"]
        if not loss.requires_grad:
            raise NotTrainable("no gradient")
        loss.backward()
    except RuntimeError as error:
        raise NotTrainable(str(error)) from None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(gradient.any()) for gradient in gradients):
        raise NotTrainable("a gradient of zero: what a parameter leads to may be written over")
    floats = [t.detach().double() if not t.is_complex() else t.detach() for t in (*found.values(), *model.buffers())]
    significant = any(float(gradient.abs().max()) > 1e-6 for gradient in gradients)
    return Step((*floats, *gradients), significant)


class _Noise(TorchDispatchMode):
    """While active, every new floating-point result is off by some 1e-13 of itself, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        memory = {_memory(x) for x in _tensors((args, kwargs))}
        if isinstance(made, Tensor):
            return self._off(made, memory)
        if isinstance(made, (tuple, list)):
            return type(made)(self._off(x, memory) if isinstance(x, Tensor) else x for x in made)
        return made

    def _off(self, x: Tensor, memory: set[int]) -> Tensor:
        if x.dtype != torch.float64 or _memory(x) in memory or x.numel() == 0:
            return x
        return x.mul_(1 + NOISE * torch.randn(x.shape, generator=self.draw, dtype=torch.float64))


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [x for item in tree for x in _tensors(item)] if isinstance(tree, (tuple, list)) else []
