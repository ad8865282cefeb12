"""The line of the user's code that each traced operator comes from, noted as it is called.

torch.export otherwise writes down the whole stack for every operator, which takes a fifth of its time. Operators that are not
called through torch's functions keep its way.
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
from torch.overrides import TorchFunctionMode

from autopar.tracing.source import is_user_file

_HERE = str(Path(__file__).resolve().parent)
_KEY = "stack_trace"
_is_user_file = lru_cache(maxsize=4096)(is_user_file)


class _Lines(TorchFunctionMode):
    """While a function of torch's runs, what it traces has the innermost line of the user's code as its stack."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meta = fx_traceback.get_current_meta()
        outer = meta.get(_KEY)
        here = _line()
        if here is not None:
            meta[_KEY] = here
        try:
            return func(*args, **(kwargs or {}))
        finally:
            meta.pop(_KEY, None)
            if outer is not None:
                meta[_KEY] = outer


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
    with fx_traceback.preserve_node_meta(), _Lines():
        yield
