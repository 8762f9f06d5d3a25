"""Planners by name, and the search for the plan that a simulation finds fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.core.units import format_bytes
from umem.hardware import Hardware
from umem.io.problems import did_you_mean
from umem.pages.plan import PLANNERS
from umem.pages.plan.baselines import fault, lookahead, paging
from umem.pages.plan.problem import (
    Manner,
    Plan,
    PlanningProblem,
    decide_alike,
    plan_step,
)
from umem.pages.plan.residency_modes import MECHANISMS, apply_policy, open_classes
from umem.pages.plan.selection import PhaseClock, Reason
from umem.pages.simulate import Run, lower_bound_s, run
from umem.policy import ResolvedPolicy, check_resolved
from umem.trace import Trace, find_gaps, live_bytes, ranges, require_durations

__all__ = [
    "explained_plan",
    "ideal_clock",
    "page_out",
    "plan",
    "pose_problem",
]

_GOOD_ENOUGH = 1.002
"""Multiple of the lower bound at which the search ends."""

_MANNERS = (Manner(), Manner(ahead=False, reserved=False))
"""Tried with every choice of mechanisms."""

_WAYS = ((True, True), (True, False), (False, False), (False, True))
_SLACKS = (1.0, 1.1, 1.25, 1.5)
_OUT_WEIGHTS = (1.0, 0.3, 0.1)
"""Tried with the best mechanisms."""

_HOPELESS = 1.1
"""Multiple of a step from which on a mechanism for a class is not tried with others again."""

_LEAST_TRIALS, _MOST_TRIALS = 16, 160
_TRIED_ACCESSES = 600_000
"""Uses of tensors in all trials together, so that large steps are not planned for minutes."""

_WITHOUT_WRITE_BACKS = 3
"""Plans without write-backs have so many times fewer trials than those with them, and what these
have left."""


def plan(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    planner: str = "planned",
    *,
    fixed: npt.NDArray[np.int8] | None = None,
    may_fault: bool = True,
    may_write_back: bool = True,
    progress: Callable[[str], None] | None = None,
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
        One of :data:`PLANNERS`: ``fault`` pages on demand, ``lookahead`` prefetches for the next
        phases and evicts what was used longest ago (DeepUM), ``planned`` looks for the fastest
        schedule of the whole step and takes demand paging where that is none slower.
    fixed
        int8[T]: :class:`ResidencyMode` of tensors that are held so whatever the policy says of
        their class; -1 for the others.
    may_fault
        Whether it may be left to the driver to keep the budget: not where the driver knows nothing
        of it.
    may_write_back
        Whether ``planned`` may copy contents to the host while they stay on the device, and keep
        copies of what is written: not where a training is going to carry it out.
    progress
        Called with a few words while ``planned`` looks for better plans.

    Returns
    -------
    Schedule

    Raises
    ------
    PlanError
        For an unknown planner, a policy that asks for what the machine lacks, a phase whose working
        set does not fit the budget, or more off the device than the host holds.
    PolicyError
        For a policy that was not resolved for a device.
    TraceError
        If the trace has no durations.
    """
    check_argument("trace", trace, Trace, "give one from umem.load_trace() or umem.record()")
    check_argument("hardware", hardware, Hardware, "give one from umem.load_hardware()")
    check_resolved(policy)
    check_argument("planner", planner, str, f"give one of {', '.join(PLANNERS)}")
    if planner not in PLANNERS:
        hint = did_you_mean(planner, PLANNERS) or "."
        raise PlanError(f"no planner is called {planner!r}{hint} Planners: {', '.join(PLANNERS)}")
    if planner == "planned":
        return explained_plan(
            trace,
            hardware,
            policy,
            fixed=fixed,
            may_fault=may_fault,
            may_write_back=may_write_back,
            progress=progress,
        ).schedule
    problem = pose_problem(trace, hardware, policy, {}, fixed)
    if planner == "fault":
        return fault(problem)
    return lookahead(problem, strict=not may_fault)


