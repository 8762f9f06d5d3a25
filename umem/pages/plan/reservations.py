"""Which idle intervals tensors spend on the host: each transfer reserves its time on the link.

Where more is resident than the budget allows, the idle tensor goes whose absence helps longest for
each byte moved and for whose transfers the link has time. Contents are written to the host once
each time that they are made, as early as the direction is free, also while in use; then each
departure is free. Where no transfer is in time, the phase is held up.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umem.core.compiled import compiled, compiled_in_place
from umem.pages.plan.selection import NOT_NEEDED, PhaseClock
from umem.trace import Gaps, Trace

__all__ = ["LinkUse", "Reservations", "reserve"]

_STEPS = 4
"""Steps swept. A choice holds until the step comes to it again; the first step begins with an
invented placement, and holds up no phase."""

_SAME_PRICE = 0.05
"""Prices that differ by less than this share may count as the same: calls of the driver are not in
proportion to bytes."""

_FIRST_S = 1e9
"""Added to the time of the next use of a tensor that the policy evicts before others."""

_NEVER = 2**62

_NOTHING_S = 1e-12

_MISSING_S = 1e-9
"""Seconds without which a reservation is whole."""

OUT, IN = range(2)


@dataclass(frozen=True, eq=False)
class LinkUse:
    """What each of G idle intervals takes of the link."""

    made: npt.NDArray[np.int64]
    """int64[G]: phase behind the one that made the contents; below 0 in the step before."""
    ready: npt.NDArray[np.int64]
    """int64[G]: phase from which on they may be copied to the host, `made` or later."""
    version: npt.NDArray[np.int64]
    """int64[G]: the same number for intervals whose contents one copy on the host serves."""
    out_s: npt.NDArray[np.float64]
    """float64[G]: seconds to the host; 0 where a copy is there already."""
    in_s: npt.NDArray[np.float64]
    """float64[G]: seconds back."""
    shares: tuple[float, float]
    """Share of the whole link that each direction takes while it moves, out and in: above 1
    together where both cannot move at full speed at once."""


@dataclass(frozen=True, eq=False)
class Reservations:
    """Intervals that are spent on the host."""

    needed_by: npt.NDArray[np.int64]
    """int64[G]: as in :class:`umem.pages.plan.selection.Selection`."""
    returns: npt.NDArray[np.int64]
    """int64[G]: phase from which on the way back takes memory."""
    sent: npt.NDArray[np.int64]
    """int64[V]: phase in which each version begins to be copied to the host, seen from `made`."""
    there: npt.NDArray[np.int64]
    """int64[V]: first phase in which the host has it."""
    is_late: npt.NDArray[np.bool_]
    """bool[G]: phases are held up for its transfers."""
    no_time: npt.NDArray[np.bool_]
    """bool[G]: the link had no time for the interval when memory was short in it."""
    clock: PhaseClock
    """With the time for which phases are held up."""


def reserve(
    trace: Trace,
    gaps: Gaps,
    clock: PhaseClock,
    capacity_bytes: int,
    use: LinkUse,
    *,
    allowed: npt.NDArray[np.bool_],
    first: npt.NDArray[np.bool_],
    on_device: npt.NDArray[np.bool_],
    out_weight: float,
) -> Reservations:
    """Choose intervals to spend on the host, and give each transfer time on the link.

    `allowed` intervals may be chosen, those of `first` before others, bool[G] each; tensors
    `on_device` take device memory when they are used, bool[T]. `out_weight` is how much a second of
    the direction to the host counts beside one of that to the device, where intervals are compared.
    """
    size = trace.tensor_bytes[gaps.tensor]
    intervals = np.zeros(len(size), _INTERVAL)
    for name in ("made", "ready", "version", "out_s", "in_s"):
        intervals[name] = getattr(use, name)
    intervals["back"] = gaps.next_use
    intervals["is_dead"], intervals["allowed"], intervals["first"] = gaps.is_dead, allowed, first
    intervals["needed_by"], intervals["held"] = NOT_NEEDED, _NOBODY
    with_copy, without = use.in_s / size, (use.in_s + out_weight * use.out_s) / size
    prices, number = _alike(np.concatenate([with_copy, without]))
    intervals["clean_price"], intervals["price"] = np.split(number, 2)
    versions = np.zeros(int(use.version.max(initial=-1)) + 1, _VERSION)
    versions["held"] = _NOBODY
    tensors = np.zeros(trace.tensor_count, _TENSOR)
    tensors["bytes"] = np.where(on_device, trace.tensor_bytes, 0)
    tensors["resident"] = trace.persistent & on_device
    tensors["interval"] = tensors["used_at"] = -1
    length_s = np.diff(np.append(clock.start_s, clock.step_s))
    _sweep(
        trace.access_start,
        trace.access_tensor,
        gaps.after_access,
        intervals,
        versions,
        tensors,
        prices,
        clock.start_s,
        clock.step_s,
        length_s,
        np.array(use.shares),
        capacity_bytes,
    )
    start_s = np.cumsum(length_s) - length_s
    return Reservations(
        intervals["needed_by"].copy(),
        intervals["returns"].copy(),
        versions["begin"].copy(),
        versions["end"].copy(),
        intervals["late"].copy(),
        intervals["no_time"].copy(),
        PhaseClock(start_s, float(length_s.sum())),
    )


def _alike(
    prices: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Prices that are nearly the same count as one: few of them, and which each is."""
    steps = np.round(np.log(np.maximum(prices, 1e-18)) / _SAME_PRICE)
    found, number = np.unique(steps, return_inverse=True)
    return np.exp(found * _SAME_PRICE), number


