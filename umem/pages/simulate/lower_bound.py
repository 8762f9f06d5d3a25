"""A lower bound: compute, the traffic that no placement avoids, and when it has to happen."""

from __future__ import annotations

import heapq
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from umem.core.compiled import compiled
from umem.hardware import Hardware
from umem.trace import NO_GAP, Access, Trace, find_gaps, require_durations

__all__ = ["FastestMoves", "fastest_moves", "lower_bound_s", "unavoidable_bytes"]

_STEPS = 8
"""Steps that the traffic of a step is averaged over. A bound from more steps is never lower, since
idle intervals that cross the first and the last step's edge count in fewer of them."""

_MOMENTS = 256
"""Moments between which windows of time are looked at."""


class FastestMoves(NamedTuple):
    """How fast a machine moves bytes at most, whatever ways it mixes."""

    limits: tuple[tuple[float, float], ...]
    """Of bytes to the device and bytes to the host, each times the first and the second number of
    any row, the sum is at most the time that they take, seconds."""
    link_bytes_per_s: float
    """Both ways together."""
    slowdown_s_per_byte: float
    """The least by which a byte slows a kernel beside it."""

    def least_s(self, in_bytes: Any, out_bytes: Any) -> Any:
        """Least time for bytes to the device and to the host; numbers or arrays."""
        times = [inward * in_bytes + outward * out_bytes for inward, outward in self.limits]
        return np.max(times, axis=0)


def fastest_moves(hardware: Hardware) -> FastestMoves:
    """The fastest mixtures of pages, copies and use in place.

    At each moment a direction is idle or moves in one of these ways; where both together are faster
    than the link, both slow in proportion. Rates over a time lie in the hull of these.
    """
    inward = (
        hardware.to_device_bytes_per_s,
        hardware.copy_to_device_bytes_per_s,
        hardware.mapped_read_bytes_per_s,
    )
    outward = (
        hardware.to_host_bytes_per_s,
        hardware.copy_to_host_bytes_per_s,
        hardware.mapped_write_bytes_per_s,
    )
    # Of a way beside itself; two different ways share the link as pages do.
    both = (hardware.link_bytes_per_s, hardware.copy_link_bytes_per_s, hardware.mapped_bytes_per_s)
    rates = [(0.0, max(outward)), (max(inward), 0.0)]
    for (i, in_rate), (j, out_rate) in product(enumerate(inward), enumerate(outward)):
        share = min(1.0, (both[i] if i == j else both[0]) / (in_rate + out_rate))
        rates.append((in_rate * share, out_rate * share))
    return FastestMoves(
        _limits(rates),
        max(in_rate + out_rate for in_rate, out_rate in rates),
        min(
            hardware.page_slowdown_s_per_byte,
            hardware.copy_slowdown_s_per_byte,
            hardware.mapped_slowdown_s_per_byte,
        ),
    )


