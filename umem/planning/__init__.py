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
    from umem.planning.planners import (
        PLANNERS,
        KeptStep,
        explained_plan,
        page_out,
        plan,
        step_if_kept,
    )
    from umem.planning.problem import explain
    from umem.planning.selection import WHY, Reason

__all__ = [
    "PLANNERS",
    "WHY",
    "KeptStep",
    "Reason",
    "explain",
    "explained_plan",
    "load_schedule",
    "page_out",
    "plan",
    "plan_key",
    "save_schedule",
    "step_if_kept",
    "store_plan",
    "stored_plan",
]

_MODULES = {
    "planners": ("PLANNERS", "KeptStep", "explained_plan", "page_out", "plan", "step_if_kept"),
    "problem": ("explain",),
    "selection": ("WHY", "Reason"),
    "plan_files": ("load_schedule", "plan_key", "save_schedule", "store_plan", "stored_plan"),
}


def __getattr__(name: str) -> Any:
    """Load a module at the first use of a name: planners load numba, which takes long."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
