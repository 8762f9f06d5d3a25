"""Loads the native library, and the libraries that it needs."""

from __future__ import annotations

import contextlib
import functools
import importlib
from types import ModuleType

from umem.core.errors import NativeLibraryError
from umem.core.install import install_command

__all__ = ["native"]


@functools.cache
def native() -> ModuleType:
    """Load the module `umem.runtime._native`; ``umem/runtime/_native.pyi`` describes it.

    Raises ``NativeLibraryError`` if it, RMM's or CUDA's library is missing, with the remedy.
    """
    # The wheel's search path finds RMM beside umem; this also finds it elsewhere, as after
    # `pip install --target`. A core-only build needs no RMM; other builds report a missing library
    # below.
    with contextlib.suppress(ImportError):
        importlib.import_module("librmm").load_library()
    try:
        return importlib.import_module("umem.runtime._native")
    except ImportError as error:
        raise NativeLibraryError(
            f"umem's native library does not load: {error}. Install it with RMM and CUDA's "
            f"runtime, `{install_command('cuda13')}` (or cuda12); `umem doctor` shows what is "
            "there."
        ) from error
