"""Planners: from a trace, a machine and a policy to a schedule of hints."""

from __future__ import annotations

from umem.planner._file import load_schedule, save_schedule
from umem.planner._plan import PLANNERS, page_out, plan
from umem.planner._store import plan_key, store_plan, stored_plan

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
