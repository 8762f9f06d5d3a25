"""Demand paging, and prefetch for a window of phases ahead."""

from __future__ import annotations

import heapq
from functools import partial

import numpy as np

from umem.core.compiled import compiled, compiled_in_place
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.pages.plan.problem import PlanningProblem, make_schedule

__all__ = ["fault", "lookahead", "paging"]

_WINDOW = 8
"""Phases that :func:`lookahead` looks ahead."""

_PREFETCH, _EVICT = int(HintOp.PREFETCH), int(HintOp.EVICT)

_STRICT_SETTLING = 8
"""Steps until residency repeats from step to step, or nearly so. Where the driver evicts besides,
one is enough."""


def fault(problem: PlanningProblem) -> Schedule:
    """No hints: pages come when they are touched, and the driver evicts what it saw used last."""
    return make_schedule(problem, "fault", [np.empty((0, 4))], waits=False)


def paging(problem: PlanningProblem) -> Schedule:
    """Demand paging of a budget that the driver does not know.

    The driver evicts when the device is full. A budget below that has to be kept by hints: the
    tensors used longest ago leave when a phase's own tensors do not fit. No page is prefetched.
    """
    every = _windowed(problem, 0, "fault", strict=True)
    asked = every.hint_op != HintOp.PREFETCH
    return Schedule(
        planner="fault",
        residency=every.residency,
        hint_phase=every.hint_phase[asked],
        hint_op=every.hint_op[asked],
        hint_tensor=every.hint_tensor[asked],
        waits=False,
    )


def lookahead(problem: PlanningProblem, *, strict: bool) -> Schedule:
    """Prefetch what the next phases use, and evict least recently used tensors for it.

    What DeepUM does with kernels (Jung et al., ASPLOS 2023). Faults overtake prefetches that are
    late. Where it is `strict`, hints alone keep the budget: tensors that the window will use leave
    too, where a phase's own tensors do not fit otherwise, and a window that is too wide is halved.
    Otherwise the driver evicts what hints do not.
    """
    window = min(_WINDOW, problem.trace.phase_count)
    while True:
        schedule = _windowed(problem, window, "lookahead", strict=strict)
        if not strict or window == 1 or _peak_bytes(problem, schedule) <= problem.capacity_bytes:
            return schedule
        window //= 2  # a window that is too wide for the budget may never settle


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


def _windowed(problem: PlanningProblem, window: int, name: str, *, strict: bool) -> Schedule:
    """Prefetch for a window of phases, and evict what was used longest ago."""
    trace = problem.trace
    moves = np.isin(problem.rules.residency, (ResidencyMode.MIGRATE, ResidencyMode.DUPLICATE))
    off_device = np.isin(problem.rules.residency, (ResidencyMode.MAP, ResidencyMode.SYSTEM))
    tensors = np.zeros(trace.tensor_count, _TENSOR)
    tensors["bytes"] = np.where(off_device, 0, trace.tensor_bytes)
    tensors["movable"] = moves & problem.rules.movable
    tensors["used_at"] = -1
    phase, op, tensor = _window_hints(
        trace.access_start,
        trace.access_tensor,
        tensors,
        trace.persistent,
        trace.last_phase,
        problem.capacity_bytes,
        window,
        strict,
    )
    copied = problem.rules.copied[tensor]
    op = np.where(copied & (op == HintOp.EVICT), HintOp.COPY_OUT, op)
    op = np.where(copied & (op == HintOp.PREFETCH), HintOp.COPY_IN, op)
    rows = np.stack([phase, np.arange(len(phase)), op, tensor], axis=1).astype(float)
    return make_schedule(problem, name, [rows], waits=False)


_TENSOR = np.dtype(
    [
        ("bytes", "i8"),
        ("wanted", "i8"),  # phases of the window that use the tensor
        ("used_at", "i8"),  # phase of the last use, over all steps
        ("movable", "?"),
        ("resident", "?"),
        ("away", "?"),  # alive, and not resident
    ],
    align=True,
)


