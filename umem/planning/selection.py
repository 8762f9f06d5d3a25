"""Which idle intervals a tensor spends on the host: Belady's rule, by pressure per byte moved."""

from __future__ import annotations

import heapq

import numpy as np

from umem.core.compiled import compiled

__all__ = ["NOT_NEEDED", "select"]

NOT_NEEDED = -1

_STEPS = 3
"""Steps swept; the last one's choice counts, by when what is away at the step's edge repeats."""

_FIRST = 1e9
"""Seconds by which a tensor counts as needed later that the policy sends away before others."""


@compiled
def select(
    access_start,
    access_tensor,
    after_access,
    gap_gone,
    gap_return,
    gap_dead,
    gap_price,
    gap_allowed,
    gap_first,
    tensor_bytes,
    resident_first,
    time_s,
    step_s,
    capacity_bytes,
):
    """Choose intervals to spend on the host so that what is resident fits.

    The step is swept phase by phase. Where too much is resident, the idle tensor goes whose absence
    relieves the longest time for each byte moved: with equal prices, the one needed last. Tensors
    that can have left by then go first; others free their memory late.

    Parameters
    ----------
    access_start, access_tensor, after_access
        Accesses by phase, and the interval after each; -1 for none.
    gap_gone : int64[G]
        First phase in which the tensor's memory is free if it is sent away; P or more in the next
        step.
    gap_return : int64[G]
        Phase at which the tensor takes memory again: that of the next use, or earlier by the time
        of its way back.
    gap_dead : bool[G]
        Contents are dead during the interval: it costs nothing to be away.
    gap_price : float64[G]
        Link seconds that being away costs, per byte.
    gap_allowed, gap_first : bool[G]
        May be chosen; to be chosen before others.
    tensor_bytes : int64[T]
        0 for tensors that are never on the device.
    resident_first : bool[T]
        Resident when the first step begins.
    time_s : float64[P]
        Start of each phase.
    step_s : float
    capacity_bytes : int

    Returns
    -------
    int64[G]
        Phase by which the tensor's memory is needed, :data:`NOT_NEEDED` where it stays; P or more
        where that phase lies in the next step.
    """
    phases = len(access_start) - 1
    needed_by = np.full(len(gap_return), NOT_NEEDED, np.int64)
    resident = resident_first.copy()
    leaving = np.zeros(len(resident), np.bool_)
    current = np.full(len(resident), -1, np.int64)  # the interval that a tensor is in
    base = np.zeros(len(resident), np.int64)  # first phase of the step that it began in
    used_by = np.full(len(resident), -1, np.int64)
    used = 0
    pending = 0  # of what is used, bytes on their way out
    for tensor in range(len(resident)):
        if resident[tensor]:
            used += tensor_bytes[tensor]
    prices = np.unique(gap_price)
    price_of = np.searchsorted(prices, gap_price)
    # Idle tensors that can have left by now, last needed first: a heap for each price of a byte.
    ready = [[(0.0, np.int64(0), np.int64(0))] for _ in range(len(prices))]
    for heap in ready:
        heap.pop()
    # Idle tensors that cannot, events of tensors that have left late, and returns: by phase.
    later = [(np.int64(0), np.int64(0), np.int64(0))]
    later.pop()
    departures = later.copy()
    returns = later.copy()
    for now in range(_STEPS * phases):
        phase = now % phases
        now_s = time_s[phase] + step_s * (now // phases)
        if phase == 0 and now > 0:
            # A choice of the step before holds on where its interval reaches into this step. The
            # first step's do not: it began with an invented placement.
            for gap in range(len(needed_by)):
                if now == phases or gap_return[gap] <= phases:
                    needed_by[gap] = NOT_NEEDED
        while len(departures) > 0 and departures[0][0] <= now:
            _, tensor, gap = heapq.heappop(departures)
            if leaving[tensor] and current[tensor] == gap:
                leaving[tensor] = False
                resident[tensor] = False
                used -= tensor_bytes[tensor]
                pending -= tensor_bytes[tensor]
        while len(returns) > 0 and returns[0][0] <= now:
            _, tensor, gap = heapq.heappop(returns)
            if current[tensor] == gap:
                if leaving[tensor]:
                    leaving[tensor] = False
                    pending -= tensor_bytes[tensor]
                elif not resident[tensor]:
                    resident[tensor] = True
                    used += tensor_bytes[tensor]
        while len(later) > 0 and later[0][0] <= now:
            _, tensor, gap = heapq.heappop(later)
            if resident[tensor] and current[tensor] == gap and not leaving[tensor]:
                until_s = _time_at(time_s, step_s, base[tensor] + gap_return[gap])
                if gap_first[gap]:
                    until_s += _FIRST
                item = (-until_s, np.int64(tensor), np.int64(gap))
                heapq.heappush(ready[price_of[gap]], item)
        for access in range(access_start[phase], access_start[phase + 1]):
            tensor = access_tensor[access]
            used_by[tensor] = now
            if leaving[tensor]:
                leaving[tensor] = False
                pending -= tensor_bytes[tensor]
            if not resident[tensor]:
                resident[tensor] = True
                used += tensor_bytes[tensor]
        while used > capacity_bytes:
            best = -1
            best_worth = 0.0
            for k in range(len(prices)):
                heap = ready[k]
                while len(heap) > 0:
                    _, tensor, gap = heap[0]
                    if (
                        resident[tensor]
                        and not leaving[tensor]
                        and current[tensor] == gap
                        and used_by[tensor] < now
                        and base[tensor] + gap_return[gap] > now
                    ):
                        worth = (-heap[0][0] - now_s) / prices[k]
                        if best < 0 or worth > best_worth:
                            best = k
                            best_worth = worth
                        break
                    heapq.heappop(heap)
            if best < 0:
                break
            _, tensor, gap = heapq.heappop(ready[best])
            resident[tensor] = False
            used -= tensor_bytes[tensor]
            needed_by[gap] = now - base[tensor]
            back = base[tensor] + gap_return[gap]
            heapq.heappush(returns, (back, np.int64(tensor), np.int64(gap)))
        while used - pending > capacity_bytes and len(later) > 0:
            gone, tensor, gap = heapq.heappop(later)
            back = base[tensor] + gap_return[gap]
            if (
                not resident[tensor]
                or leaving[tensor]
                or current[tensor] != gap
                or used_by[tensor] == now
                or back <= gone
            ):
                continue
            leaving[tensor] = True
            pending += tensor_bytes[tensor]
            needed_by[gap] = now - base[tensor]
            heapq.heappush(departures, (gone, np.int64(tensor), np.int64(gap)))
            heapq.heappush(returns, (back, np.int64(tensor), np.int64(gap)))
        for access in range(access_start[phase], access_start[phase + 1]):
            tensor = access_tensor[access]
            gap = after_access[access]
            current[tensor] = gap
            base[tensor] = now - phase
            if gap < 0 or gap_dead[gap]:
                resident[tensor] = False
                used -= tensor_bytes[tensor]
            elif gap_allowed[gap]:
                gone = base[tensor] + gap_gone[gap]
                heapq.heappush(later, (gone, np.int64(tensor), np.int64(gap)))
    return needed_by


@compiled
def _time_at(time_s, step_s, phase):
    """Start of a phase that may lie in a later step."""
    return time_s[phase % len(time_s)] + step_s * (phase // len(time_s))
