"""Which idle intervals a tensor spends on the host, and why: Belady's rule, by bytes moved."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from umem.core.compiled import compiled
from umem.trace import Gaps, Trace, ranges

__all__ = ["NOT_NEEDED", "WHY", "PhaseClock", "Reason", "Selection", "select"]

NOT_NEEDED = -1

_STEPS = 3
"""Steps swept. The last one's choice counts: by then, what is away at the step's edge repeats."""

_FIRST_S = 1e9
"""Added to the time of the next use of a tensor that the policy evicts before others."""


class Reason(IntEnum):
    """Why a tensor leaves the device for an idle interval, or stays."""

    PRESSURE = 0
    PRESSURE_LATE = 1
    DEAD = 2
    ROOM = 3
    OUTRANKED = 4
    TOO_SHORT = 5
    LINK_BUSY = 6
    HELD = 7
    LEFT_TO_DRIVER = 8


WHY: Mapping[Reason, str] = {
    Reason.PRESSURE: "leaves: more is resident than fits, and its absence helps longest per byte",
    Reason.PRESSURE_LATE: "leaves, though late: nothing else can free its memory in time",
    Reason.DEAD: "dropped: its next use overwrites the contents",
    Reason.ROOM: "stays: there is room for it until its next use",
    Reason.OUTRANKED: "stays: the absence of others helps longer per byte",
    Reason.TOO_SHORT: "stays: its next use comes before it could leave and return",
    Reason.LINK_BUSY: "stays: other transfers leave the link no time for it",
    Reason.HELD: "stays where the policy or its mechanism holds it",
    Reason.LEFT_TO_DRIVER: "left to the driver: demand paging is faster than every plan",
}
"""What each reason means, in words."""


@dataclass(frozen=True, eq=False)
class PhaseClock:
    """When phases begin: with everything resident, or as a simulation found it."""

    start_s: npt.NDArray[np.float64]
    """float64[P]"""
    step_s: float

    def at(self, phases: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Start of phases that may lie in the next step, seconds."""
        count = len(self.start_s)
        return self.start_s[phases % count] + self.step_s * (phases // count)


@dataclass(frozen=True, eq=False)
class Selection:
    """A decision for each of G idle intervals."""

    needed_by: npt.NDArray[np.int64]
    """int64[G]: phase by which the tensor's memory is needed, :data:`NOT_NEEDED` where it stays; P
    or more for phases of the next step."""
    gone: npt.NDArray[np.int64]
    back: npt.NDArray[np.int64]
    """int64[G] each: phases between which the tensor could be away."""
    barred: npt.NDArray[np.int8]
    """int8[G]: :class:`Reason` that holds whatever the sweep found; -1 for none."""
    phase_count: int

    @cached_property
    def reason(self) -> npt.NDArray[np.int8]:
        """int8[G]: :class:`Reason`. Found when it is asked for: most plans are never explained."""
        chosen = self.needed_by != NOT_NEEDED
        short = np.zeros(self.phase_count, np.int64)  # phases that lack memory
        short[self.needed_by[chosen] % self.phase_count] = 1
        count = ranges(np.tile(short, 3))
        edge = len(count) - 1
        is_pressed = count[np.clip(self.back, 0, edge)] > count[np.clip(self.gone, 0, edge)]
        is_late = self.gone > self.needed_by
        leaves = np.where(is_late, Reason.PRESSURE_LATE, Reason.PRESSURE)
        stays = np.where(is_pressed, Reason.OUTRANKED, Reason.ROOM)
        found = np.where(chosen, leaves, stays)
        return np.where(self.barred < 0, found, self.barred).astype(np.int8)


def select(
    trace: Trace,
    gaps: Gaps,
    clock: PhaseClock,
    capacity_bytes: int,
    *,
    gone: npt.NDArray[np.int64],
    back: npt.NDArray[np.int64],
    prices: npt.NDArray[np.float64],
    price: npt.NDArray[np.int64],
    barred: npt.NDArray[np.int8],
    first: npt.NDArray[np.bool_],
    on_device: npt.NDArray[np.bool_],
) -> Selection:
    """Choose intervals to spend on the host so that what is resident fits.

    The step is swept phase by phase. Where too much is resident, the idle tensor goes whose absence
    relieves the longest time for each byte moved: with equal prices, the one needed last. Tensors
    that can have left by then go first; others free their memory late.

    Parameters
    ----------
    trace, gaps, clock, capacity_bytes
        The step, its idle intervals, when its phases begin, and the budget.
    gone : int64[G]
        First phase in which the tensor's memory is free if it is sent away; P or more in the next
        step.
    back : int64[G]
        Phase at which the tensor takes memory again: that of the next use, or earlier by the time
        of its way back.
    prices : float64[K]
        Link seconds that being away can cost, per byte, ascending.
    price : int64[G]
        Which of them an interval costs.
    barred : int8[G]
        Why an interval must not be chosen, a :class:`Reason`; -1 where it may.
    first : bool[G]
        To be chosen before others.
    on_device : bool[T]
        Tensors that take device memory when they are used.
    """
    intervals = np.zeros(len(gone), _INTERVAL)
    intervals["gone"], intervals["back"], intervals["price"] = gone, back, price
    intervals["is_dead"], intervals["allowed"] = gaps.is_dead, barred < 0
    intervals["first"] = first
    intervals["needed_by"] = NOT_NEEDED
    tensors = np.zeros(trace.tensor_count, _TENSOR)
    tensors["bytes"] = np.where(on_device, trace.tensor_bytes, 0)
    tensors["resident"] = trace.persistent & on_device
    tensors["interval"] = tensors["used_at"] = -1
    _sweep(
        trace.access_start,
        trace.access_tensor,
        gaps.after_access,
        intervals,
        tensors,
        prices,
        clock.start_s,
        clock.step_s,
        capacity_bytes,
    )
    return Selection(intervals["needed_by"].copy(), gone, back, barred, trace.phase_count)


_INTERVAL = np.dtype(
    [
        ("gone", "i8"),
        ("back", "i8"),
        ("price", "i8"),  # index of the sorted prices
        ("is_dead", "?"),
        ("allowed", "?"),
        ("first", "?"),
        ("needed_by", "i8"),  # the result
    ],
    align=True,
)

_TENSOR = np.dtype(
    [
        ("bytes", "i8"),
        ("resident", "?"),
        ("leaving", "?"),  # resident, and on the way out
        ("interval", "i8"),  # that it is in; -1 for none
        ("base", "i8"),  # first phase of the step that the interval began in
        ("used_at", "i8"),  # phase of the last use, over all steps
    ],
    align=True,
)

USED, LEAVING = range(2)
"""Of the sums: bytes that are used, and of these the bytes on their way out."""


@compiled
def _sweep(
    access_start,
    access_tensor,
    after_access,
    intervals,
    tensors,
    prices,
    time_s,
    step_s,
    capacity_bytes,
):
    """Sweep some steps; the result is in the intervals.

    Heaps hold (key, tensor, interval): `ready`, by price, tensors that can have left by now, last
    needed first; `later` those that can have left by a later phase; `departures` tensors that leave
    late, by the phase in which they have left; `returns` those that are away, by that of their
    return.
    """
    phases = len(access_start) - 1
    sums = np.zeros(2, np.int64)
    for tensor in range(len(tensors)):
        if tensors[tensor].resident:
            sums[USED] += tensors[tensor].bytes
    ready = [[(0.0, np.int64(0), np.int64(0))] for _ in range(len(prices))]
    for heap in ready:
        heap.pop()
    later = [(np.int64(0), np.int64(0), np.int64(0))]
    later.pop()
    departures = later.copy()
    returns = later.copy()
    for now in range(_STEPS * phases):
        phase = now % phases
        if phase == 0 and now > 0:
            _forget_choices(intervals, phases, now == phases)
        _complete_departures(tensors, sums, departures, now)
        _complete_returns(tensors, sums, returns, now)
        _make_ready(intervals, tensors, ready, later, time_s, step_s, now)
        first, last = access_start[phase], access_start[phase + 1]
        for access in range(first, last):
            tensor = access_tensor[access]
            tensors[tensor].used_at = now
            _set_leaving(tensors, sums, tensor, False)
            _set_resident(tensors, sums, tensor, True)
        now_s = time_s[phase] + step_s * (now // phases)
        while sums[USED] > capacity_bytes:
            if not _evict_in_time(intervals, tensors, sums, ready, returns, prices, now, now_s):
                break
        while sums[USED] - sums[LEAVING] > capacity_bytes and len(later) > 0:
            _evict_late(intervals, tensors, sums, later, departures, returns, now)
        for access in range(first, last):
            tensor, gap = access_tensor[access], after_access[access]
            _begin_interval(intervals, tensors, sums, later, tensor, gap, now, phase)


@compiled
def _forget_choices(intervals, phases, all_of_them):
    """Forget choices at a step's edge, but those whose intervals reach into the new step.

    The choices of the first step do not hold on at all: it began with an invented placement.
    """
    for gap in range(len(intervals)):
        if all_of_them or intervals[gap].back <= phases:
            intervals[gap].needed_by = NOT_NEEDED


@compiled
def _set_resident(tensors, sums, tensor, resident):
    if tensors[tensor].resident != resident:
        tensors[tensor].resident = resident
        sums[USED] += tensors[tensor].bytes if resident else -tensors[tensor].bytes


@compiled
def _set_leaving(tensors, sums, tensor, leaving):
    if tensors[tensor].leaving != leaving:
        tensors[tensor].leaving = leaving
        sums[LEAVING] += tensors[tensor].bytes if leaving else -tensors[tensor].bytes


@compiled
def _complete_departures(tensors, sums, departures, now):
    """Free the memory of tensors that have left by now."""
    while len(departures) > 0 and departures[0][0] <= now:
        _, tensor, gap = heapq.heappop(departures)
        if tensors[tensor].leaving and tensors[tensor].interval == gap:
            _set_leaving(tensors, sums, tensor, False)
            _set_resident(tensors, sums, tensor, False)


@compiled
def _complete_returns(tensors, sums, returns, now):
    """Give tensors their memory again that are due, or have not left in time."""
    while len(returns) > 0 and returns[0][0] <= now:
        _, tensor, gap = heapq.heappop(returns)
        if tensors[tensor].interval == gap:
            _set_leaving(tensors, sums, tensor, False)
            _set_resident(tensors, sums, tensor, True)


@compiled
def _is_idle(tensors, tensor, gap, now):
    """Whether a tensor is still in an interval, and on the device."""
    return (
        tensors[tensor].resident
        and not tensors[tensor].leaving
        and tensors[tensor].interval == gap
        and tensors[tensor].used_at < now
    )


@compiled
def _make_ready(intervals, tensors, ready, later, time_s, step_s, now):
    """Let tensors compete that can have left by now."""
    while len(later) > 0 and later[0][0] <= now:
        _, tensor, gap = heapq.heappop(later)
        if _is_idle(tensors, tensor, gap, now):
            back = tensors[tensor].base + intervals[gap].back
            until_s = time_s[back % len(time_s)] + step_s * (back // len(time_s))
            if intervals[gap].first:
                until_s += _FIRST_S
            item = (-until_s, np.int64(tensor), np.int64(gap))
            heapq.heappush(ready[intervals[gap].price], item)


@compiled
def _evict_in_time(intervals, tensors, sums, ready, returns, prices, now, now_s):
    """Evict the ready tensor whose absence helps longest per byte; False if none is ready."""
    best = -1
    best_worth = 0.0
    for price in range(len(prices)):
        heap = ready[price]
        while len(heap) > 0:
            _, tensor, gap = heap[0]
            is_away_long = tensors[tensor].base + intervals[gap].back > now
            if is_away_long and _is_idle(tensors, tensor, gap, now):
                worth = (-heap[0][0] - now_s) / prices[price]
                if best < 0 or worth > best_worth:
                    best = price
                    best_worth = worth
                break
            heapq.heappop(heap)
    if best < 0:
        return False
    _, tensor, gap = heapq.heappop(ready[best])
    _set_resident(tensors, sums, tensor, False)
    _choose(intervals, tensors, returns, tensor, gap, now)
    return True


@compiled
def _evict_late(intervals, tensors, sums, later, departures, returns, now):
    """Evict the tensor that can have left first, though its memory is free after now only."""
    gone, tensor, gap = heapq.heappop(later)
    is_away_long = tensors[tensor].base + intervals[gap].back > gone
    if is_away_long and _is_idle(tensors, tensor, gap, now):
        _set_leaving(tensors, sums, tensor, True)
        heapq.heappush(departures, (gone, np.int64(tensor), np.int64(gap)))
        _choose(intervals, tensors, returns, tensor, gap, now)


@compiled
def _choose(intervals, tensors, returns, tensor, gap, now):
    """Spend an interval on the host."""
    intervals[gap].needed_by = now - tensors[tensor].base
    back = tensors[tensor].base + intervals[gap].back
    heapq.heappush(returns, (back, np.int64(tensor), np.int64(gap)))


@compiled
def _begin_interval(intervals, tensors, sums, later, tensor, gap, now, phase):
    """Begin the interval behind a use; dead contents take no memory."""
    tensors[tensor].interval = gap
    tensors[tensor].base = now - phase
    if gap < 0 or intervals[gap].is_dead:
        _set_resident(tensors, sums, tensor, False)
    elif intervals[gap].allowed:
        gone = tensors[tensor].base + intervals[gap].gone
        heapq.heappush(later, (gone, np.int64(tensor), np.int64(gap)))
