"""Methods of a block beside its ``forward``: what backward computes again, called by the runtime's ``checkpoint``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from autopar.codegen import text
from autopar.codegen.naming import unique
from autopar.codegen.scope import Scope
from autopar.codegen.statements import Compute, FunctionBody

_INDENT = 8
# Of torch's own modules, where a method of this name would take the place of another.
_TAKEN = frozenset("_apply _buffers _modules _parameters _version _get_name _replicate_for_data_parallel".split())


class Method(Protocol):
    """What is needed of the function that is written."""

    arguments: list[str]
    scope: Scope

    def argument_layouts(self) -> str:
        """Shape and layout of each argument."""

    def batch_line(self, lines: Sequence[str]) -> list[str]:
        """The line that says how large the batch is, where ``lines`` ask for it."""


def method_name(body: FunctionBody, results: Sequence[str], taken: Iterable[str]) -> str:
    """``_attention`` where there is one, else the name of what is computed."""
    kinds = [statement.operator.target for statement in body.statements if isinstance(statement, Compute)]
    named = [name for name in reversed(results) if name != "x"]
    base = "attention" if any("scaled_dot_product" in kind for kind in kinds) else (named or ["run"])[0]
    return unique(f"_{base.lstrip('_')}", {*taken, *_TAKEN})


def method_lines(name: str, method: Method, lines: Sequence[str], results: Sequence[str]) -> list[str]:
    """The whole method."""
    header = f"def {name}({', '.join(['self', *method.arguments])}):"
    return [
        *text.line(header, 4, method.argument_layouts()),
        *method.batch_line(lines),
        *lines,
        *text.line(f"return {', '.join(results)}", _INDENT),
    ]
