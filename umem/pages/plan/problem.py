"""Makes one plan of a step: chooses intervals, times their transfers, puts hints in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.io.problems import did_you_mean
from umem.pages.plan.reservations import LinkUse, Reservations, reserve
from umem.pages.plan.residency_modes import TensorRules
from umem.pages.plan.selection import NOT_NEEDED, PhaseClock, Reason, Selection
from umem.pages.plan.timing import earliest_issue, latest_starts, leave_times, phases_at
from umem.trace import NEVER_MADE, Gaps, Trace, find_gaps, first_and_last_use

__all__ = [
    "Manner",
    "Plan",
    "PlanningProblem",
    "decide_alike",
    "explain",
    "make_schedule",
    "plan_step",
]


@dataclass(frozen=True, eq=False)
class PlanningProblem:
    """A trace, and everything that does not change from plan to plan."""

    trace: Trace
    hardware: Hardware
    rules: TensorRules
    gaps: Gaps
    capacity_bytes: int
    writes_back: bool
    """Whether contents may be copied to the host while they stay in use."""


@dataclass(frozen=True)
class Manner:
    """How a plan is made. No manner is best for all steps, so that several are tried."""

    slack: float = 1.05
    """Transfers are given this many times the time that they take alone."""
    out_weight: float = 0.3
    """How much a second of the way to the host counts beside one of the way back, where intervals
    are compared."""
    ahead: bool = True
    """Whether the choice of intervals reckons with contents that are written back while in use."""
    reserved: bool = True
    """Whether transfers begin when the choice reserved the link for them. Otherwise those to the
    host begin as early as can be, the most urgent first, and those back as late as can be."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule, and why each idle interval of :func:`umem.trace.find_gaps` is spent as it is."""

    schedule: Schedule
    decide: Callable[[], Selection]

    @cached_property
    def decisions(self) -> Selection:
        """A decision for each interval, made when it is asked for."""
        return self.decide()


def decide_alike(problem: PlanningProblem, reason: Reason) -> Selection:
    """The same decision for all intervals with live contents."""
    dead = problem.gaps.is_dead
    found = np.where(dead, Reason.DEAD, reason).astype(np.int8)
    stays, next_use = np.full(len(dead), NOT_NEEDED, np.int64), problem.gaps.next_use
    no = np.zeros(len(dead), np.bool_)
    return Selection(stays, next_use, next_use, found, no, no, problem.trace.phase_count)


@dataclass(frozen=True)
class Decision:
    """What a plan does with a tensor between two uses, and why."""

    tensor: str
    last_use: int
    """Phase."""
    next_use: int
    """Phase; as many as the trace has are added for one of the next step."""
    leaves: bool
    short_in: int | None
    """Phase that needs the tensor's memory, where it leaves."""
    reason: Reason


def explain(plan: Plan, trace: Trace, pattern: str) -> tuple[Decision, ...]:
    """Why tensors leave or stay: a decision for each idle interval, in the order of the step.

    Parameters
    ----------
    plan, trace
        From :func:`umem.pages.plan.explained_plan`, and what it is for.
    pattern
        The first of these that there is: tensors of this name; all tensors of a class of this name;
        the intervals of tensors that leave because a phase of this name needs their memory. ``*``
        stands for any text in the names of tensors and phases.

    Raises
    ------
    PlanError
        If neither tensors nor a class nor phases are called so.
    """
    gaps, needed_by = find_gaps(trace), plan.decisions.needed_by
    if (tensors := named_tensors(trace, pattern)).any():
        rows = np.flatnonzero(tensors[gaps.tensor])
    elif (phases := _matching(pattern, trace.phase_names)).any():
        leaves = needed_by != NOT_NEEDED
        rows = np.flatnonzero(leaves & phases[needed_by % trace.phase_count])
    else:
        names = (*trace.tensor_names, *map(str, TensorClass), *trace.phase_names)
        raise PlanError(
            f"trace {trace.name!r}: no tensor, class or phase is called {pattern!r}"
            f"{did_you_mean(pattern, names) or f': give a name such as {names[0]!r}'}"
        )
    return tuple(
        Decision(
            trace.tensor_names[gaps.tensor[row]],
            int(gaps.last_use[row]),
            int(gaps.next_use[row]),
            reason in (Reason.PRESSURE, Reason.PRESSURE_LATE, Reason.PRESSURE_FREE),
            None if needed_by[row] == NOT_NEEDED else int(needed_by[row]),
            reason,
        )
        for row in rows[np.argsort(gaps.last_use[rows], kind="stable")]
        for reason in [Reason(plan.decisions.reason[row])]
    )


