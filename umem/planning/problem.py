"""Makes one plan of a step: chooses intervals, times their transfers, puts hints in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from umem.core.errors import PlanError
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.io.problems import did_you_mean
from umem.planning.residency_modes import TensorRules
from umem.planning.selection import NOT_NEEDED, PhaseClock, Reason, Selection, select
from umem.planning.timing import earliest_issue, latest_starts, leave_times, phases_at, spare_ends
from umem.trace import Gaps, Trace, find_gaps, first_and_last_use, written_tensors

__all__ = [
    "Decision",
    "Plan",
    "PlanningProblem",
    "decide_alike",
    "discard_hints",
    "explain",
    "make_schedule",
    "plan_step",
]

_ROUNDS = 3
"""Times that intervals are chosen; later ones know when the link lets tensors leave and return."""


@dataclass(frozen=True, eq=False)
class PlanningProblem:
    """A trace, and everything that does not change from plan to plan."""

    trace: Trace
    hardware: Hardware
    rules: TensorRules
    gaps: Gaps
    capacity_bytes: int


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
    return Selection(stays, next_use, next_use, found, problem.trace.phase_count)


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

    Raises
    ------
    PlanError
        If no tensor's name is `pattern`, or matches it (``*`` stands for anything).
    """
    names = trace.tensor_names
    wanted = [n for n, name in enumerate(names) if name == pattern or fnmatchcase(name, pattern)]
    if not wanted:
        hint = did_you_mean(pattern, names) or f": give a name such as {names[0]!r}, or '*'"
        raise PlanError(f"trace {trace.name!r}: no tensor is called {pattern!r}{hint}")
    gaps, needed_by = find_gaps(trace), plan.decisions.needed_by
    rows = np.flatnonzero(np.isin(gaps.tensor, wanted))
    return tuple(
        Decision(
            names[gaps.tensor[row]],
            int(gaps.last_use[row]),
            int(gaps.next_use[row]),
            reason in (Reason.PRESSURE, Reason.PRESSURE_LATE),
            None if needed_by[row] == NOT_NEEDED else int(needed_by[row]),
            reason,
        )
        for row in rows[np.argsort(gaps.last_use[rows], kind="stable")]
        for reason in [Reason(plan.decisions.reason[row])]
    )


def plan_step(problem: PlanningProblem, clock: PhaseClock, *, name: str, slack: float) -> Plan:
    """Plan one step: choose intervals, time the transfers, put the hints in order.

    Parameters
    ----------
    problem
        The trace and how its tensors are held.
    clock
        When phases begin.
    name
        Of the planner.
    slack
        Transfers are given this many times the time that they take alone.
    """
    gaps = problem.gaps
    in_s, out_s = _transfer_s(problem, slack)
    prices, price = np.unique(
        (in_s + out_s) / problem.trace.tensor_bytes[gaps.tensor], return_inverse=True
    )
    held = np.full(len(price), -1, np.int8)
    held[~problem.rules.movable[gaps.tensor]] = Reason.HELD
    held[gaps.is_dead] = Reason.DEAD
    first, on_device = problem.rules.first[gaps.tensor], _on_device(problem)
    back = gaps.next_use
    idle_s = clock.at(gaps.last_use + 1)
    gone_s = idle_s + out_s
    moves: _Moves | None = None
    decisions: Selection | None = None
    for _ in range(_ROUNDS):
        gone = phases_at(clock.start_s, clock.step_s, np.minimum(gone_s, 3 * clock.step_s), up=True)
        found = select(
            problem.trace,
            gaps,
            clock,
            problem.capacity_bytes,
            gone=gone,
            back=back,
            prices=prices,
            price=price,
            barred=np.where((back <= gone) & (held < 0), Reason.LINK_BUSY, held).astype(np.int8),
            first=first,
            on_device=on_device,
        )
        decisions = decisions or found
        chosen = np.flatnonzero(found.needed_by != NOT_NEEDED)
        if not len(chosen):
            break
        decisions = found
        moves = _times(problem, clock, chosen, found.needed_by[chosen], in_s, out_s)
        back = gaps.next_use.copy()
        back[chosen] = moves.back
        gone_s = spare_ends(idle_s, out_s, moves.leave_s, moves.gone_s, clock.step_s)
        gone_s[chosen] = moves.gone_s
    assert decisions is not None
    hints = [discard_hints(problem)]
    too_late = np.empty(0, np.int64)
    if moves is not None:
        is_late = moves.leave >= moves.due  # such a tensor could leave only after its next use
        too_late = moves.gap[is_late]
        kept = {name: column[~is_late] for name, column in vars(moves).items()}
        hints.append(_move_hints(problem, clock, replace(moves, **kept)))
    decide = partial(_tell_short_ones, decisions, problem, clock, slack, too_late)
    return Plan(make_schedule(problem, name, hints), decide)