_NOBODY = -1

_INTERVAL = np.dtype(
    [
        ("made", "i8"),
        ("ready", "i8"),
        ("back", "i8"),
        ("version", "i8"),
        ("out_s", "f8"),
        ("in_s", "f8"),
        ("price", "i8"),  # index of the sorted prices
        ("clean_price", "i8"),  # with a copy on the host
        ("is_dead", "?"),
        ("allowed", "?"),
        ("first", "?"),
        ("needed_by", "i8"),  # the result
        ("late", "?"),  # phases are held up for it
        ("no_time", "?"),
        ("base", "i8"),  # step in which it was chosen: its first phase
        ("short", "?"),  # not all of the way in is reserved
        ("returns", "i8"),  # phase from which on the way back takes memory, from `base` on
        ("held", "i8"),  # its reservations of the way in
    ],
    align=True,
)

_VERSION = np.dtype(
    [
        ("users", "i8"),  # chosen intervals that its copy serves
        ("begin", "i8"),  # phases from `made` until it begins to be copied
        ("end", "i8"),  # phases from `made` until the copy is there
        ("held", "i8"),  # its reservations
        ("short", "?"),  # not all of its time is reserved
    ],
    align=True,
)

_TENSOR = np.dtype(
    [
        ("bytes", "i8"),
        ("resident", "?"),
        ("interval", "i8"),  # that it is in; -1 for none
        ("base", "i8"),  # first phase of the step that the interval began in
        ("used_at", "i8"),  # phase of the last use, over all steps
    ],
    align=True,
)


# ---- time on the link ----
#
# `free_s` is float64[2, P]: seconds that a direction has left in each phase; `sums` holds its sums
# as Fenwick trees; `taken_s` is what is reserved. These, the lengths of phases, the shares of the
# link and the clock are the `link`. Reservations are entries (phase, seconds, next) of a
# pool, chained.


@compiled_in_place
def _set_free(free_s, sums, taken_s, length_s, shares, phase):
    """Count what is left of a phase, after `taken_s` or its length has changed."""
    for way in range(2):
        left = length_s[phase] - taken_s[way, phase]
        both = length_s[phase] - shares[0] * taken_s[0, phase] - shares[1] * taken_s[1, phase]
        if shares[0] + shares[1] > 1.0:
            left = min(left, both / shares[way])
        left = max(left, 0.0)
        change = left - free_s[way, phase]
        free_s[way, phase] = left
        node = phase + 1
        while node < sums.shape[1]:
            sums[way, node] += change
            node += node & -node


