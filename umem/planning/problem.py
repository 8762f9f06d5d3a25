"""One plan: intervals chosen, transfers timed, hints in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.planning.residency_modes import Holding
from umem.planning.selection import NOT_NEEDED, select
from umem.planning.timing import earliest_issue, latest_starts, leave_times, phases_at, spare_ends
from umem.trace import Gaps, Trace, first_and_last_use, written_tensors

__all__ = ["Clock", "Placement", "discards", "in_order", "place"]

_ROUNDS = 3
"""Times that intervals are chosen; later ones know when the link lets tensors leave and return."""


@dataclass(frozen=True, eq=False)
class Clock:
    """When phases begin: with everything resident, or as a simulation found it."""

    start_s: npt.NDArray[np.float64]
    """float64[P]"""
    step_s: float

    def at(self, phases: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Start of phases that may lie in the next step, seconds."""
        count = len(self.start_s)
        return self.start_s[phases % count] + self.step_s * (phases // count)


@dataclass(frozen=True, eq=False)
class Placement:
    """A trace with what does not change from plan to plan."""

    trace: Trace
    hardware: Hardware
    holding: Holding
    gaps: Gaps
    capacity_bytes: int


def place(problem: Placement, clock: Clock, *, name: str, slack: float) -> Schedule:
    """Plan one step.

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
    gaps, trace = problem.gaps, problem.trace
    in_s, out_s = _transfer_s(problem, slack)
    moves = _Moves(np.zeros(0, np.int64), *(np.zeros(0, np.int64),) * 4, *(np.zeros(0),) * 2)
    returns = gaps.next_use
    idle_s = clock.at(gaps.last_use + 1)
    gone_s = idle_s + out_s
    for _ in range(_ROUNDS):
        gone = phases_at(clock.start_s, clock.step_s, np.minimum(gone_s, 3 * clock.step_s), up=True)
        needed_by = select(
            trace.access_start,
            trace.access_tensor,
            gaps.after_access,
            gone,
            returns,
            gaps.is_dead,
            (in_s + out_s) / trace.tensor_bytes[gaps.tensor],
            problem.holding.movable[gaps.tensor] & ~gaps.is_dead & (returns > gone),
            problem.holding.first[gaps.tensor],
            np.where(_on_device(problem), trace.tensor_bytes, 0),
            trace.persistent & _on_device(problem),
            clock.start_s,
            clock.step_s,
            problem.capacity_bytes,
        )
        chosen = np.flatnonzero(needed_by != NOT_NEEDED)
        if not len(chosen):
            break
        moves = _times(problem, clock, chosen, needed_by[chosen], in_s, out_s)
        returns = gaps.next_use.copy()
        returns[chosen] = moves.back
        gone_s = spare_ends(idle_s, out_s, moves.leave_s, moves.gone_s, clock.step_s)
        gone_s[chosen] = moves.gone_s
    moves = _in_time(moves)
    return in_order(problem, name, [discards(problem), _hints_of(problem, clock, moves)])


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
    problem: Placement,
    clock: Clock,
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


def _in_time(moves: _Moves) -> _Moves:
    """Without what could leave only after its next use."""
    goes = moves.leave < moves.due
    return replace(moves, **{name: column[goes] for name, column in vars(moves).items()})


def _hints_of(problem: Placement, clock: Clock, moves: _Moves) -> npt.NDArray[np.float64]:
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
    copied = problem.holding.copied[tensor]
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


def discards(problem: Placement) -> npt.NDArray[np.float64]:
    """Hints that free the memory of contents that are dead before their tensor is."""
    trace, gaps = problem.trace, problem.gaps
    moves = np.isin(problem.holding.residency, (ResidencyMode.MIGRATE, ResidencyMode.DUPLICATE))
    dead = np.flatnonzero(gaps.is_dead & moves[gaps.tensor])
    _, last_access = first_and_last_use(trace)
    lingers = moves & ~trace.persistent & (last_access >= 0) & (last_access < trace.last_phase)
    tensor = np.concatenate([gaps.tensor[dead], np.flatnonzero(lingers)])
    phase = np.concatenate([gaps.last_use[dead], last_access[lingers]]) + 1
    return _hints(problem, phase, np.full(len(phase), HintOp.DISCARD), tensor, phase)


def in_order(
    problem: Placement, name: str, hints: list[npt.NDArray[np.float64]], *, waits: bool = True
) -> Schedule:
    """Make a schedule of rows (phase, urgency, op, tensor)."""
    rows = np.concatenate(hints)
    # What makes room goes before what needs it.
    needs_room = np.isin(rows[:, 2], (HintOp.PREFETCH, HintOp.COPY_IN))
    rows = rows[np.lexsort((rows[:, 3], rows[:, 1], needs_room, rows[:, 0]))]
    return Schedule(
        planner=name,
        residency=problem.holding.residency.copy(),
        hint_phase=rows[:, 0].astype(np.int32),
        hint_op=rows[:, 2].astype(np.uint8),
        hint_tensor=rows[:, 3].astype(np.int32),
        waits=waits,
    )


def _hints(
    problem: Placement,
    phase: npt.NDArray[np.int64],
    op: npt.NDArray[np.int64],
    tensor: npt.NDArray[np.int32],
    urgency: npt.NDArray[np.float64] | npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    return np.stack([phase % problem.trace.phase_count, urgency, op, tensor], axis=1).astype(float)


def _transfer_s(
    problem: Placement, slack: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Time in and out of each interval's tensor, float64[G] each."""
    hardware, holding, gaps = problem.hardware, problem.holding, problem.gaps
    size = problem.trace.tensor_bytes[gaps.tensor]
    copied = holding.copied[gaps.tensor]
    calls_s = -(-size // hardware.call_bytes) * hardware.call_s
    in_rate = np.where(copied, hardware.copy_to_device_bytes_per_s, hardware.to_device_bytes_per_s)
    out_rate = np.where(copied, hardware.copy_to_host_bytes_per_s, hardware.to_host_bytes_per_s)
    free = holding.kept_copy[gaps.tensor] & ~written_tensors(problem.trace)[gaps.tensor]
    in_s = (size / in_rate + calls_s) * slack
    return in_s, np.where(free, 0.0, (size / out_rate + calls_s) * slack)


def _on_device(problem: Placement) -> npt.NDArray[np.bool_]:
    """Tensors that take device memory when used, bool[T]."""
    return ~np.isin(problem.holding.residency, (ResidencyMode.MAP, ResidencyMode.SYSTEM))


def _resident_bytes(
    problem: Placement,
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
