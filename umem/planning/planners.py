"""Planners by name, and the search for the plan that a simulation finds fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.core.units import format_bytes
from umem.hardware import Hardware
from umem.io.problems import did_you_mean
from umem.planning.baselines import fault, lookahead, oracle, paging
from umem.planning.problem import Plan, PlanningProblem, decide_alike, plan_step
from umem.planning.residency_modes import MECHANISMS, apply_policy, open_classes
from umem.planning.selection import PhaseClock, Reason
from umem.policy import ResolvedPolicy, check_resolved
from umem.simulation import Run, lower_bound_s, run
from umem.trace import Trace, find_gaps, ranges, require_durations

__all__ = ["PLANNERS", "explained_plan", "ideal_clock", "page_out", "plan", "pose_problem"]

PLANNERS = ("fault", "lookahead", "planned", "oracle")
"""Demand paging; a window ahead; umem's own; a window ahead with Belady's eviction."""

_GOOD_ENOUGH = 1.002
"""Multiple of the lower bound at which the search ends."""

_SLACKS = (1.05, 1.5)
"""How much longer than alone a transfer may take: hints and other traffic share the link."""


def plan(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    planner: str = "planned",
    *,
    window: int = 8,
    fixed: npt.NDArray[np.int8] | None = None,
    may_fault: bool = True,
) -> Schedule:
    """Decide where every tensor is at every moment of a step.

    Parameters
    ----------
    trace
        With durations (:func:`umem.hardware.with_durations`).
    hardware
        The machine.
    policy
        How each class may be held, and the device budget, from :func:`umem.policy.resolve`.
    planner
        One of :data:`PLANNERS`: ``fault`` pages on demand, ``lookahead`` prefetches for a window of
        phases and evicts what was used longest ago (DeepUM), ``oracle`` does the same but evicts
        what is needed last (Belady), ``planned`` looks for the fastest schedule of the whole step
        and takes demand paging where that is none slower.
    window
        Phases that ``lookahead`` and ``oracle`` look ahead; all of the step at most.
    fixed
        int8[T]: :class:`ResidencyMode` of tensors that are held so whatever the policy says of
        their class; -1 for the others.
    may_fault
        Whether it may be left to the driver to keep the budget: not where the driver knows nothing
        of it.

    Returns
    -------
    Schedule

    Raises
    ------
    PlanError
        For an unknown planner, a window below 1, a policy that asks for what the machine lacks, or
        a phase whose working set does not fit the budget, or more off the device than the host
        holds.
    PolicyError
        For a policy that was not resolved for a device.
    TraceError
        If the trace has no durations.
    """
    check_argument("trace", trace, Trace, "give one from umem.load_trace() or umem.record()")
    check_argument("hardware", hardware, Hardware, "give one from umem.load_hardware()")
    check_resolved(policy)
    check_argument("planner", planner, str, f"give one of {', '.join(PLANNERS)}")
    check_argument("window", window, int, "give a whole number of phases, such as 8")
    if planner not in PLANNERS:
        hint = did_you_mean(planner, PLANNERS) or "."
        raise PlanError(f"no planner is called {planner!r}{hint} Planners: {', '.join(PLANNERS)}")
    if window < 1:
        raise PlanError(f"a window of {window} phases looks at nothing: give 1 or more")
    window = min(window, trace.phase_count)
    if planner == "planned":
        return explained_plan(trace, hardware, policy, fixed=fixed, may_fault=may_fault).schedule
    problem = pose_problem(trace, hardware, policy, {}, fixed)
    if planner == "fault":
        return fault(problem)
    if planner == "lookahead":
        return lookahead(problem, window, strict=not may_fault)
    return oracle(problem, window)


def explained_plan(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    fixed: npt.NDArray[np.int8] | None = None,
    may_fault: bool = True,
) -> Plan:
    """The plan of the planner ``planned``, with the reason of each decision.

    Arguments and errors as :func:`plan`; :func:`umem.planning.problem.explain` reads the reasons.
    """
    check_resolved(policy)
    problem = pose_problem(trace, hardware, policy, {}, fixed)
    return _planned(problem, policy, fixed, may_fault=may_fault)


def page_out(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    fixed: npt.NDArray[np.int8] | None = None,
) -> Schedule:
    """Evictions that demand paging makes to keep a budget of which the driver knows nothing.

    Arguments and errors as :func:`plan`. What was used longest ago leaves when a phase's own
    tensors do not fit; nothing is prefetched. :func:`plan` with ``fault`` has no hints instead, for
    there the driver or the simulator evicts.
    """
    return paging(pose_problem(trace, hardware, policy, {}, fixed))


def pose_problem(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    mechanisms: Mapping[TensorClass, str],
    fixed: npt.NDArray[np.int8] | None = None,
) -> PlanningProblem:
    """Apply a policy to a trace, with mechanisms for classes that it leaves open."""
    budget = policy.device_budget_bytes
    problem = PlanningProblem(
        trace,
        hardware,
        apply_policy(trace, hardware, policy, mechanisms, fixed),
        find_gaps(trace),
        hardware.device_bytes if budget is None else budget,
    )
    _check_working_sets(problem)
    _check_host(problem)
    return problem


def _planned(
    problem: PlanningProblem,
    policy: ResolvedPolicy,
    fixed: npt.NDArray[np.int8] | None,
    *,
    may_fault: bool,
) -> Plan:
    """The fastest of what page migration gives, of other mechanisms by class, and of faults."""
    trace, hardware = problem.trace, problem.hardware
    bound_s = lower_bound_s(trace, hardware, problem.capacity_bytes)
    paging = replace(fault(problem), planner="planned")
    paged_s = run(trace, paging, hardware, policy).step_s
    if paged_s <= bound_s * (1 + 1e-9):
        return Plan(paging, partial(decide_alike, problem, Reason.ROOM))
    best, best_run = _best(problem, policy, bound_s)
    moves = best.schedule.hint_op != HintOp.DISCARD
    moved = set(trace.tensor_class[best.schedule.hint_tensor[moves]].tolist())
    mechanisms: dict[TensorClass, str] = {}
    for tensor_class in open_classes(policy):
        if tensor_class.number not in moved:
            continue
        for mechanism in MECHANISMS[1:]:
            if _is_good_enough(best_run, bound_s):
                break
            trial = mechanisms | {tensor_class: mechanism}
            try:
                posed = pose_problem(trace, hardware, policy, trial, fixed)
            except PlanError:
                continue  # what is mapped takes host memory even where the device has room
            candidate, outcome = _best(posed, policy, bound_s)
            # A change of mechanism has to be worth it.
            if outcome.step_s < best_run.step_s * 0.998:
                best, best_run, mechanisms = candidate, outcome, trial
    if may_fault and paged_s < best_run.step_s:
        return Plan(paging, partial(decide_alike, problem, Reason.LEFT_TO_DRIVER))
    return best


def _best(problem: PlanningProblem, policy: ResolvedPolicy, bound_s: float) -> tuple[Plan, Run]:
    """The fastest of a few plans: with different slack, and against the clock that one gave."""
    trace = problem.trace
    best: tuple[Plan, Run] | None = None
    for slack in _SLACKS:
        clock = ideal_clock(trace)
        for _ in range(2):
            plan = plan_step(problem, clock, name="planned", slack=slack)
            outcome = run(trace, plan.schedule, problem.hardware, policy)
            if best is None or outcome.step_s < best[1].step_s:
                best = plan, outcome
            if _is_good_enough(best[1], bound_s):
                return best
            # Where a phase was held up, there is more time for transfers than was thought.
            start_s = outcome.sim.phase_start_s
            clock = PhaseClock(start_s - start_s[0], outcome.step_s)
    assert best is not None
    return best


def _is_good_enough(outcome: Run, bound_s: float) -> bool:
    """Whether nothing is left to hide: pages cost what they slow, wherever they move."""
    return outcome.step_s - outcome.page_slowdown_s <= bound_s * _GOOD_ENOUGH


def ideal_clock(trace: Trace) -> PhaseClock:
    """When phases begin with everything resident."""
    duration_s = require_durations(trace)
    return PhaseClock(np.cumsum(duration_s) - duration_s, float(duration_s.sum()))


def _check_working_sets(problem: PlanningProblem) -> None:
    """Refuse a phase that does not fit the budget beside what the policy keeps on the device."""
    trace, residency = problem.trace, problem.rules.residency
    kept = np.where(residency == ResidencyMode.KEEP, trace.tensor_bytes, 0)
    moving = np.where(
        np.isin(residency, (ResidencyMode.MIGRATE, ResidencyMode.DUPLICATE)), trace.tensor_bytes, 0
    )
    kept_live = _live_bytes(trace, kept)
    need = kept_live + _used_bytes(trace, moving)
    worst = int(np.argmax(need))
    if need[worst] > problem.capacity_bytes:
        elsewhere = int(kept_live[worst] - _used_bytes(trace, kept)[worst])
        less = f", less {format_bytes(elsewhere)} that the policy keeps there" if elsewhere else ""
        raise PlanError(
            f"trace {trace.name!r}: phases[{worst}] ({trace.phase_names[worst]}) uses "
            f"{format_bytes(int(need[worst]) - elsewhere)} at once, and the device budget is "
            f"{format_bytes(problem.capacity_bytes)}{less}: raise the budget, make batch or "
            "sequence smaller, or let a class be mapped"
        )


def _check_host(problem: PlanningProblem) -> None:
    """Refuse more than the host holds: what is mapped, and what does not fit on the device.

    All of it counts, also what lies on the host before the step. Where `host_bytes` is of a running
    program, it has these bytes too (:func:`umem.executor.machine.held_host_bytes`).
    """
    trace, hardware = problem.trace, problem.hardware
    is_mapped = problem.rules.residency == ResidencyMode.MAP
    mapped = _live_bytes(trace, np.where(is_mapped, trace.tensor_bytes, 0))
    rest = _live_bytes(trace, np.where(is_mapped, 0, trace.tensor_bytes))
    off_device = mapped + np.maximum(rest - problem.capacity_bytes, 0)
    worst = int(np.argmax(off_device))
    if off_device[worst] > hardware.host_bytes:
        raise PlanError(
            f"trace {trace.name!r}: phases[{worst}] ({trace.phase_names[worst]}) has "
            f"{format_bytes(int(off_device[worst]))} off the device, and {hardware.name} has "
            f"host_bytes of {format_bytes(hardware.host_bytes)}: raise the budget, let less be "
            "mapped, or make batch or sequence smaller"
        )


def _used_bytes(trace: Trace, size: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes that each phase uses, given those of each tensor, int64[P]."""
    sums = ranges(size[trace.access_tensor])
    return sums[trace.access_start[1:]] - sums[trace.access_start[:-1]]


def _live_bytes(trace: Trace, size: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes allocated in each phase, given those of each tensor, int64[P]."""
    change = np.zeros(trace.phase_count + 1, np.int64)
    np.add.at(change, trace.first_phase, size)
    np.subtract.at(change, trace.last_phase + 1, size)
    return np.cumsum(change)[:-1]
