"""The yardsticks: demand paging, and prefetch for a window ahead with two rules for eviction."""

from __future__ import annotations

import heapq

import numpy as np

from umem.core.compiled import compiled
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.planning.problem import PlanningProblem, make_schedule

_NEVER = 2**40
"""A phase that no trace reaches."""

_STRICT_SETTLING = 8
"""Steps until what is resident repeats from step to step, or nearly so. Where the driver helps out,
one is enough."""

__all__ = ["fault", "lookahead", "oracle", "paging"]


def fault(problem: PlanningProblem) -> Schedule:
    """No hints: pages come when they are touched, and the driver evicts what it saw used last."""
    return make_schedule(problem, "fault", [np.empty((0, 4))], waits=False)


def paging(problem: PlanningProblem) -> Schedule:
    """Demand paging of a budget that the driver does not know.

    The driver evicts when the device is full. Where only a budget is, somebody has to ask for it:
    what was used longest ago leaves when a phase's own tensors do not fit. Nothing is prefetched.
    """
    every = _windowed(problem, 0, "fault", by_next_use=False, strict=True)
    leaves = np.isin(every.hint_op, (HintOp.EVICT, HintOp.COPY_OUT))
    return Schedule(
        planner="fault",
        residency=every.residency,
        hint_phase=every.hint_phase[leaves],
        hint_op=every.hint_op[leaves],
        hint_tensor=every.hint_tensor[leaves],
        waits=False,
    )


def lookahead(problem: PlanningProblem, window: int, *, strict: bool) -> Schedule:
    """Prefetch what the next phases use, and evict least recently used tensors for it.

    What DeepUM does with kernels (Jung et al., ASPLOS 2023). Faults overtake prefetches that are
    late.

    Parameters
    ----------
    problem
        The trace and how its tensors are held.
    window
        Phases ahead.
    strict
        Whether the budget has to hold by hints alone: what the window will use leaves too, where a
        phase's own tensors do not fit otherwise, and a window that is too wide is halved. The
        driver evicts where it keeps the budget.
    """
    while True:
        schedule = _windowed(problem, window, "lookahead", by_next_use=False, strict=strict)
        if not strict or window == 1 or _peak_bytes(problem, schedule) <= problem.capacity_bytes:
            return schedule
        window //= 2  # a window that is too wide for the budget may never settle


def oracle(problem: PlanningProblem, window: int) -> Schedule:
    """The same with Belady's rule for eviction: what is needed last goes first.

    It knows what to evict best, and not when: against :func:`lookahead` it tells what the choice is
    worth, and against a plan of the whole step what the timing is.
    """
    return _windowed(problem, window, "oracle", by_next_use=True, strict=False)


def _peak_bytes(problem: PlanningProblem, schedule: Schedule) -> int:
    """Most bytes on the device in a step after others like it, by hints and uses alone."""
    trace = problem.trace
    size = trace.tensor_bytes.tolist()
    is_there = ~np.isin(schedule.residency, (ResidencyMode.MAP, ResidencyMode.SYSTEM))
    bounds = np.searchsorted(schedule.hint_phase, np.arange(trace.phase_count + 1))
    dying: list[list[int]] = [[] for _ in range(trace.phase_count)]
    for tensor in np.flatnonzero(~trace.persistent).tolist():
        dying[trace.last_phase[tensor]].append(tensor)
    resident = set(np.flatnonzero(trace.persistent & is_there).tolist())
    peak = 0
    for step in range(3):
        for phase in range(trace.phase_count):
            hints = slice(bounds[phase], bounds[phase + 1])
            leaves = np.isin(schedule.hint_op[hints], (HintOp.EVICT, HintOp.COPY_OUT))
            resident -= set(schedule.hint_tensor[hints][leaves].tolist())
            comes = np.isin(schedule.hint_op[hints], (HintOp.PREFETCH, HintOp.COPY_IN))
            resident |= set(schedule.hint_tensor[hints][comes].tolist())
            used = trace.access_tensor[trace.access_start[phase] : trace.access_start[phase + 1]]
            resident |= set(used[is_there[used]].tolist())
            if step == 2:
                peak = max(peak, sum(size[tensor] for tensor in resident))
            resident -= set(dying[phase])
    return peak