@compiled_in_place
def _sum_below(sums, way, phase):
    """Seconds left in the phases before this one."""
    total = 0.0
    node = phase
    while node > 0:
        total += sums[way, node]
        node -= node & -node
    return total


@compiled_in_place
def _last_below(sums, way, target, or_equal):
    """The last phase whose sum of all before it is below the target, or equals it."""
    size = sums.shape[1]
    top = 1
    while 2 * top < size:
        top *= 2
    node = 0
    before = 0.0
    while top > 0:
        following = node + top
        if following < size:
            total = before + sums[way, following]
            if total < target or (or_equal and total == target):
                node = following
                before = total
        top //= 2
    return node


@compiled_in_place
def _left_between(sums, way, low, high, phases):
    """Seconds left in phases [low, high) over all steps, at most a step of them."""
    if high <= low:
        return 0.0
    low = max(low, high - phases)
    begin, end = low % phases, high % phases
    total = _sum_below(sums, way, end) - _sum_below(sums, way, begin)
    if end <= begin:
        total += _sum_below(sums, way, phases)
    return max(total, 0.0)


@compiled
def _take(link, pool, way, amount_s, low, high, forward):
    """Reserve seconds in phases [low, high), from one end on; the chain, and the last phase taken.

    What the phases lack is left out; the last value tells how much.
    """
    free_s, sums, taken_s, length_s, shares, _, _ = link
    phases = free_s.shape[1]
    chain = -1
    low = max(low, high - phases)
    at = low if forward else high - 1
    reached = low - 1 if forward else high
    while amount_s > _NOTHING_S and low <= at < high:
        phase = at % phases
        if free_s[way, phase] <= _NOTHING_S:
            at = _next_free(free_s, sums, way, at, forward)
            continue
        seconds = min(amount_s, free_s[way, phase])
        taken_s[way, phase] += seconds
        _set_free(free_s, sums, taken_s, length_s, shares, phase)
        pool.append((np.int64(phase), seconds, np.int64(chain)))
        chain = len(pool) - 1
        amount_s -= seconds
        reached = at
        at = at + 1 if forward else at - 1
    return chain, reached, max(amount_s, 0.0)


@compiled_in_place
def _next_free(free_s, sums, way, at, forward):
    """The next phase over all steps that has time left; one of the next step if none has."""
    phases = free_s.shape[1]
    phase = at % phases
    if forward:
        target = _sum_below(sums, way, phase + 1) + _NOTHING_S
    else:
        target = _sum_below(sums, way, phase) - _NOTHING_S
        if target <= 0.0:
            return at - phase - 1
    node = _last_below(sums, way, target, forward)
    if forward:
        return at - phase + (node if node > phase else phase + 1)
    return at - phase + (node if node < phase else phase - 1)


@compiled
def _give_back(link, pool, way, chain):
    """End reservations."""
    free_s, sums, taken_s, length_s, shares, _, _ = link
    while chain >= 0:
        phase, seconds, following = pool[chain]
        taken_s[way, phase] = max(taken_s[way, phase] - seconds, 0.0)
        _set_free(free_s, sums, taken_s, length_s, shares, phase)
        chain = following


@compiled_in_place
def _lengthen(link, phase, seconds):
    """Hold up the phase behind this one."""
    free_s, sums, taken_s, length_s, shares, _, _ = link
    length_s[phase] += seconds
    _set_free(free_s, sums, taken_s, length_s, shares, phase)


# ---- choices ----


