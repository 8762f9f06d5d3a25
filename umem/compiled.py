"""Functions compiled by numba, and kept compiled from process to process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, or take it from numba's cache.

    The cache lies beside the source file or in the user's cache folder (``NUMBA_CACHE_DIR`` names
    another); where none of them can be written, every process compiles anew.
    """
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # numba found no place for a cache
        return njit(function)
