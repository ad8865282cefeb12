"""The line of the model's code that each traced operator comes from, looked up as its node is made.

torch.export otherwise writes down the whole stack for every operator, which takes a tenth of its time. Where there is no such
line, or torch asks for it in another way, its own way is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch.fx import traceback as fx_traceback

from autopar.tracing.source import is_user_file

_HERE = str(Path(__file__).resolve().parent)
_KEY = "stack_trace"
_is_user_file = lru_cache(maxsize=4096)(is_user_file)


class _Lines(dict[str, Any]):
    """What torch.fx gives to nodes beside their own: of the stack the line that is being executed."""

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        return _line() if key == _KEY and not found else found


def _line() -> str | None:
    """The innermost line of the model's code that is being executed, as in the text of a stack; None where that is torch's
    own down to where tracing began."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
        code = frame.f_code
        if _is_user_file(code.co_filename):
            return f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
        frame = frame.f_back
    return None


@contextmanager
def noted_lines() -> Iterator[None]:
    """Note lines while torch.export runs."""
    with fx_traceback.preserve_node_meta():
        fx_traceback.current_meta = _Lines(fx_traceback.get_current_meta())
        yield
