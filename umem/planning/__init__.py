"""Planners: from a trace, a machine and a policy to a schedule of hints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umem.planning.plan_files import (
        load_schedule,
        plan_key,
        save_schedule,
        store_plan,
        stored_plan,
    )
    from umem.planning.planners import PLANNERS, page_out, plan

__all__ = [
    "PLANNERS",
    "load_schedule",
    "page_out",
    "plan",
    "plan_key",
    "save_schedule",
    "store_plan",
    "stored_plan",
]

_OF_PLANNERS = ("PLANNERS", "page_out", "plan")


def __getattr__(name: str) -> Any:
    """Load a module at the first use of a name: planners load numba, which takes long."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "planners" if name in _OF_PLANNERS else "plan_files"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
