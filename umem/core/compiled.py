"""Functions compiled by numba, with a cache on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import event

from umem.core.progress import notify

__all__ = ["compiled", "compiled_in_place"]

_functions: set[Any] = set()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function at its first call, or load it from numba's cache.

    The cache is beside the source file or in the user's cache folder (``NUMBA_CACHE_DIR`` sets
    another); if neither can be written, every process compiles again. A message announces the
    first compilation of a process. The function runs without the interpreter's lock, beside other
    threads.
    """
    try:
        made = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no cache folder can be written
        made = njit(nogil=True, **options)(function)
    _functions.add(made)
    return made


def compiled_in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only works on the arrays it is given, and makes none.

    It becomes part of its compiled callers, without numba's runtime. Otherwise each call copies the
    description of every array of a tuple, and counts a reference to each by an atomic operation:
    four fifths of the simulator's time.
    """
    return compiled(function, _nrt=False, forceinline=True)


class _Announcer(event.Listener):
    """Announces the first function that numba compiles instead of loading it from its cache."""

    def __init__(self) -> None:
        self._has_announced = False

    def on_start(self, started: Any) -> None:
        function = started.data["dispatcher"]
        if self._has_announced or function not in _functions:
            return
        self._has_announced = True
        has_cache = function.stats.cache_path is not None
        how_often = "once on this machine" if has_cache else "in every process, for want of a cache"
        notify(f"compiling the planner, {how_often}: up to a minute")

    def on_end(self, ended: Any) -> None:
        pass


event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]
