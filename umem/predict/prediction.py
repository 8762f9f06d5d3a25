"""Predict a step: plan it and simulate it, once for each planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from umem.core.errors import TraceError
from umem.core.report import MigrationReport

if TYPE_CHECKING:
    from umem.hardware import Hardware
    from umem.policy import ResolvedPolicy
    from umem.trace import Trace

__all__ = ["predict", "report_row"]


def predict(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    planners: Sequence[str],
    *,
    runnable: bool = False,
    timeline: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[MigrationReport, ...]:
    """Predict what migration costs a step under each of several planners.

    Parameters
    ----------
    trace
        Its own durations hold where it has them; otherwise they come from the hardware's roofline.
    hardware, policy
        The machine, and a policy that was resolved for it.
    planners
        Names of :data:`umem.pages.plan.PLANNERS`.
    runnable
        Whether to predict the plans that :func:`umem.manage` would run, which are those that a
        running training can carry out (:func:`umem.pages.plan.plan_search.search_plan`). The
        executor predicts the same figures from the same trace, budget and machine.
    timeline
        Whether the reports, one for each planner in order, have one, for pictures.
    progress
        Called with a few words before each part that may take seconds.

    Raises
    ------
    HardwareError
        If the machine lacks a number that the trace needs.
    TraceError
        If all phases of the trace take no time.
    PlanError
        If a planner is unknown, or a phase does not fit the device budget.
    """
    # Here, because they load numba, and the commands import this module at their start.
    from umem.hardware import with_durations
    from umem.pages.plan.plan_search import search_plan
    from umem.pages.plan.planners import plan
    from umem.pages.simulate import simulate
    from umem.trace import require_durations

    say = progress or (lambda _: None)
    timed = with_durations(trace, hardware)
    if not require_durations(timed).sum() > 0:
        raise TraceError(
            f"the trace {trace.name!r} takes no time at all: give its phases durations above 0"
        )
    reports = []
    for planner in planners:
        say(f"Planning {trace.name} with {planner}")
        if runnable:
            found = search_plan(timed, hardware, policy, planner)
            reports.append(found.predicted if timeline else replace(found.predicted, timeline=None))
            continue
        schedule = plan(timed, hardware, policy, planner)
        say(f"Simulating {trace.name} with {planner}")
        reports.append(simulate(timed, schedule, hardware, policy, timeline=timeline))
    return tuple(reports)


_PLAIN = (
    *("workload", "planner", "hardware", "policy", "step_s", "ideal_s", "lower_bound_s", "regret"),
    *("settled", "faster_s", "exposed_stall_s", "um_time_share", "um_ops_share", "um_bytes_share"),
    "copied_bytes_share",
)


def report_row(report: MigrationReport) -> dict[str, Any]:
    """Put a report into plain values, for JSON.

    Returns
    -------
    dict
        Names and numbers of the report without its timeline: times in seconds, sizes in bytes,
        shares from 0 to 1. ``bytes`` goes from direction to cause to tensor class, and has what
        moved only.
    """
    return {
        **{name: getattr(report, name) for name in _PLAIN},
        "moved_bytes": {
            "to_device": report.moved_bytes("to_device"),
            "to_host": report.moved_bytes("to_host"),
        },
        "bytes": report.bytes_by_cause(),
        "memory_ops": {
            "seconds": report.memory_ops_s,
            "bytes": report.memory_ops_bytes,
            "count": report.memory_ops_count,
        },
        **{name: getattr(report, name) for name in ("fault_pages", "fault_batches")},
        "hints": {
            "issued": report.hint_count,
            "late": report.hints_late,
            "wasted": report.hints_wasted,
        },
        "stall_s": dict(report.stall_s),
    }
