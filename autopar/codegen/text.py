"""Pieces of source text: layouts as words, axes, sizes for people, and long lines broken at commas."""

from __future__ import annotations

import ast
import keyword
import textwrap
from collections.abc import Sequence

from autopar.layout import Layout, Shard, State
from autopar.mesh import Mesh

LINE_LENGTH = 120


def word(state: State) -> str:
    """``S1`` for a plain cut, else ``S1[3x768/64]``; ``R``, ``G`` or ``P``."""
    if isinstance(state, Shard):
        return f"S{state.dim}" if state.cut.is_plain else str(state)
    return str(state)


def words(layout: Layout) -> str:
    """One word for each axis: ``S0,R``."""
    return ",".join(word(state) for state in layout)


def axis_text(mesh: Mesh, axis: int) -> str:
    """``mesh.data``."""
    name = mesh.names[axis]
    return f"mesh.{name}" if name.isidentifier() and not keyword.iskeyword(name) else f'mesh["{name}"]'


def megabytes(num_bytes: int) -> str:
    """``12.6 MB``, ``512 B``: decimal units, three digits at the most."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1000
    raise AssertionError("the last unit takes any size")


def quoted(text: str) -> str:
    """A string literal in double quotes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def tuple_text(items: Sequence[str]) -> str:
    """``(a,)``, ``(a, b)``."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def is_primary(expression: str) -> bool:
    """Whether ``.method()`` may follow the expression as it stands, and it may be an operand anywhere."""
    node = ast.parse(expression, mode="eval").body
    return isinstance(node, (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Tuple, ast.List))


def line(code: str, indent: int, comment: str = "") -> list[str]:
    """A statement as one line, or as several where it is too long; the comment goes beside or above it."""
    pad = " " * indent
    whole = f"{pad}{code}  # {comment}" if comment else pad + code
    if len(whole) <= LINE_LENGTH:
        return [whole]
    above = [f"{pad}# {part}" for part in textwrap.wrap(comment, LINE_LENGTH - indent - 2, break_long_words=False)]
    if len(pad + code) <= LINE_LENGTH:
        return [*above, pad + code]
    return above + _broken(code, indent)


def docstring(words: str, indent: int) -> list[str]:
    """Words as a docstring, on several lines where they are long."""
    width = LINE_LENGTH - indent
    lines = textwrap.wrap(f'"""{words}', width - 3, break_long_words=False, break_on_hyphens=False)
    return [f"{' ' * indent}{part}" for part in [*lines[:-1], f'{lines[-1]}"""']]


def _broken(code: str, indent: int) -> list[str]:
    """The statement with the contents of its last outermost brackets on lines of their own."""
    opening, closing = _last_brackets(code)
    pad = " " * indent
    if opening is None:
        return [pad + code]
    inner = _pieces(code[opening + 1 : closing])
    head, tail = pad + code[: opening + 1], pad + code[closing:]
    if len(inner) == 1:  # a comma would make a tuple of what brackets only group, and of an index
        comma = "," if code[closing - 1] == "," else ""
        return [head, *_fitted(inner[0] + comma, indent + 4), tail]
    one = " " * (indent + 4) + ", ".join(inner)
    if len(one) <= LINE_LENGTH:
        return [head, one, tail]
    body: list[str] = []
    current = ""
    for piece in inner:
        joined = f"{current} {piece}," if current else f"{piece},"
        if current and len(joined) + indent + 4 > LINE_LENGTH:
            body += _fitted(current, indent + 4)
            joined = f"{piece},"
        current = joined
    body += _fitted(current, indent + 4)
    return [head, *body, tail]


def _fitted(code: str, indent: int) -> list[str]:
    return [" " * indent + code] if len(code) + indent <= LINE_LENGTH else _broken(code, indent)


def _last_brackets(code: str) -> tuple[int | None, int]:
    """The outermost brackets that hold the most text, by position; none when there is nothing in any."""
    best: tuple[int | None, int] = (None, 0)
    for opening, closing in _outermost(code):
        if closing - opening > 1 and (best[0] is None or closing - opening >= best[1] - best[0]):
            best = (opening, closing)
    return best


def _outermost(code: str) -> list[tuple[int, int]]:
    found, depth, start, quote = [], 0, 0, ""
    for at, char in enumerate(code):
        if quote:
            quote = "" if char == quote and code[at - 1] != "\\" else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth, start = depth + 1, at if depth == 0 else start
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                found.append((start, at))
    return found


def _pieces(inside: str) -> list[str]:
    """What stands between the commas of one level."""
    spans = _outermost(inside)
    found, start, quote = [], 0, ""
    for at, char in enumerate(inside):
        if quote:
            quote = "" if char == quote and inside[at - 1] != "\\" else quote
        elif char in "\"'":
            quote = char
        elif char == "," and not any(first < at < last for first, last in spans):
            found.append(inside[start:at].strip())
            start = at + 1
    rest = inside[start:].strip()
    return [*found, rest] if rest else found
