"""When hints go out: against the bandwidth of both directions, and into the room there is.

Times are seconds from the start of the step; a time or a phase past the step's end lies in the next
one.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from umem.core.compiled import compiled

__all__ = ["earliest_issue", "latest_starts", "leave_times", "phases_at"]

_Seconds = npt.NDArray[np.float64]


def phases_at(
    time_s: _Seconds, step_s: float, at_s: _Seconds, *, up: bool = False
) -> npt.NDArray[np.int64]:
    """Last phase that has begun at each time, or with `up` the first that begins then or later.

    `time_s` has the start of each phase, float64[P]. The result, int64[N], is P or more for times
    in the next step, and negative for the step before.
    """
    steps = np.floor(at_s / step_s)
    within = at_s - steps * step_s
    if up:
        phase = np.searchsorted(time_s, within, side="left")
    else:
        phase = np.searchsorted(time_s, within, side="right") - 1
    return phase.astype(np.int64) + steps.astype(np.int64) * len(time_s)


@compiled
def latest_starts(needed_s, transfer_s, step_s):
    """Latest start of each transfer to the device such that all are in time, one after another.

    Of each, when it is needed and how long it takes: float64[N], as the result, which is before 0
    for a start in the step before.
    """
    within = needed_s % step_s
    order = np.argsort(within)[::-1]
    starts = np.empty(len(needed_s))
    free_s = np.inf
    # The second time round begins with what the first has left over at the step's start.
    for _ in range(2):
        for i in order:
            free_s = min(free_s, within[i]) - transfer_s[i]
            starts[i] = free_s + (needed_s[i] - within[i])
        free_s += step_s
    return starts


@compiled
def leave_times(ready_s, needed_s, transfer_s, step_s):
    """Start and end of each transfer to the host: as early as may be, the most urgent first.

    Of each, when the tensor is idle, when its memory is needed, and how long the transfer takes:
    float64[N], as both results.
    """
    count = len(ready_s)
    order = np.argsort(ready_s)
    starts = np.empty(count)
    ends = np.empty(count)
    queue = [(0.0, np.int64(0), 0.0)]
    queue.pop()
    free_s = -np.inf
    # Two steps: the second begins with the first one's backlog.
    for step in range(2):
        base_s = step * step_s
        i = 0
        while i < count or len(queue) > 0:
            if len(queue) == 0:
                if i == count:
                    break
                free_s = max(free_s, ready_s[order[i]] + base_s)
            while i < count and ready_s[order[i]] + base_s <= free_s:
                item = order[i]
                heapq.heappush(queue, (needed_s[item] + base_s, np.int64(item), base_s))
                i += 1
            if step == 0 and i == count and free_s >= step_s:
                break  # what is left competes with the second step's
            if len(queue) == 0:
                continue
            _, item, own_s = heapq.heappop(queue)
            starts[item] = free_s - own_s
            free_s += transfer_s[item]
            ends[item] = free_s - own_s
    return starts, ends


@compiled
def earliest_issue(order, away_from, back_at, size_bytes, resident_bytes, capacity_bytes):
    """Bring each return forward to the first phase from which there is room until it is due.

    `order` has the returns by the time that they are needed. A tensor is away from one phase to
    another, int64[N] each; its room from `back_at` on is counted in `resident_bytes`, int64[P],
    already. Returns the phase at which each may begin, int64[N].
    """
    phases = len(resident_bytes)
    width = 1
    while width < phases:
        width *= 2
    # Segment tree of maxima with pending additions: most[1] is the root.
    most = np.full(2 * width, np.iinfo(np.int64).min // 4, np.int64)
    added = np.zeros(2 * width, np.int64)
    most[width : width + phases] = resident_bytes
    for node in range(width - 1, 0, -1):
        most[node] = max(most[2 * node], most[2 * node + 1])
    issue = back_at.copy()
    floor = np.int64(-(2**60))
    for i in order:
        limit = capacity_bytes - size_bytes[i]
        low = max(away_from[i], floor)
        begin = back_at[i]
        # The range of phases [low, begin) may cross the step's edge: one piece for each step.
        while begin > low:
            step = (begin - 1) // phases
            piece_low = max(low, step * phases) - step * phases
            piece_high = begin - step * phases
            last = _last_above(most, added, width, piece_low, piece_high, limit)
            stop = piece_low if last < 0 else last + 1
            if stop < piece_high:
                _add(most, added, width, stop, piece_high, size_bytes[i])
            begin = stop + step * phases
            if last >= 0:
                break
        issue[i] = begin
        # In the order of need, so that an early one does not hold up an urgent one.
        floor = max(floor, begin)
    return issue


@compiled
def _add(most, added, width, low, high, size):
    """Add to the phases [low, high)."""
    left, right = low + width, high + width - 1
    first, last = left, right
    while left <= right:
        if left % 2 == 1:
            most[left] += size
            added[left] += size
            left += 1
        if right % 2 == 0:
            most[right] += size
            added[right] += size
            right -= 1
        left //= 2
        right //= 2
    for leaf in (first, last):
        node = leaf // 2
        while node >= 1:
            most[node] = max(most[2 * node], most[2 * node + 1]) + added[node]
            node //= 2


@compiled
def _last_above(most, added, width, low, high, limit):
    """Last phase of [low, high) whose value is above `limit`; -1 for none."""
    # Depth first from the right; each entry is a node, its first phase, its width and what its
    # ancestors add.
    nodes = np.empty(128, np.int64)
    starts = np.empty(128, np.int64)
    widths = np.empty(128, np.int64)
    extra = np.empty(128, np.int64)
    nodes[0], starts[0], widths[0], extra[0] = 1, 0, width, 0
    depth = 1
    while depth > 0:
        depth -= 1
        node, start, span, above = nodes[depth], starts[depth], widths[depth], extra[depth]
        if start >= high or start + span <= low or most[node] + above <= limit:
            continue
        if span == 1:
            return start
        half = span // 2
        for child in range(2):
            nodes[depth] = 2 * node + child
            starts[depth] = start + child * half
            widths[depth] = half
            extra[depth] = above + added[node]
            depth += 1
    return np.int64(-1)
