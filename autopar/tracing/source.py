"""Where in the user's code an operator comes from: file and line, module path, the numbered modules around it.

Enters: stack traces and module stacks as torch.export records them. Leaves: short texts for people, and paths.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_HERE = str(Path(__file__).resolve().parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def short_source(filename: str, line: int) -> str:
    """``gpt2/modeling_gpt2.py:583``: the last two parts of the path."""
    return f"{'/'.join(Path(filename).parts[-2:])}:{line}"


def is_user_file(filename: str) -> bool:
    """Whether a file is neither torch's, nor Python's own, nor of this package: the user's, or a model library's."""
    if filename.startswith((_TORCH, _HERE, "<")):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or "site-packages" in filename


def line_of_error(trace: TracebackType | None) -> str | None:
    """The innermost line of the user's code in an exception's traceback."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_user_file(frame.filename):
            return short_source(frame.filename, frame.lineno or 0)
    return None


def line_of_stack() -> str:
    """The innermost line of the user's code that is being executed."""
    frames = (frame for frame in reversed(traceback.extract_stack()) if is_user_file(frame.filename))
    return next((short_source(frame.filename, frame.lineno or 0) for frame in frames), "some point")


@lru_cache(maxsize=4096)
def line_of_trace(stack_trace: str) -> str:
    """The innermost line of the user's code in the text of a stack trace, else its innermost line, else nothing.

    Lines of this package are nobody's: they would make a graph another one with every version.
    """
    lines = [line for line in re.findall(r'File "([^"]+)", line (\d+)', stack_trace) if not line[0].startswith(_HERE)]
    own = [line for line in lines if is_user_file(line[0])] or lines
    return short_source(own[-1][0], int(own[-1][1])) if own else ""


@lru_cache(maxsize=4096)
def read_module_stack(entries: tuple[tuple[str, Any], ...]) -> tuple[str, str, tuple[str, ...]]:
    """Path and class of the innermost module, and all numbered paths around it, from the outside in.

    ``entries`` are (path, class) from the outside in; the model stands at ``model`` inside a wrapper.
    """
    path, module_class = "", ""
    nest: list[str] = []
    for raw, name in entries:
        path = without_wrapper(re.sub(r"@\d+", "", raw))
        module_class = (name if isinstance(name, str) else name.__qualname__).rsplit(".", 1)[-1] if raw else ""
        for match in re.finditer(r"(?:^|\.)\d+(?=\.|$)", path):
            if path[: match.end()] not in nest:
                nest.append(path[: match.end()])
    return path, module_class, tuple(nest)


def without_wrapper(path: str) -> str:
    """A path as the user's model has it, from one of the wrapper around the model."""
    return "" if path == "model" else path.removeprefix("model.")
