"""Why a step could not be recorded: the line of the user's program, and the remedy."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from umem.errors import TraceError

__all__ = ["explained"]

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")
)

_GUARD = "`if __name__ == '__main__':`"


@contextmanager
def explained(name: str, stage: str) -> Iterator[None]:
    """Turn whatever is raised inside into a TraceError that says where and what to do.

    Parameters
    ----------
    name
        What is being recorded.
    stage
        What runs: ``make_step``, ``the step``, ``importing it``.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        place = _place(error)
        start = f"{name}: {place}: " if place else f"{name}: "
        raise TraceError(start + _reason(error, stage)) from error


def _reason(error: BaseException, stage: str) -> str:
    if isinstance(error, TraceError):
        return str(error)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return (
            f"{error.func} needs the data of a tensor, which a step recorded without memory does "
            "not have: leave out .item(), float() and `if` on tensors, and masks used as indices; "
            "return tensors from the step instead"
        )
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} cannot be recorded: it does not say which shape it returns"
    if isinstance(error, SystemExit):
        return f"{stage} ended the program: put what a script does when run under {_GUARD}"
    said = f"{stage} raised {type(error).__name__}: {_first_line(error)}"
    if "not compiled with CUDA" in str(error) or "not linked with support" in str(error):
        return f"{said}: leave out calls of torch.cuda; tensors and modules may say device='cuda'"
    return said


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _place(error: BaseException) -> str:
    """File, line and function of the innermost frame that is the user's own, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not path.is_file():
            continue
        path = path.resolve()
        if path.is_relative_to(_PACKAGE) or any(map(path.is_relative_to, _LIBRARIES)):
            continue
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""
