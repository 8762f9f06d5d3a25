"""Functions compiled by numba, and kept compiled from process to process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import event

from umem.core.progress import notify

__all__ = ["compiled"]

_functions: set[Any] = set()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, or take it from numba's cache.

    The cache lies beside the source file or in the user's cache folder (``NUMBA_CACHE_DIR`` names
    another); where none of them can be written, every process compiles anew. The first function
    that a process compiles is announced.
    """
    try:
        made = njit(cache=True)(function)
    except RuntimeError:  # numba found no place for a cache
        made = njit(function)
    _functions.add(made)
    return made


class _Announcer(event.Listener):
    """Hears of every function that numba compiles, but not of those that it has in its cache."""

    def __init__(self) -> None:
        self._has_told = False

    def on_start(self, started: Any) -> None:
        function = started.data["dispatcher"]
        if self._has_told or function not in _functions:
            return
        self._has_told = True
        is_kept = function.stats.cache_path is not None
        how_often = "for this machine" if is_kept else "in every process, for want of a cache"
        notify(f"compiling the planner, {how_often}: up to half a minute")

    def on_end(self, ended: Any) -> None:
        pass


event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]
