"""What operators exchange between devices themselves, beside the changes of layout around them."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.layout import Cut, Split, local_size
from autopar.mesh import Mesh
from autopar.reshard import Traffic
from autopar.strategies.rule import Signature


def exchanged(rule: Signature | None, label: str, mesh: Mesh, counted: bool = False) -> Iterator[tuple[Traffic, bool]]:
    """Every collective of an operator's call under a strategy's label, with whether it is of the backward pass.

    ``counted``: the number of rows that a mean divides by is known before the call, so that it is not exchanged.
    """
    if rule is None or not rule.exchanges:
        return
    letters = letters_of_label(label, rule)
    for exchange in rule.exchanges:
        if counted and not exchange.letters:
            continue
        num_bytes = exchange.item_bytes
        for letter in exchange.letters:
            splits = letters.get(letter, [])
            pieces: tuple[Split, ...] = tuple((cut, mesh.shape[axis], 0) for axis, cut in splits)
            num_bytes *= local_size(rule.sizes[letter], pieces) if pieces else rule.sizes[letter]
        num_bytes += exchange.more_elements * exchange.item_bytes
        for axis, _ in letters.get(exchange.letter, []):
            if mesh.shape[axis] > 1:
                for _ in range(exchange.count):
                    yield Traffic(axis, exchange.kind, num_bytes), exchange.backward


def letters_of_label(label: str, rule: Signature) -> dict[str, list[tuple[int, Cut]]]:
    """The axes that split each letter, from a strategy's label such as ``b R`` or ``n[3x768/64] b``."""
    found: dict[str, list[tuple[int, Cut]]] = {}
    for axis, chosen in enumerate(label.split(" ")):
        letter, _, cut = chosen.removesuffix("]").partition("[")
        if letter in rule.sizes and letter not in ("R", "G", "P"):
            found.setdefault(letter, []).append((axis, Cut.parse(cut) if cut else Cut.plain(rule.sizes[letter])))
    return found