@compiled
def _window_hints(
    access_start, access_tensor, tensors, persistent, last_phase, capacity, window, strict
):
    """Hints (phase, op, tensor) of a step, when those before it have settled what is resident.

    `idle` is a heap of (phase of the last use, tensor); `spared` has those that the window wants,
    found while looking for room.
    """
    phases = len(access_start) - 1
    used = np.zeros(1, np.int64)  # bytes
    idle = [(np.int64(0), np.int64(0))]
    idle.pop()
    spared = idle.copy()
    hints = [(np.int64(0), np.int64(0), np.int64(0))]
    hints.pop()
    _place_persistent(tensors, persistent, used, idle, capacity)
    deaths = [[np.int64(0) for _ in range(0)] for _ in range(phases)]
    for tensor in range(len(tensors)):
        if not persistent[tensor] and last_phase[tensor] >= 0:
            deaths[last_phase[tensor]].append(np.int64(tensor))
    for ahead in range(window):
        _want(access_start, access_tensor, tensors, ahead % phases)
    settling = (_STRICT_SETTLING if strict else 1) * phases
    for now in range(settling + phases):
        phase = now % phases
        if now == settling:
            hints.clear()
        _want(access_start, access_tensor, tensors, (now + window) % phases)
        for access in range(access_start[phase], access_start[phase + 1]):
            tensors[access_tensor[access]].used_at = now
        _bring_window(
            access_start, access_tensor, tensors, used, idle, spared, hints, capacity, now, window,
            strict,
        )  # fmt: skip
        if strict:
            for entry in spared:
                heapq.heappush(idle, entry)
        for access in range(access_start[phase], access_start[phase + 1]):
            tensor = access_tensor[access]
            tensors[tensor].wanted -= 1
            heapq.heappush(idle, (np.int64(now), np.int64(tensor)))
        for tensor in deaths[phase]:
            if tensors[tensor].resident:
                used[0] -= tensors[tensor].bytes
            tensors[tensor].resident = False
            tensors[tensor].away = False
    rows = np.empty((3, len(hints)), np.int64)
    for i in range(len(hints)):
        rows[0, i], rows[1, i], rows[2, i] = hints[i]
    return rows[0], rows[1], rows[2]


@compiled_in_place
def _want(access_start, access_tensor, tensors, phase):
    """A phase enters the window."""
    for access in range(access_start[phase], access_start[phase + 1]):
        tensors[access_tensor[access]].wanted += 1


@partial(compiled, forceinline=True)
def _bring_window(
    access_start, access_tensor, tensors, used, idle, spared, hints, capacity, now, window, strict
):
    """Bring in what a phase uses, and then what those after it use, as far as there is room."""
    phases = len(access_start) - 1
    spared.clear()
    for ahead in range(window + 1):
        later = (now + ahead) % phases
        for access in range(access_start[later], access_start[later + 1]):
            tensor = access_tensor[access]
            if tensors[tensor].resident or (ahead > 0 and not tensors[tensor].away):
                continue
            fits = _make_room(
                tensors, used, idle, spared, hints, capacity, now, now % phases, tensor,
                strict and ahead == 0,
            )  # fmt: skip
            if ahead > 0 and not fits:
                return
            tensors[tensor].resident = True
            used[0] += tensors[tensor].bytes
            if tensors[tensor].away and tensors[tensor].movable:
                hints.append((np.int64(now % phases), np.int64(_PREFETCH), np.int64(tensor)))
            tensors[tensor].away = False


@compiled
def _place_persistent(tensors, persistent, used, idle, capacity):
    """Start with as many persistent tensors on the device as fit."""
    for tensor in range(len(tensors)):
        if not persistent[tensor]:
            continue
        if tensors[tensor].movable and used[0] + tensors[tensor].bytes > capacity:
            tensors[tensor].away = True
        else:
            tensors[tensor].resident = True
            used[0] += tensors[tensor].bytes
            heapq.heappush(idle, (np.int64(-1), np.int64(tensor)))


@compiled
def _make_room(tensors, used, idle, spared, hints, capacity, now, phase, tensor, takes_wanted):
    """Evict until a tensor fits; False where it does not."""
    while used[0] + tensors[tensor].bytes > capacity:
        victim = _next_victim(tensors, idle, spared, now, takes_wanted)
        if victim < 0:
            return False
        tensors[victim].resident = False
        tensors[victim].away = True
        used[0] -= tensors[victim].bytes
        hints.append((np.int64(phase), np.int64(_EVICT), np.int64(victim)))
    return True


@compiled
def _next_victim(tensors, idle, spared, now, takes_wanted):
    """The tensor that leaves next, one that the window wants only if it must; -1 for none."""
    while len(idle) > 0:
        used_at, victim = heapq.heappop(idle)
        if tensors[victim].resident and tensors[victim].used_at == used_at:
            if tensors[victim].wanted == 0 and tensors[victim].movable:
                return victim
            spared.append((used_at, victim))  # comes back to the heap with its next use
    while takes_wanted and len(spared) > 0:
        _, victim = spared.pop()  # used last, so needed last
        if tensors[victim].movable and tensors[victim].used_at < now:
            return victim
    return np.int64(-1)