def _tell_short_ones(
    decisions: Selection,
    problem: PlanningProblem,
    clock: PhaseClock,
    slack: float,
    too_late: npt.NDArray[np.int64],
) -> Selection:
    """Tell intervals that are too short for any link from those that find it busy."""
    gaps = problem.gaps
    in_s, out_s = _transfer_s(problem, slack)
    idle_s = clock.at(gaps.last_use + 1)
    gone_alone = phases_at(clock.start_s, clock.step_s, idle_s + out_s, up=True)
    is_short = clock.at(gaps.next_use) - idle_s < in_s + out_s
    is_short |= gaps.next_use <= gone_alone
    barred = decisions.barred.copy()
    barred[is_short & (barred == Reason.LINK_BUSY)] = Reason.TOO_SHORT
    barred[too_late] = Reason.LINK_BUSY
    return replace(decisions, barred=barred)


@dataclass(frozen=True, eq=False)
class _Moves:
    """Intervals spent on the host, N of them, and when."""

    gap: npt.NDArray[np.int64]
    leave: npt.NDArray[np.int64]
    """Phase at which to send the tensor away."""
    gone: npt.NDArray[np.int64]
    """First phase without it."""
    back: npt.NDArray[np.int64]
    """Phase at which it has to be asked for."""
    due: npt.NDArray[np.int64]
    """Phase that uses it."""
    leave_s: npt.NDArray[np.float64]
    gone_s: npt.NDArray[np.float64]


def _times(
    problem: PlanningProblem,
    clock: PhaseClock,
    chosen: npt.NDArray[np.int64],
    needed_by: npt.NDArray[np.int64],
    in_s: npt.NDArray[np.float64],
    out_s: npt.NDArray[np.float64],
) -> _Moves:
    """Time the transfers of chosen intervals against the bandwidth of both directions."""
    gaps = problem.gaps
    idle_from, due = gaps.last_use[chosen] + 1, gaps.next_use[chosen]
    leave_s, gone_s = leave_times(
        clock.at(idle_from), clock.at(needed_by), out_s[chosen], clock.step_s
    )
    leave = np.maximum(phases_at(clock.start_s, clock.step_s, leave_s), idle_from)
    gone = phases_at(clock.start_s, clock.step_s, gone_s, up=True)
    begin_s = latest_starts(clock.at(due), in_s[chosen], clock.step_s)
    back = phases_at(clock.start_s, clock.step_s, begin_s)
    return _Moves(
        chosen, leave, gone, np.clip(back, np.minimum(gone, due), due), due, leave_s, gone_s
    )


def _move_hints(
    problem: PlanningProblem, clock: PhaseClock, moves: _Moves
) -> npt.NDArray[np.float64]:
    trace, count = problem.trace, problem.trace.phase_count
    tensor = problem.gaps.tensor[moves.gap]
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
    return np.concatenate(
        [
            _hints(
                problem,
                moves.leave,
                out,
                tensor,
                moves.leave_s - moves.leave // count * clock.step_s,
            ),
            # As seen from the step that the hint is issued in.
            _hints(problem, issue, back, tensor, due - issue // count * count),
        ]
    )


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
    calls_s = -(-size // hardware.call_bytes) * hardware.call_s
    in_rate = np.where(copied, hardware.copy_to_device_bytes_per_s, hardware.to_device_bytes_per_s)
    out_rate = np.where(copied, hardware.copy_to_host_bytes_per_s, hardware.to_host_bytes_per_s)
    free = rules.kept_copy[gaps.tensor] & ~written_tensors(problem.trace)[gaps.tensor]
    in_s = (size / in_rate + calls_s) * slack
    return in_s, np.where(free, 0.0, (size / out_rate + calls_s) * slack)


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