def _limits(rates: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Edges of the hull of rates, but for the axes: rows (a, b) with a x + b y <= 1 for each."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(set(rates), key=lambda rate: (rate[0], -rate[1])):
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (x1 - x0) * (y - y0) < (y1 - y0) * (x - x0):
                break
            corners.pop()
        corners.append((x, y))
    found = []
    for (x0, y0), (x1, y1) in pairwise(corners):
        area = x1 * y0 - x0 * y1
        found.append(((y0 - y1) / area, (x1 - x0) / area))
    return tuple(found)


def lower_bound_s(trace: Trace, hardware: Hardware, capacity_bytes: int) -> float:
    """Time that no schedule can beat, found quickly.

    The most of: compute; unavoidable traffic over the link's bandwidth; compute, and what that
    traffic slows it beside; and compute, and the time by which stretches of the step are too short
    for what has to cross the link in them.

    Parameters
    ----------
    trace
        With durations.
    hardware
        The machine; of its ways to move bytes the fastest mixture counts.
    capacity_bytes
        Device memory for tensors.

    Returns
    -------
    float
        Seconds per step.
    """
    compute_s = float(require_durations(trace).sum())
    moves = fastest_moves(hardware)
    in_bytes, out_bytes = unavoidable_bytes(trace, capacity_bytes)
    both_bytes = in_bytes + out_bytes
    # A byte slows the kernel beside it, or moves while no kernel runs.
    slowed_s = min(moves.slowdown_s_per_byte, 1 / moves.link_bytes_per_s) * both_bytes
    return max(
        compute_s + max(slowed_s, _held_up_s(trace, moves, capacity_bytes)),
        float(moves.least_s(in_bytes, out_bytes)),
    )


def _held_up_s(trace: Trace, moves: FastestMoves, capacity_bytes: int) -> float:
    """Time by which stretches of the step that do not overlap are too short for their traffic.

    Of contents that wait at a stretch's end, those made in it have to be written to the host within
    it, but for what fits on the device. Of contents that wait at its begin, those used in it have
    to come in within it, but for what was on the device.
    """
    count = min(_MOMENTS, trace.phase_count)
    at = np.linspace(0, trace.phase_count, count + 1).astype(np.int64)[:-1]
    starts_s = np.append(0.0, np.cumsum(require_durations(trace)))
    time_s = np.concatenate([starts_s[at], starts_s[-1] + starts_s[at], [2 * starts_s[-1]]])
    out_bytes, in_bytes = _window_bytes(trace, at)
    beyond = [np.maximum(moved - float(capacity_bytes), 0.0) for moved in (out_bytes, in_bytes)]
    need_s = moves.least_s(beyond[1], beyond[0])
    over_s = need_s - (time_s[None, : 2 * count] - time_s[:count, None])
    # Stretches of at most a step.
    ahead = np.arange(2 * count)[None, :] - np.arange(count)[:, None]
    over_s[(ahead <= 0) | (ahead > count)] = 0.0
    np.maximum(over_s, 0.0, out=over_s)
    # A step that begins where the worst stretch begins, so that this one is whole.
    first = int(np.argmax(over_s.max(axis=1)))
    most_s = np.zeros(count + 1)
    for end in range(1, count + 1):
        begins = first + np.arange(end)
        ends = np.where(begins < count, first + end, first + end - count)
        with_window = most_s[:end] + over_s[begins % count, ends]
        most_s[end] = max(most_s[end - 1], float(with_window.max()))
    return float(most_s[-1])


def _window_bytes(
    trace: Trace, at: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Contents made between two moments that wait at the second; and waiting at the first and used.

    The moments are just before the phases `at` begin, int64[K]. Bytes by the first moment and the
    second, which is of the next step from column K on: float64[K, 2K] each.
    """
    count, phases = len(at), trace.phase_count
    gaps = find_gaps(trace)
    size = trace.tensor_bytes[gaps.tensor].astype(np.float64)
    moments = np.concatenate([at, at + phases])
    out_bytes, in_bytes = np.zeros((count + 1, 2 * count + 1)), np.zeros((count + 1, 2 * count + 1))
    for shift in (-phases, 0, phases):
        last_use, next_use, made = (it + shift for it in (gaps.last_use, gaps.next_use, gaps.made))
        # Moments at which the contents wait: [low, high).
        low = np.searchsorted(moments, last_use, side="right")
        high = np.searchsorted(moments, next_use, side="right")
        # Made at or after a moment of index up to `since`.
        since = np.searchsorted(at, made, side="right") - 1
        chosen = ~gaps.is_dead & (since >= 0) & (low < high)
        np.add.at(out_bytes, (since[chosen], low[chosen]), size[chosen])
        np.add.at(out_bytes, (since[chosen], high[chosen]), -size[chosen])
        first, last = np.minimum(low, count), np.minimum(high, count)
        chosen = ~gaps.is_dead & (first < last)
        np.add.at(in_bytes, (first[chosen], high[chosen]), size[chosen])
        np.add.at(in_bytes, (last[chosen], high[chosen]), -size[chosen])
    out_bytes = np.cumsum(np.cumsum(out_bytes, axis=1)[::-1], axis=0)[::-1]
    in_bytes = np.cumsum(np.cumsum(in_bytes, axis=0), axis=1)
    return out_bytes[:count, : 2 * count], in_bytes[:count, : 2 * count]


@lru_cache(maxsize=1)
def unavoidable_bytes(trace: Trace, capacity_bytes: int) -> tuple[float, float]:
    """Bytes per step that have to cross the link, to the device and to the host.

    Contents that wait for a next use are on the device or cross the link before it. Between two
    phases at most `capacity_bytes` of them are on the device. Of intervals that overlap too much,
    leaving out the one that ends last keeps the most bytes (Belady's rule, and the optimum for
    intervals on a line), so what is left out then is a lower bound for every schedule, one with
    mapped access included. To the host, only contents that were just written have to go.

    The last result is kept, for a plan and its report ask for the same.

    Returns
    -------
    tuple of float
        To the device, to the host; 0 where everything fits.
    """
    gaps = find_gaps(trace)
    alive = ~gaps.is_dead
    written = np.zeros(len(gaps.tensor), np.bool_)
    has_gap = gaps.after_access >= 0
    written[gaps.after_access[has_gap]] = (trace.access_mode[has_gap] & Access.WRITE) > 0
    in_bytes, out_bytes = (
        _dropped_bytes(
            trace.access_start,
            # NO_GAP finds what was appended.
            np.where(np.append(counts, False)[gaps.after_access], gaps.after_access, NO_GAP),
            trace.access_tensor,
            gaps.next_use,
            trace.tensor_bytes,
            capacity_bytes,
            _STEPS,
        )
        / _STEPS
        for counts in (alive, alive & written)
    )
    return in_bytes, out_bytes


@compiled
def _dropped_bytes(
    access_start, after_access, access_tensor, next_use, tensor_bytes, capacity, steps
):
    phases = len(access_start) - 1
    horizon = steps * phases
    kept = np.zeros(len(tensor_bytes), np.int64)
    ends = [(np.int64(0), np.int64(0))]
    ends.pop()
    used = 0
    dropped = 0
    for now in range(horizon):
        phase = now % phases
        for access in range(access_start[phase], access_start[phase + 1]):
            tensor = access_tensor[access]
            used -= kept[tensor]
            kept[tensor] = 0
        for access in range(access_start[phase], access_start[phase + 1]):
            gap = after_access[access]
            if gap < 0:
                continue
            end = now - phase + next_use[gap]
            if end >= horizon:
                continue
            tensor = access_tensor[access]
            kept[tensor] = tensor_bytes[tensor]
            used += kept[tensor]
            heapq.heappush(ends, (-end, np.int64(tensor)))
        while used > capacity:
            negative_end, tensor = ends[0]
            if kept[tensor] == 0 or -negative_end <= now:
                heapq.heappop(ends)
                continue
            out = min(kept[tensor], used - capacity)
            kept[tensor] -= out
            used -= out
            dropped += out
    return dropped
