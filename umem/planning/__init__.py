"""Planners: from a trace, a machine and a policy to a schedule of hints."""

from __future__ import annotations

from umem.planning.plan_files import load_schedule, plan_key, save_schedule, store_plan, stored_plan
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
