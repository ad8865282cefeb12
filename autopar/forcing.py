"""What a user forces: the meshes and roles of axes that are left to search, and whether devices and model allow it at all.

Enters: options, the number of devices, the traced graph. Leaves: meshes with a role for each axis, or an InputError.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import cast

from autopar.batching import micro_batch_sizes
from autopar.costing.operators import Role
from autopar.errors import InputError
from autopar.graph import OpGraph
from autopar.mesh import factorizations
from autopar.micro_batches import coupling
from autopar.options import Parallelism, PlanOptions
from autopar.strategies.loss import FUSED
from autopar.strategies.registry import signature_of
from autopar.strategies.rule import Signature

DEGREES = ("data", "tensor", "context", "spatial", "expert", "pipeline")  # how many devices share what


def meshes(num_devices: int, options: PlanOptions) -> Iterator[tuple[tuple[int, ...], tuple[Role, ...]]]:
    """Every mesh of so many devices to try, with the role of each of its axes (``free`` where nothing is forced). What is
    forced has an axis each, also where that makes more than are searched."""
    found = _with_degrees(num_devices, options)
    size = options.parallelism.zero_size
    yield from found if size is None else (entry for entry in found if _can_share(*entry, size))


def _can_share(shape: Sequence[int], roles: Sequence[Role], num_devices: int) -> bool:
    """Whether some axes along which the batch may be split have so many devices together."""
    sizes = [size for size, role in zip(shape, roles, strict=True) if role in ("free", "data") and size > 1]
    products = {1}
    for size in sizes:
        products |= {size * product for product in products}
    return num_devices in products


def _with_degrees(num_devices: int, options: PlanOptions) -> Iterator[tuple[tuple[int, ...], tuple[Role, ...]]]:
    wanted = _forced_degrees(options.parallelism)
    if options.mesh_shape is not None:
        shapes = [options.mesh_shape] if math.prod(options.mesh_shape) == num_devices else []
    else:
        num_forced = sum(degree is not None and degree > 1 for degree in wanted.values())
        num_forced += options.parallelism.zero_size not in (None, options.parallelism.data)  # within the data axis
        shapes = factorizations(num_devices, max(options.max_mesh_axes, num_forced))
    if all(degree is None for degree in wanted.values()):
        yield from ((shape, free_roles(shape)) for shape in shapes)
        return
    for shape in shapes:
        for roles in itertools.product(wanted, repeat=len(shape)):
            degrees = {role: math.prod(s for s, r in zip(shape, roles, strict=True) if r == role) for role in wanted}
            if all(wanted[role] in (None, degree) for role, degree in degrees.items()):
                yield shape, roles


def _forced_degrees(forced: Parallelism) -> dict[Role, int | None]:
    """How many devices each role of an axis is to have; None for a role that takes what the others leave."""
    wanted = {
        forced.context_form or "context": forced.context, "spatial": forced.spatial,
        forced.expert_form or "expert": forced.expert,
    }  # fmt: skip
    more = {cast("Role", role): degree for role, degree in wanted.items() if degree is not None}
    return {"data": forced.data, "tensor": forced.tensor, **more}


def check_degrees(num_devices: int, options: PlanOptions) -> None:
    """Raise InputError when what is forced cannot be laid out on so many devices."""
    forced, shape = options.parallelism, options.mesh_shape
    ranks = [forced.pipeline] if forced.pipeline else [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    if any(num_devices % n == 0 and any(True for _ in meshes(num_devices // n, options)) for n in ranks):
        return
    if shape is not None and all(degree is None for degree in (*_forced_degrees(forced).values(), forced.zero_size)):
        pipeline = f" x pipeline={forced.pipeline}" if forced.pipeline else ""
        raise InputError(
            f"mesh_shape={shape} has {math.prod(shape)} devices{pipeline}, the cluster {num_devices}; give a shape of which "
            "the devices, times the pipeline ranks, are as many as the cluster has, or leave it out"
        )
    given = [name for name in (*DEGREES, "zero_size") if name in ("data", "tensor") or getattr(forced, name)]
    raise InputError(
        f"{' x '.join(f'{name}={getattr(forced, name)}' for name in given)} cannot be laid out on {num_devices} devices"
        f"{'' if shape is None else f' as a mesh of {shape}'}: the product of the forced degrees must be {num_devices} (a "
        "degree that is left out takes the rest)"
        + ("" if forced.zero_size is None else ", and zero_size be one of the ways to divide those that share the batch")
    )


def check_forced(graph: OpGraph, options: PlanOptions) -> None:
    """Raise InputError when the model has nothing that could be divided as is forced."""
    forced = options.parallelism
    _check_micro_batches(graph, forced)
    _check_logits(graph, forced)
    if all(degree in (None, 1) for degree in (forced.spatial, forced.expert, forced.context)):
        return
    rules = [rule for operator in graph.operators if (rule := signature_of(operator, graph)) is not None]
    _check_space(graph, rules, forced)
    _check_experts(graph, rules, forced)
    _check_ring(graph, rules, forced)


def _check_micro_batches(graph: OpGraph, forced: Parallelism) -> None:
    """Raise InputError when several micro-batches are forced on a model that must see its batch as a whole, or micro-batches of
    unlike sizes on data parallelism that shares them out in different ways."""
    size = forced.micro_batch_size
    coupled = coupling(graph)
    if size is None or size >= graph.batch_size:
        return
    if coupled:
        raise InputError(
            f"micro_batch_size={size}: {graph.model} must see its batch of {graph.batch_size} as a whole, as {coupled[0]}; "
            "leave micro_batch_size out"
        )
    sizes = sorted(set(micro_batch_sizes(graph.batch_size, math.ceil(graph.batch_size / size))))
    if len(sizes) > 1 and any(one % (forced.data or 1) for one in sizes):
        raise InputError(
            f"micro_batch_size={size}, data={forced.data}: a batch of {graph.batch_size} makes micro-batches of {sizes} "
            f"samples, which {forced.data} devices share out in different ways; give a micro_batch_size that divides the batch"
        )


def _check_logits(graph: OpGraph, forced: Parallelism) -> None:
    """Raise InputError when logits are to exist in chunks and there are none that can."""
    if forced.logits != "chunks":
        return
    rules = (signature_of(operator, graph) for operator in graph.operators if operator.target == FUSED)
    if not any(rule is not None and rule.chunked is not None and rule.chunked.is_offered for rule in rules):
        raise InputError(
            f"Parallelism(logits='chunks'): {graph.model} does not end in a trained linear layer whose result is read by its "
            "cross-entropy alone (a sum or a mean over labels that are classes, nothing but views and a cast between the two); "
            "leave logits out"
        )


def _check_space(graph: OpGraph, rules: Sequence[Signature], forced: Parallelism) -> None:
    """Raise InputError when space is to be split and no operator has any that can be."""
    if forced.spatial in (None, 1):
        return
    if not any(rule.spatial for rule in rules):
        raise InputError(
            f"Parallelism(spatial={forced.spatial}): {graph.model} has no convolution or pooling whose space can be split (a "
            "whole number of strides, padded so that windows are centred, as with padding=kernel_size // 2); leave spatial out"
        )


def _check_experts(graph: OpGraph, rules: Sequence[Signature], forced: Parallelism) -> None:
    """Raise InputError when experts are to be shared out and there are none, or too few."""
    if forced.expert in (None, 1):
        return
    numbers = [rule.sizes[letter] for rule in rules for letter in rule.experts if letter not in rule.joint]
    if not numbers:
        raise InputError(
            f"Parallelism(expert={forced.expert}): {graph.model} has no mixture of experts, neither one that sends tokens to "
            "chosen experts nor products with a weight for each expert; leave expert out"
        )
    if max(numbers) < forced.expert:
        raise InputError(
            f"Parallelism(expert={forced.expert}): the mixtures of {graph.model} have {max(numbers)} experts at the most, and "
            f"each device needs one; give expert={max(numbers)} or less"
        )


def _check_ring(graph: OpGraph, rules: Sequence[Signature], forced: Parallelism) -> None:
    """Raise InputError when attention is to go around a ring and there is none that can."""
    if forced.context_form != "ring" or forced.context in (None, 1):
        return
    longest = max((rule.sizes[s] for rule in rules if rule.kind == "attention" for s in rule.joint), default=0)
    if longest < forced.context:
        raise InputError(
            f"Parallelism(context={forced.context}, context_form='ring'): {graph.model} has no scaled_dot_product_attention of "
            f"heads with {forced.context} or more queries and keys whose rows may be split together; leave context_form out"
        )


def free_roles(shape: Sequence[int]) -> tuple[Role, ...]:
    """Axes on which nothing is forced."""
    return tuple("free" for _ in shape)