@compiled
def _sweep(
    access_start,
    access_tensor,
    after_access,
    intervals,
    versions,
    tensors,
    prices,
    time_s,
    step_s,
    length_s,
    shares,
    capacity_bytes,
):
    """Sweep some steps; the result is in the intervals, and in the lengths of phases.

    `ready` has a heap for each price, of (minus the time of the next use, tensor, interval);
    `later` is a heap of (phase, tensor, interval), of those for which the link has no time before
    that phase, and `returns` one of those that are away, by the phase of their return.
    """
    phases = len(access_start) - 1
    link = (
        np.zeros((2, phases)),
        np.zeros((2, phases + 1)),
        np.zeros((2, phases)),
        length_s,
        shares,
        time_s,
        step_s,
    )
    for phase in range(phases):
        _set_free(link[0], link[1], link[2], length_s, shares, phase)
    pool = [(np.int64(0), 0.0, np.int64(-1))]
    used = np.zeros(1, np.int64)
    for tensor in range(len(tensors)):
        if tensors[tensor].resident:
            used[0] += tensors[tensor].bytes
    ready = [[(0.0, np.int64(0), np.int64(0))] for _ in range(len(prices))]
    for heap in ready:
        heap.pop()
    returns = [(np.int64(0), np.int64(0), np.int64(0))]
    returns.pop()
    later = returns.copy()
    for now in range(_STEPS * phases):
        phase = now % phases
        while len(returns) > 0 and returns[0][0] <= now:
            _, tensor, gap = heapq.heappop(returns)
            if tensors[tensor].interval == gap:
                _set_resident(tensors, used, tensor, True)
        first, last = access_start[phase], access_start[phase + 1]
        for access in range(first, last):
            tensor = access_tensor[access]
            gap = tensors[tensor].interval
            if gap >= 0 and intervals[gap].base != tensors[tensor].base:
                _forget(link, pool, intervals, versions, gap)
            tensors[tensor].used_at = now
            _set_resident(tensors, used, tensor, True)
        now_s = time_s[phase] + step_s * (now // phases)
        if used[0] > capacity_bytes:
            _make_room(
                link, pool, intervals, versions, tensors, used, ready, later, returns, prices,
                now, now_s, now >= phases, capacity_bytes,
            )  # fmt: skip
        for access in range(first, last):
            tensor, gap = access_tensor[access], after_access[access]
            tensors[tensor].interval = gap
            tensors[tensor].base = now - phase
            if gap < 0 or intervals[gap].is_dead:
                _set_resident(tensors, used, tensor, False)
            elif intervals[gap].allowed:
                _compete(link, intervals, versions, tensors, ready, tensor, gap)


@compiled_in_place
def _set_resident(tensors, used, tensor, resident):
    if tensors[tensor].resident != resident:
        tensors[tensor].resident = resident
        used[0] += tensors[tensor].bytes if resident else -tensors[tensor].bytes


@compiled
def _forget(link, pool, intervals, versions, gap):
    """End the choice of an interval, and its reservations."""
    if intervals[gap].needed_by == NOT_NEEDED:
        return
    intervals[gap].needed_by = NOT_NEEDED
    _give_back(link, pool, IN, intervals[gap].held)
    intervals[gap].held = _NOBODY
    version = intervals[gap].version
    versions[version].users -= 1
    if versions[version].users == 0:
        _give_back(link, pool, OUT, versions[version].held)
        versions[version].held = _NOBODY


@compiled
def _make_room(
    link,
    pool,
    intervals,
    versions,
    tensors,
    used,
    ready,
    later,
    returns,
    prices,
    now,
    now_s,
    may_hold_up,
    capacity_bytes,
):
    """Let tensors go until what is resident fits."""
    while len(later) > 0 and later[0][0] <= now:
        _, tensor, gap = heapq.heappop(later)
        if _is_idle(intervals, tensors, tensor, gap, now):
            _compete(link, intervals, versions, tensors, ready, tensor, gap)
    while used[0] > capacity_bytes:
        best = -1
        best_worth = 0.0
        for price in range(len(prices)):
            heap = ready[price]
            while len(heap) > 0:
                key, tensor, gap = heap[0]
                if _is_idle(intervals, tensors, tensor, gap, now):
                    again = _in_time(link, pool, intervals, versions, tensors, tensor, gap, now)
                    if again == now:
                        worth = (-key - now_s) / prices[price]
                        if best < 0 or worth > best_worth:
                            best = price
                            best_worth = worth
                        break
                    intervals[gap].no_time = True
                    heapq.heappush(later, (again, np.int64(tensor), np.int64(gap)))
                heapq.heappop(heap)
        if best >= 0:
            _, tensor, gap = heapq.heappop(ready[best])
        else:
            tensor, gap = _most_worth(link, intervals, versions, tensors, later, prices, now, now_s)
            if tensor < 0:
                break
        _choose(link, pool, intervals, versions, tensors, tensor, gap, now, may_hold_up)
        _set_resident(tensors, used, tensor, False)
        back = tensors[tensor].base + intervals[gap].returns
        heapq.heappush(returns, (back, np.int64(tensor), np.int64(gap)))


@compiled_in_place
def _is_idle(intervals, tensors, tensor, gap, now):
    """Whether a tensor is in an interval, on the device, and not due."""
    return (
        tensors[tensor].resident
        and tensors[tensor].interval == gap
        and tensors[tensor].used_at < now
        and tensors[tensor].base + intervals[gap].back > now
    )


@compiled_in_place
def _until_s(link, intervals, tensors, tensor, gap):
    """Time of the next use; far off where the policy evicts the tensor before others."""
    time_s, step_s = link[5], link[6]
    phases = len(time_s)
    back = tensors[tensor].base + intervals[gap].back
    until_s = time_s[back % phases] + step_s * (back // phases)
    return until_s + _FIRST_S if intervals[gap].first else until_s


@compiled_in_place
def _price_of(intervals, versions, gap):
    """Index of the price of an interval."""
    own = intervals[gap].needed_by != NOT_NEEDED
    has_copy = intervals[gap].out_s == 0.0 or versions[intervals[gap].version].users > own
    return intervals[gap].clean_price if has_copy else intervals[gap].price


@compiled
def _compete(link, intervals, versions, tensors, ready, tensor, gap):
    """Let a tensor compete for leaving."""
    key = -_until_s(link, intervals, tensors, tensor, gap)
    price = _price_of(intervals, versions, gap)
    heapq.heappush(ready[price], (key, np.int64(tensor), np.int64(gap)))


@compiled
def _most_worth(link, intervals, versions, tensors, later, prices, now, now_s):
    """The tensor whose absence helps longest, of those for which the link has no time; or -1."""
    best_tensor, best_gap = np.int64(-1), np.int64(-1)
    best_worth = 0.0
    kept = 0
    for i in range(len(later)):
        _, tensor, gap = later[i]
        if not _is_idle(intervals, tensors, tensor, gap, now):
            continue
        later[kept] = later[i]
        kept += 1
        until_s = _until_s(link, intervals, tensors, tensor, gap)
        worth = (until_s - now_s) / prices[_price_of(intervals, versions, gap)]
        if best_tensor < 0 or worth > best_worth:
            best_tensor, best_gap = tensor, gap
            best_worth = worth
    while len(later) > kept:
        later.pop()
    heapq.heapify(later)
    return best_tensor, best_gap


@compiled
def _in_time(link, pool, intervals, versions, tensors, tensor, gap, now):
    """`now` if the link has time for an interval whose memory is needed now.

    Otherwise the first phase at which to ask again: that by which the contents can have left, or
    never where they could not return. What the interval has reserved in the step before counts as
    free.
    """
    phases = link[0].shape[1]
    base = tensors[tensor].base
    is_chosen = intervals[gap].needed_by != NOT_NEEDED
    if is_chosen and _holds(intervals, versions, gap, now - base):
        return np.int64(now)
    due = base + intervals[gap].back
    left_s = _left_between(link[1], IN, now, due, phases)
    if is_chosen:
        left_s += _reserved_until(pool, intervals[gap].held, now, due, phases)
    if left_s < intervals[gap].in_s - _NOTHING_S:
        return np.int64(_NEVER)
    lacks_s = _lacks_out(link, pool, intervals, versions, base, gap, now, is_chosen)
    if lacks_s <= _NOTHING_S:
        return np.int64(now)
    return np.int64(max(_passed(link[1], OUT, now, lacks_s, phases), now + 1))


@compiled_in_place
def _passed(sums, way, now, seconds, phases):
    """First phase by which a direction has had so much time left, from `now` on."""
    phase = now % phases
    total = _sum_below(sums, way, phases)
    before = _sum_below(sums, way, phase)
    if seconds > total:
        return _NEVER
    step = now - phase
    target = before + seconds
    if target > total:
        target -= total
        step += phases
    return step + _last_below(sums, way, target, False) + 1


@compiled_in_place
def _holds(intervals, versions, gap, needed_by):
    """Whether the reservations of a chosen interval are whole, and early enough."""
    return (
        not intervals[gap].short
        and not versions[intervals[gap].version].short
        and intervals[gap].needed_by <= needed_by
    )


@compiled
def _is_there(versions, version, phases):
    """Whether the host has the contents so many phases after they were made."""
    return not versions[version].short and versions[version].end <= phases


@compiled
def _lacks_out(link, pool, intervals, versions, base, gap, now, is_chosen):
    """Seconds that the way to the host lacks for the contents to be there by now."""
    phases = link[0].shape[1]
    version = intervals[gap].version
    made = base + intervals[gap].made
    if intervals[gap].out_s == 0.0:
        return 0.0
    if versions[version].users > is_chosen and _is_there(versions, version, now - made):
        return 0.0
    ready = base + intervals[gap].ready
    left_s = _left_between(link[1], OUT, ready, now, phases)
    if versions[version].users > 0:
        left_s += _reserved_until(pool, versions[version].held, ready, now, phases)
    return intervals[gap].out_s - left_s


@compiled
def _choose(link, pool, intervals, versions, tensors, tensor, gap, now, may_hold_up):
    """Spend an interval on the host; where the link has no time for it, hold up phases."""
    phases = link[0].shape[1]
    base = tensors[tensor].base
    due = base + intervals[gap].back
    intervals[gap].base = base
    is_chosen = intervals[gap].needed_by != NOT_NEEDED
    if is_chosen and _holds(intervals, versions, gap, now - base):
        intervals[gap].needed_by = now - base  # its reservations hold
        return
    _forget(link, pool, intervals, versions, gap)
    version = intervals[gap].version
    made = base + intervals[gap].made
    intervals[gap].late = False
    is_there = versions[version].users > 0 and _is_there(versions, version, now - made)
    if intervals[gap].out_s > 0.0 and not is_there:
        _give_back(link, pool, OUT, versions[version].held)
        ready = base + intervals[gap].ready
        lacks_s = intervals[gap].out_s - _left_between(link[1], OUT, ready, now, phases)
        if lacks_s > _NOTHING_S and may_hold_up:
            _lengthen(link, (now - 1) % phases, lacks_s)
            intervals[gap].late = True
            ready = min(ready, now - 1)  # the time is added behind that phase
        chain, reached, missing_s = _take(link, pool, OUT, intervals[gap].out_s, ready, now, True)
        versions[version].held = chain
        versions[version].begin = _earliest(pool, chain, made, phases)
        versions[version].end = max(reached + 1 - made, 0)
        versions[version].short = missing_s > _MISSING_S
    versions[version].users += 1
    lacks_s = intervals[gap].in_s - _left_between(link[1], IN, now, due, phases)
    if lacks_s > _NOTHING_S and may_hold_up:
        _lengthen(link, (due - 1) % phases, lacks_s)
        intervals[gap].late = True
    chain, reached, missing_s = _take(link, pool, IN, intervals[gap].in_s, now, due, False)
    intervals[gap].held = chain
    intervals[gap].short = missing_s > _MISSING_S
    intervals[gap].returns = max(reached, now) - base
    intervals[gap].needed_by = now - base


@compiled
def _earliest(pool, chain, made, phases):
    """The first phase of a chain, seen from the phase `made`."""
    found = phases
    while chain >= 0:
        phase, _, following = pool[chain]
        found = min(found, (phase - made) % phases)
        chain = following
    return found


@compiled
def _reserved_until(pool, chain, low, high, phases):
    """Seconds of a chain that lie in phases [low, high) over all steps."""
    inside_s = 0.0
    while chain >= 0:
        phase, seconds, following = pool[chain]
        if (phase - low) % phases < high - low:
            inside_s += seconds
        chain = following
    return inside_s
