"""Loads the guard, the native part that is built for one minor version of torch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

__all__ = ["guard_problem", "native_guard"]

REBUILD_GUARD = "pip install --no-build-isolation --no-deps --force-reinstall umem"
"""The command that builds umem again, for the torch that is installed."""


def native_guard() -> ModuleType | None:
    """Load the guard for the torch that runs, such as `umem.runtime._guard_torch2_13`.

    ``umem/runtime/_guard.pyi`` describes it. None where it is missing or does not work:
    :func:`guard_problem` says why.
    """
    return _load()[0]


def guard_problem() -> str:
    """Why there is no guard, with the remedy; "" where there is one."""
    return _load()[1]


def module_name(torch_version: str) -> str:
    """The module with the guard for a version of torch: `_guard_torch2_13` for "2.13.0+cpu"."""
    major, minor = torch_version.split(".")[:2]
    return f"umem.runtime._guard_torch{major}_{minor}"


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    name = module_name(torch.__version__)
    if importlib.util.find_spec(name) is None:
        return None, f"umem was built without torch {torch.__version__}; run `{REBUILD_GUARD}`"
    try:
        guard = importlib.import_module(name)
    except ImportError as error:
        return None, f"{name} does not load ({error}); run `{REBUILD_GUARD}`"
    if not guard.probe():
        return None, f"torch {torch.__version__} does not call it: please report this"
    return guard, ""