def named_tensors(trace: Trace, pattern: str) -> npt.NDArray[np.bool_]:
    """Tensors that a pattern means, as :func:`explain` reads it: by name, or by class; bool[T]."""
    tensors = _matching(pattern, trace.tensor_names)
    if not tensors.any() and pattern in list(TensorClass):
        tensors = trace.tensor_class == TensorClass(pattern).number
    return tensors


def _matching(pattern: str, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    return np.array([name == pattern or fnmatchcase(name, pattern) for name in names], np.bool_)


def plan_step(problem: PlanningProblem, clock: PhaseClock, *, name: str, manner: Manner) -> Plan:
    """Plan one step: choose intervals, time the transfers, put the hints in order."""
    gaps = problem.gaps
    use = _link_use(problem, manner)
    found = reserve(
        problem.trace,
        gaps,
        clock,
        problem.capacity_bytes,
        use,
        allowed=problem.rules.movable[gaps.tensor] & ~gaps.is_dead,
        first=problem.rules.first[gaps.tensor],
        on_device=_on_device(problem),
        out_weight=manner.out_weight,
    )
    chosen = np.flatnonzero(found.needed_by != NOT_NEEDED)
    hints = [discard_hints(problem)]
    if len(chosen):
        moves, copies = _times(problem, found, chosen, use, manner)
        hints.append(_move_hints(problem, moves))
        hints.append(_copy_hints(problem, copies))
    decide = partial(_decide, problem, found, use)
    return Plan(make_schedule(problem, name, hints), decide)


def _link_use(problem: PlanningProblem, manner: Manner) -> LinkUse:
    gaps, hardware, rules = problem.gaps, problem.hardware, problem.rules
    in_s, out_s = _transfer_s(problem, manner.slack)
    keeps = rules.kept_copy[gaps.tensor]
    is_there = keeps & (gaps.made == NEVER_MADE)
    # Without a copy on the host each departure takes contents of its own along.
    made = np.where(keeps & ~is_there, gaps.made, gaps.last_use)
    _, version = np.unique(np.stack([gaps.tensor, made]), axis=1, return_inverse=True)
    if rules.copied.any():
        rates = hardware.copy_to_host_bytes_per_s, hardware.copy_to_device_bytes_per_s
        link = hardware.copy_link_bytes_per_s
    else:
        rates = hardware.to_host_bytes_per_s, hardware.to_device_bytes_per_s
        link = hardware.link_bytes_per_s
    return LinkUse(
        made=made + 1,
        ready=(made if problem.writes_back and manner.ahead else gaps.last_use) + 1,
        version=version,
        out_s=np.where(is_there, 0.0, out_s),
        in_s=in_s,
        shares=(rates[0] / link, rates[1] / link),
    )


def _decide(problem: PlanningProblem, found: Reservations, use: LinkUse) -> Selection:
    """The decision for each interval, from what was recorded where it was made."""
    gaps, clock = problem.gaps, found.clock
    chosen = found.needed_by != NOT_NEEDED
    in_s, out_s = _transfer_s(problem, 1.0)
    idle_s = clock.at(gaps.last_use + 1)
    out_s = np.where(use.out_s > 0, out_s, 0.0)
    gone = phases_at(clock.start_s, clock.step_s, idle_s + out_s, up=True)
    barred = np.full(len(chosen), -1, np.int8)
    is_short = clock.at(gaps.next_use) - idle_s < in_s + out_s
    barred[found.no_time & ~chosen] = Reason.LINK_BUSY
    barred[is_short & ~chosen] = Reason.TOO_SHORT
    barred[~problem.rules.movable[gaps.tensor]] = Reason.HELD
    barred[gaps.is_dead] = Reason.DEAD
    barred[~_on_device(problem)[gaps.tensor]] = Reason.IN_PLACE
    carries = _carries_copy(gaps, use, np.flatnonzero(chosen))
    is_free = chosen.copy()
    is_free[chosen] = ~carries
    return Selection(
        needed_by=found.needed_by,
        gone=gone,
        back=gaps.next_use,
        barred=barred,
        is_late=found.is_late,
        is_free=is_free,
        phase_count=problem.trace.phase_count,
    )


def _carries_copy(gaps: Gaps, use: LinkUse, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether a chosen interval is the first that needs its contents on the host, bool[N]."""
    order = np.lexsort((gaps.last_use[chosen] - use.made[chosen], use.version[chosen]))
    version = use.version[chosen][order]
    is_first = np.empty(len(chosen), np.bool_)
    is_first[order] = np.append(True, version[1:] != version[:-1])[: len(chosen)]
    return is_first & (use.out_s[chosen] > 0)


class _Moves(NamedTuple):
    """Intervals spent on the host, N of them, and when."""

    tensor: npt.NDArray[np.int32]
    leave: npt.NDArray[np.int64]
    """Phase at which to send the tensor away."""
    gone: npt.NDArray[np.int64]
    """First phase without it."""
    back: npt.NDArray[np.int64]
    """Phase at which it has to be asked for."""
    due: npt.NDArray[np.int64]
    """Phase that uses it."""


class _Copies(NamedTuple):
    """Contents that are copied to the host while they are in use, N of them, and when."""

    tensor: npt.NDArray[np.int32]
    begin: npt.NDArray[np.int64]
    """Phase."""


def _times(
    problem: PlanningProblem,
    found: Reservations,
    chosen: npt.NDArray[np.int64],
    use: LinkUse,
    manner: Manner,
) -> tuple[_Moves, _Copies]:
    """Time the transfers of chosen intervals."""
    gaps, clock = problem.gaps, found.clock
    tensor = gaps.tensor[chosen]
    idle_from, due = gaps.last_use[chosen] + 1, gaps.next_use[chosen]
    made, version = use.made[chosen], use.version[chosen]
    ready = np.where(problem.writes_back, made, idle_from)
    # Until when the link is at it; at once where the host has the contents.
    begin, end = idle_from.copy(), idle_from.copy()
    sent = np.flatnonzero(_carries_copy(gaps, use, chosen))
    if manner.reserved:
        # A phase may be held up for it before it is ready.
        begin[sent] = np.maximum(made + found.sent[version], ready)[sent]
        end[sent] = (made + found.there[version])[sent]
        back = found.returns[chosen]
    else:
        needed_s = clock.at(found.needed_by[chosen[sent]])
        begin_s, end_s = leave_times(
            clock.at(ready[sent]), needed_s, use.out_s[chosen[sent]], clock.step_s
        )
        begin[sent] = np.maximum(phases_at(clock.start_s, clock.step_s, begin_s), ready[sent])
        end[sent] = phases_at(clock.start_s, clock.step_s, end_s, up=True)
        back_s = latest_starts(clock.at(due), use.in_s[chosen], clock.step_s)
        back = phases_at(clock.start_s, clock.step_s, back_s)
    leave, gone = np.maximum(begin, idle_from), np.maximum(end, idle_from)
    back = np.clip(back, np.minimum(gone, due), due)
    in_time = leave < due  # what could leave only after its next use stays
    early = (begin < idle_from) & in_time
    leaving = tensor[in_time], leave[in_time], gone[in_time], back[in_time], due[in_time]
    return _Moves(*leaving), _Copies(tensor[early], begin[early])


def _move_hints(problem: PlanningProblem, moves: _Moves) -> npt.NDArray[np.float64]:
    trace, count = problem.trace, problem.trace.phase_count
    tensor = moves.tensor
    resident = _resident_bytes(problem, tensor, np.minimum(moves.gone, moves.back), moves.back)
    # Phases before 0 lie in the step before the one that a return is due in.
    due = moves.due % count
    own_step = moves.due - due
    issue = earliest_issue(
        np.argsort(due, kind="stable"),
        moves.gone - own_step,
        moves.back - own_step,
        trace.tensor_bytes[tensor],
        resident,
        problem.capacity_bytes,
    )
    copied = problem.rules.copied[tensor]
    out = np.where(copied, HintOp.COPY_OUT, HintOp.EVICT)
    back = np.where(copied, HintOp.COPY_IN, HintOp.PREFETCH)
    # Of one phase, what can be gone first leaves first.
    return np.concatenate(
        [
            _hints(problem, moves.leave, out, tensor, moves.gone - moves.leave // count * count),
            # As seen from the step that the hint is issued in.
            _hints(problem, issue, back, tensor, due - issue // count * count),
        ]
    )


def _copy_hints(problem: PlanningProblem, copies: _Copies) -> npt.NDArray[np.float64]:
    op = np.where(problem.rules.copied[copies.tensor], HintOp.COPY_BACK, HintOp.WRITE_BACK)
    # Behind what leaves in the same phase: that makes room.
    urgency = np.full(len(op), 2 * problem.trace.phase_count)
    return _hints(problem, copies.begin, op, copies.tensor, urgency)


def discard_hints(problem: PlanningProblem) -> npt.NDArray[np.float64]:
    """Hints that free the memory of contents that are dead before their tensor is."""
    trace, gaps = problem.trace, problem.gaps
    moves = np.isin(problem.rules.residency, (ResidencyMode.MIGRATE, ResidencyMode.DUPLICATE))
    dead = np.flatnonzero(gaps.is_dead & moves[gaps.tensor])
    _, last_access = first_and_last_use(trace)
    lingers = moves & ~trace.persistent & (last_access >= 0) & (last_access < trace.last_phase)
    tensor = np.concatenate([gaps.tensor[dead], np.flatnonzero(lingers)])
    phase = np.concatenate([gaps.last_use[dead], last_access[lingers]]) + 1
    return _hints(problem, phase, np.full(len(phase), HintOp.DISCARD), tensor, phase)


def make_schedule(
    problem: PlanningProblem, name: str, hints: list[npt.NDArray[np.float64]], *, waits: bool = True
) -> Schedule:
    """Make a schedule of rows (phase, urgency, op, tensor)."""
    rows = np.concatenate(hints)
    # What makes room goes before what needs it.
    needs_room = np.isin(rows[:, 2], (HintOp.PREFETCH, HintOp.COPY_IN))
    rows = rows[np.lexsort((rows[:, 3], rows[:, 1], needs_room, rows[:, 0]))]
    return Schedule(
        planner=name,
        residency=problem.rules.residency.copy(),
        hint_phase=rows[:, 0].astype(np.int32),
        hint_op=rows[:, 2].astype(np.uint8),
        hint_tensor=rows[:, 3].astype(np.int32),
        waits=waits,
    )


def _hints(
    problem: PlanningProblem,
    phase: npt.NDArray[np.int64],
    op: npt.NDArray[np.int64],
    tensor: npt.NDArray[np.int32],
    urgency: npt.NDArray[np.float64] | npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    return np.stack([phase % problem.trace.phase_count, urgency, op, tensor], axis=1).astype(float)


def _transfer_s(
    problem: PlanningProblem, slack: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Time in and out of each interval's tensor, float64[G] each."""
    hardware, rules, gaps = problem.hardware, problem.rules, problem.gaps
    size = problem.trace.tensor_bytes[gaps.tensor]
    copied = rules.copied[gaps.tensor]
    calls_s = np.where(copied, 0.0, -(-size // hardware.call_bytes) * hardware.call_s)
    in_rate = np.where(copied, hardware.copy_to_device_bytes_per_s, hardware.to_device_bytes_per_s)
    out_rate = np.where(copied, hardware.copy_to_host_bytes_per_s, hardware.to_host_bytes_per_s)
    in_s = (size / in_rate + calls_s) * slack
    return in_s, (size / out_rate + calls_s) * slack


def _on_device(problem: PlanningProblem) -> npt.NDArray[np.bool_]:
    """Tensors that take device memory when used, bool[T]."""
    return ~np.isin(problem.rules.residency, (ResidencyMode.MAP, ResidencyMode.SYSTEM))


def _resident_bytes(
    problem: PlanningProblem,
    tensor: npt.NDArray[np.int32],
    away_from: npt.NDArray[np.int64],
    back_at: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Bytes resident in each phase when these tensors are away as said, int64[P]."""
    trace, gaps = problem.trace, problem.gaps
    size = np.where(_on_device(problem), trace.tensor_bytes, 0)
    change = np.zeros(3 * trace.phase_count + 1, np.int64)
    # Born or first used in the step, or there from the start.
    first, last = first_and_last_use(trace)
    lives = ~trace.persistent & (last >= 0)
    np.add.at(change, first[lives], size[lives])
    np.add.at(change, last[lives] + 1, -size[lives])
    dead = gaps.is_dead
    np.add.at(change, gaps.last_use[dead] + 1, -size[gaps.tensor[dead]])
    np.add.at(change, gaps.next_use[dead], size[gaps.tensor[dead]])
    np.add.at(change, away_from, -size[tensor])
    np.add.at(change, back_at, size[tensor])
    level = np.cumsum(change)[: 3 * trace.phase_count].reshape(3, -1).sum(axis=0)
    return level + size[trace.persistent].sum()