def _windowed(
    problem: PlanningProblem, window: int, name: str, *, by_next_use: bool, strict: bool
) -> Schedule:
    trace, gaps = problem.trace, problem.gaps
    moves = np.isin(problem.rules.residency, (ResidencyMode.MIGRATE, ResidencyMode.DUPLICATE))
    off_device = np.isin(problem.rules.residency, (ResidencyMode.MAP, ResidencyMode.SYSTEM))
    # Dead contents are needed never; so are those of a tensor that is about to die.
    next_use = np.where(gaps.is_dead, _NEVER, gaps.next_use)
    # NO_GAP finds what is appended.
    access_next = np.append(next_use, _NEVER)[gaps.after_access]
    phase, op, tensor = _window_hints(
        trace.access_start,
        trace.access_tensor,
        access_next,
        np.where(off_device, 0, trace.tensor_bytes),
        moves & problem.rules.movable,
        trace.persistent,
        trace.last_phase,
        problem.capacity_bytes,
        window,
        by_next_use,
        strict,
    )
    copied = problem.rules.copied[tensor]
    op = np.where(copied & (op == HintOp.EVICT), HintOp.COPY_OUT, op)
    op = np.where(copied & (op == HintOp.PREFETCH), HintOp.COPY_IN, op)
    rows = np.stack([phase, np.arange(len(phase)), op, tensor], axis=1).astype(float)
    return make_schedule(problem, name, [rows], waits=False)


@compiled
def _window_hints(
    access_start,
    access_tensor,
    access_next,
    held_bytes,
    movable,
    persistent,
    last_phase,
    capacity,
    window,
    by_next_use,
    strict,
):
    """Hints of a step, when those before it have settled what is resident."""
    phases = len(access_start) - 1
    tensors = len(held_bytes)
    resident = np.zeros(tensors, np.bool_)
    away = np.zeros(tensors, np.bool_)
    rank = np.full(tensors, -1, np.int64)  # the lowest goes first
    wanted = np.zeros(tensors, np.int64)  # phases of the window that use the tensor
    idle = [(np.int64(0), np.int64(0))]
    idle.pop()
    spared = [(np.int64(0), np.int64(0))]  # what the window wants, found while looking for room
    used_in = np.full(tensors, -1, np.int64)  # the last phase that used the tensor
    hints = [(np.int64(0), np.int64(0), np.int64(0))]
    hints.pop()
    used = 0
    for tensor in range(tensors):
        if persistent[tensor] and (not movable[tensor] or used + held_bytes[tensor] <= capacity):
            resident[tensor] = True
            used += held_bytes[tensor]
            heapq.heappush(idle, (np.int64(-1), np.int64(tensor)))
        elif persistent[tensor]:
            away[tensor] = True
    deaths = [[np.int64(0) for _ in range(0)] for _ in range(phases)]
    for tensor in range(tensors):
        if not persistent[tensor] and last_phase[tensor] >= 0:
            deaths[last_phase[tensor]].append(np.int64(tensor))
    for ahead in range(window):
        phase = ahead % phases
        for access in range(access_start[phase], access_start[phase + 1]):
            wanted[access_tensor[access]] += 1
    settling = (_STRICT_SETTLING if strict else 1) * phases
    for now in range(settling + phases):
        phase = now % phases
        entering = (now + window) % phases
        for access in range(access_start[entering], access_start[entering + 1]):
            wanted[access_tensor[access]] += 1
        spared.clear()
        for access in range(access_start[phase], access_start[phase + 1]):
            used_in[access_tensor[access]] = now
        for ahead in range(window + 1):
            later = (now + ahead) % phases
            full = False
            for access in range(access_start[later], access_start[later + 1]):
                tensor = access_tensor[access]
                if resident[tensor] or (ahead > 0 and not away[tensor]):
                    continue
                while used + held_bytes[tensor] > capacity:
                    if len(idle) > 0:
                        its_rank, victim = heapq.heappop(idle)
                        if not resident[victim] or rank[victim] != its_rank:
                            continue
                        if wanted[victim] > 0 or not movable[victim]:
                            spared.append((its_rank, victim))
                            continue  # comes back to the heap with its next use
                    elif strict and ahead == 0 and len(spared) > 0:
                        _, victim = spared.pop()  # used last, so needed last
                        if not movable[victim] or used_in[victim] == now:
                            continue
                    else:
                        break
                    resident[victim] = False
                    away[victim] = True
                    used -= held_bytes[victim]
                    if now >= settling:
                        hints.append((np.int64(phase), np.int64(1), victim))
                if ahead > 0 and used + held_bytes[tensor] > capacity:
                    full = True
                    break
                resident[tensor] = True
                used += held_bytes[tensor]
                if away[tensor] and movable[tensor] and now >= settling:
                    hints.append((np.int64(phase), np.int64(0), np.int64(tensor)))
                away[tensor] = False
            if full:
                break
        if strict:
            for entry in spared:
                heapq.heappush(idle, entry)
        for access in range(access_start[phase], access_start[phase + 1]):
            tensor = access_tensor[access]
            wanted[tensor] -= 1
            rank[tensor] = phase - now - access_next[access] if by_next_use else now
            heapq.heappush(idle, (rank[tensor], np.int64(tensor)))
        for tensor in deaths[phase]:
            if resident[tensor]:
                used -= held_bytes[tensor]
            resident[tensor] = False
            away[tensor] = False
    count = len(hints)
    rows = np.empty((3, count), np.int64)
    for i in range(count):
        rows[0, i], rows[1, i], rows[2, i] = hints[i]
    return rows[0], rows[1], rows[2]
