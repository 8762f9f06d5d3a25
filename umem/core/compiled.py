"""Functions compiled by numba, with a cache on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import event

from umem.core.progress import notify

__all__ = ["compiled"]

_functions: set[Any] = set()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, or load it from numba's cache.

    The cache is beside the source file or in the user's cache folder (``NUMBA_CACHE_DIR`` sets
    another); if neither can be written, every process compiles again. A message announces the
    first compilation of a process.
    """
    try:
        made = njit(cache=True)(function)
    except RuntimeError:  # no cache folder can be written
        made = njit(function)
    _functions.add(made)
    return made


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
        notify(f"compiling the planner, {how_often}: up to half a minute")

    def on_end(self, ended: Any) -> None:
        pass


event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]
