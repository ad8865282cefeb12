"""What operators exchange between devices themselves, beside the changes of layout around them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.layout import Cut, Split, local_size
from autopar.mesh import Mesh
from autopar.reshard import Traffic
from autopar.strategies.rule import Exchange, Signature, in_whole_groups
from autopar.strategies.spatial import exchanged_halos, halo_section


def exchanged(rule: Signature | None, label: str, mesh: Mesh, counted: bool = False) -> Iterator[tuple[Traffic, bool]]:
    """Every collective of an operator's call under a strategy's label, with whether it is of the backward pass: as the first
    device sends it, also where that is nothing and only others send.

    ``counted``: the number of rows that a mean divides by is known before the call, so that it is not exchanged.
    """
    if rule is None or not (rule.exchanges or rule.halos):
        return
    letters = letters_of_label(label, rule)
    for exchange in rule.exchanges:
        if counted and not exchange.letters:
            continue
        num_bytes = exchange.item_bytes
        for letter in exchange.letters:
            halved = letter == exchange.halved
            local = _local_size(rule, letter, letters, mesh, at_end=halved and exchange.returns)
            num_bytes *= local // 2 if halved else local
        num_bytes //= _sent_once(exchange, letters, mesh)
        num_bytes += exchange.more_elements * exchange.item_bytes
        for axis, _ in letters.get(exchange.letter, []):
            if mesh.shape[axis] > 1:
                for _ in range(exchange.times(mesh.shape[axis])):
                    yield Traffic(axis, exchange.kind, num_bytes), exchange.backward
    yield from _with_neighbours(rule, letters, mesh)


def _with_neighbours(
    rule: Signature, letters: dict[str, list[tuple[int, Cut]]], mesh: Mesh
) -> Iterator[tuple[Traffic, bool]]:
    """The halos: the first device sends the next one the end of its piece, and in backward the gradient of what it got."""
    lengths = {letter: float(_local_size(rule, letter, letters, mesh)) for letter in letters}
    for halo in exchanged_halos(rule, letters):
        row_bytes = round(halo_section(rule, halo, lengths)) * halo.item_bytes
        for axis, _ in letters[halo.letter]:
            yield Traffic(axis, "send_recv", halo.before * row_bytes), False
            if halo.has_gradient:
                yield Traffic(axis, "send_recv", halo.after * row_bytes), True


def _sent_once(exchange: Exchange, letters: dict[str, list[tuple[int, Cut]]], mesh: Mesh) -> int:
    """How many elements that are alike one sent element stands for."""
    letter, group = exchange.alike or ("", 1)
    splits = letters.get(letter, [])
    parts = math.prod(mesh.shape[axis] for axis, _ in splits)
    return group if all(in_whole_groups(cut, parts, group) for _, cut in splits) else 1


def _local_size(
    rule: Signature, letter: str, letters: dict[str, list[tuple[int, Cut]]], mesh: Mesh, at_end: bool = False
) -> int:
    """What the first device holds of a letter, or the last one of the axes that split it."""
    size = rule.sizes[letter]
    splits = sorted(split for name in rule.splitting(letter) for split in letters.get(name, []))
    pieces: tuple[Split, ...] = tuple(
        (cut if cut.size == size else Cut.plain(size), mesh.shape[axis], mesh.shape[axis] - 1 if at_end else 0)
        for axis, cut in splits
    )
    return local_size(size, pieces) if pieces else size


def letters_of_label(label: str, rule: Signature) -> dict[str, list[tuple[int, Cut]]]:
    """The axes that split each letter, from a strategy's label such as ``b R`` or ``n[3x768/64] b``."""
    found: dict[str, list[tuple[int, Cut]]] = {}
    for axis, chosen in enumerate(label.split(" ")):
        letter, _, cut = chosen.removesuffix("]").partition("[")
        if letter in rule.sizes and letter not in ("R", "G", "P"):
            found.setdefault(letter, []).append((axis, Cut.parse(cut) if cut else Cut.plain(rule.sizes[letter])))
    return found
