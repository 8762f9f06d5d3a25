"""Planners: from a trace, a machine and a policy to a schedule of hints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.pages.plan.planners import explained_plan, page_out, plan
    from umem.pages.plan.problem import explain
    from umem.pages.plan.selection import WHY, Reason

__all__ = [
    "PLANNERS",
    "WHY",
    "Reason",
    "explain",
    "explained_plan",
    "page_out",
    "plan",
]

PLANNERS = ("fault", "lookahead", "planned")
"""Names of planners."""

__getattr__ = lazy_names(  # planners load numba, which takes long
    __name__,
    {
        "planners": "explained_plan page_out plan",
        "problem": "explain",
        "selection": "WHY Reason",
    },
)
