"""A block-level simulator of managed memory: from a schedule to what migration costs."""

from __future__ import annotations

from umem.pages.simulate.lower_bound import lower_bound_s, unavoidable_bytes
from umem.pages.simulate.run import Run, report, run, simulate

__all__ = [
    "Run",
    "lower_bound_s",
    "report",
    "run",
    "simulate",
    "unavoidable_bytes",
]
