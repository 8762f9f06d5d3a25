"""Loads the guard: the native part that is built for one minor version of torch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

from umem.core.install import build_command

__all__ = ["guard_problem", "guard_remedy", "native_guard"]


def native_guard() -> ModuleType | None:
    """Load the guard for the torch that runs, such as `umem.runtime._guard_torch2_13`.

    ``umem/runtime/_guard.pyi`` describes it. None where it is missing or does not work:
    :func:`guard_problem` says why.
    """
    return _load()[0]


def guard_problem() -> str:
    """Say why there is no guard; "" where there is one."""
    return _load()[1]


def guard_remedy() -> str:
    """Write the command that builds umem again, for the torch that is installed."""
    major = (torch.version.cuda or "13").partition(".")[0]
    return build_command(f"cuda{major}")


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    version = torch.__version__
    major, minor = version.split(".")[:2]
    name = f"umem.runtime._guard_torch{major}_{minor}"
    if importlib.util.find_spec(name) is None:
        return None, f"umem was built without the headers of torch {major}.{minor}"
    try:
        guard = importlib.import_module(name)
        works = guard.probe()
    except (ImportError, RuntimeError) as error:  # the second comes from torch's C++ side
        return None, f"{name} does not load beside torch {version}: {error}"
    if not works:
        return None, f"torch {version} does not call {name}"
    return guard, ""