def explained_plan(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    fixed: npt.NDArray[np.int8] | None = None,
    may_fault: bool = True,
    may_write_back: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan of the planner ``planned``, with the reason of each decision.

    Arguments and errors as :func:`plan`; :func:`umem.pages.plan.problem.explain` reads the reasons.
    """
    check_resolved(policy)
    problem = pose_problem(trace, hardware, policy, {}, fixed, may_write_back=may_write_back)
    return _planned(
        problem, policy, fixed, may_fault=may_fault, progress=progress or (lambda words: None)
    )


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
    *,
    may_write_back: bool = False,
) -> PlanningProblem:
    """Apply a policy to a trace, with mechanisms for classes that it leaves open."""
    budget = policy.device_budget_bytes
    problem = PlanningProblem(
        trace,
        hardware,
        apply_policy(trace, hardware, policy, mechanisms, fixed, keeps_copies=may_write_back),
        find_gaps(trace),
        hardware.device_bytes if budget is None else budget,
        may_write_back,
    )
    _check_working_sets(problem)
    _check_host(problem)
    return problem


class _Found(NamedTuple):
    """A plan and its simulation."""

    plan: Plan
    outcome: Run
    mechanisms: Mapping[TensorClass, str]
    manner: Manner
    rounds: int
    """Clocks that simulations gave before this plan."""


class _Search:
    """Looks for the fastest plan by simulation, with a limited number of trials.

    The limit is a number and no time, so that planning is deterministic.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        policy: ResolvedPolicy,
        fixed: npt.NDArray[np.int8] | None,
        bound_s: float,
        progress: Callable[[str], None],
        earlier: _Search | None = None,
    ) -> None:
        self.problem, self.policy, self.fixed = problem, policy, fixed
        self.bound_s = bound_s
        self.progress = progress
        self.posed: dict[tuple[tuple[TensorClass, str], ...], PlanningProblem | None] = {
            (): problem
        }
        self.classes = open_classes(policy)
        self.copies_like_pages = _copies_like_pages(problem.hardware)
        accesses = max(len(problem.trace.access_tensor), 1)
        self.left = max(_LEAST_TRIALS, min(_MOST_TRIALS, _TRIED_ACCESSES // accesses))
        self.tried: dict[Any, _Found] = {}
        self.best: _Found | None = None
        self.hopeless: set[tuple[TensorClass, str]] = set()
        """Mechanisms that made a step much slower for a class."""
        if earlier is not None:
            self.left = self.left // _WITHOUT_WRITE_BACKS + earlier.left
            self.hopeless |= earlier.hopeless

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to gain, or no trial left."""
        return self.left <= 0 or self.is_near

    @property
    def is_near(self) -> bool:
        """Whether there is nothing left to gain."""
        if self.best is None or not self.best.outcome.settled:
            return False
        return self.best.outcome.step_s <= self.bound_s * _GOOD_ENOUGH

    def try_out(
        self,
        mechanisms: Mapping[TensorClass, str],
        manner: Manner,
        earlier: _Found | None = None,
    ) -> _Found | None:
        """Plan and simulate once, against the clock of an earlier plan if one is given.

        None if the policy or the machine cannot have it so, or the search is over.
        """
        rounds = 0 if earlier is None else earlier.rounds + 1
        mechanisms, manner = self._without_difference(mechanisms, manner)
        key = (tuple(sorted(mechanisms.items())), manner, rounds)
        if key in self.tried:
            return self.tried[key]
        problem = self._pose(mechanisms)
        if problem is None or self.is_over:
            return None
        self.left -= 1
        clock = ideal_clock(problem.trace)
        if earlier is not None:
            start_s = earlier.outcome.sim.phase_start_s
            clock = PhaseClock(start_s - start_s[0], earlier.outcome.step_s)
        plan = plan_step(problem, clock, name="planned", manner=manner)
        outcome = run(problem.trace, plan.schedule, problem.hardware, self.policy)
        found = _Found(plan, outcome, mechanisms, manner, rounds)
        self.tried[key] = found
        if self.best is None or outcome.slower_s < self.best.outcome.slower_s:
            self.best = found
            share = outcome.slower_s / self.bound_s
            self.progress(f"Planning {problem.trace.name}: {share:.3f} of the lower bound")
        return found

    def best_with(self, mechanisms: Mapping[TensorClass, str]) -> _Found | None:
        """The fastest of the plans with these mechanisms so far."""
        alike, _ = self._without_difference(mechanisms, Manner())
        found = [it for it in self.tried.values() if it.mechanisms == alike]
        return min(found, key=lambda it: it.outcome.slower_s, default=None)

    def _without_difference(
        self, mechanisms: Mapping[TensorClass, str], manner: Manner
    ) -> tuple[Mapping[TensorClass, str], Manner]:
        """The one form of choices between which there is no difference."""
        writes_back = self.problem.writes_back
        if self.copies_like_pages:
            # Copies stay valid on the host; pages that are written do so only with write-backs.
            mapped = {it: own for it, own in mechanisms.items() if own == "map"}
            mechanisms = mapped if writes_back else dict.fromkeys(self.classes, "copy") | mapped
        return mechanisms, manner if writes_back else replace(manner, ahead=False)

    def _pose(self, mechanisms: Mapping[TensorClass, str]) -> PlanningProblem | None:
        key = tuple(sorted(mechanisms.items()))
        if key not in self.posed:
            first = self.problem
            try:
                self.posed[key] = pose_problem(
                    first.trace, first.hardware, self.policy, mechanisms, self.fixed,
                    may_write_back=first.writes_back,
                )  # fmt: skip
            except PlanError:  # what is mapped takes host memory even where the device has room
                self.posed[key] = None
        return self.posed[key]


def _planned(
    problem: PlanningProblem,
    policy: ResolvedPolicy,
    fixed: npt.NDArray[np.int8] | None,
    *,
    may_fault: bool,
    progress: Callable[[str], None],
) -> Plan:
    """The fastest of plans with several mechanisms and in several manners, and of demand paging."""
    trace, hardware = problem.trace, problem.hardware
    bound_s = lower_bound_s(trace, hardware, problem.capacity_bytes)
    paging = replace(fault(problem), planner="planned")
    paged_s = run(trace, paging, hardware, policy).slower_s
    if paged_s <= bound_s * (1 + 1e-9):
        return Plan(paging, partial(decide_alike, problem, Reason.ROOM))
    search = _Search(problem, policy, fixed, bound_s, progress)
    best = _searched(search)
    if problem.writes_back and not search.is_near:
        # Write-backs may take the link when something has to leave.
        without = pose_problem(trace, hardware, policy, {}, fixed)
        found = _searched(_Search(without, policy, fixed, bound_s, progress, search))
        best = min(best, found, key=lambda it: it.outcome.slower_s)
    if may_fault and paged_s < best.outcome.slower_s:
        return Plan(paging, partial(decide_alike, problem, Reason.LEFT_TO_DRIVER))
    return best.plan


def _searched(search: _Search) -> _Found:
    """The best plan that a search finds."""
    _choose_mechanisms(search)
    assert search.best is not None
    _refine(search, search.best.mechanisms)
    # What is slower at first may be the fastest once refined.
    for mechanism in MECHANISMS:
        _refine(search, _alike(search, mechanism))
    return search.best


def _alike(search: _Search, mechanism: str) -> Mapping[TensorClass, str]:
    """The same mechanism for all classes."""
    return {} if mechanism == MECHANISMS[0] else dict.fromkeys(search.classes, mechanism)


def _choose_mechanisms(search: _Search) -> None:
    """Try each mechanism for all classes, then others for one class after another."""
    for mechanism in MECHANISMS:
        for manner in _MANNERS if mechanism != "map" else _MANNERS[:1]:
            search.try_out(_alike(search, mechanism), manner)
    changed = True
    while changed and not search.is_over:
        changed = False
        for tensor_class in search.classes:
            best = search.best
            assert best is not None
            if not _moves_of(search.problem.trace, best, tensor_class):
                continue
            for mechanism in MECHANISMS:
                if (tensor_class, mechanism) in search.hopeless:
                    continue
                trial = {it: own for it, own in best.mechanisms.items() if it != tensor_class}
                if mechanism != MECHANISMS[0]:
                    trial[tensor_class] = mechanism
                found = search.try_out(trial, best.manner)
                if found and found.outcome.slower_s > _HOPELESS * best.outcome.slower_s:
                    search.hopeless.add((tensor_class, mechanism))
            changed |= search.best is not best


def _copies_like_pages(hardware: Hardware) -> bool:
    """Whether a machine copies at the cost of migrating pages."""
    pages = (
        hardware.to_device_bytes_per_s,
        hardware.to_host_bytes_per_s,
        hardware.link_bytes_per_s,
        hardware.page_slowdown_s_per_byte,
    )
    copies = (
        hardware.copy_to_device_bytes_per_s,
        hardware.copy_to_host_bytes_per_s,
        hardware.copy_link_bytes_per_s,
        hardware.copy_slowdown_s_per_byte,
    )
    return pages == copies


def _moves_of(trace: Trace, found: _Found, tensor_class: TensorClass) -> bool:
    """Whether a plan moves anything of a class, or uses it in place."""
    schedule = found.plan.schedule
    moves = schedule.hint_tensor[schedule.hint_op != HintOp.DISCARD]
    is_there = trace.tensor_class == tensor_class.number
    in_place = np.isin(schedule.residency, (ResidencyMode.MAP, ResidencyMode.SYSTEM))
    return bool(is_there[moves].any() or (is_there & in_place).any())


def _refine(search: _Search, mechanisms: Mapping[TensorClass, str]) -> None:
    """Look for a better manner and against better clocks, with these mechanisms."""
    best: _Found | None = None
    while (found := search.best_with(mechanisms)) is not best and not search.is_over:
        best = found
        assert best is not None
        start = best.manner
        manners = [
            *(replace(start, ahead=ahead, reserved=reserved) for ahead, reserved in _WAYS),
            *(replace(start, slack=slack) for slack in _SLACKS),
            *(replace(start, out_weight=weight) for weight in _OUT_WEIGHTS),
        ]
        search.try_out(mechanisms, start, best)
        for manner in manners:
            found = search.try_out(mechanisms, manner)
            if found is not None:
                # Where a phase was held up, there is more time for transfers than was thought.
                search.try_out(mechanisms, manner, found)


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
    kept_live = live_bytes(trace, kept)
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
    program, it has these bytes too (:func:`umem.pages.run.machine.held_host_bytes`).
    """
    trace, hardware = problem.trace, problem.hardware
    is_mapped = problem.rules.residency == ResidencyMode.MAP
    mapped = live_bytes(trace, np.where(is_mapped, trace.tensor_bytes, 0))
    rest = live_bytes(trace, np.where(is_mapped, 0, trace.tensor_bytes))
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
