"""What no schedule can beat: compute, and the traffic that no placement avoids."""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np

from umem.core.compiled import compiled
from umem.hardware import Hardware
from umem.trace import NO_GAP, Access, Trace, find_gaps, require_durations

__all__ = ["lower_bound_s", "unavoidable_bytes"]

_STEPS = 8
"""Steps that the bound looks at together. A bound from more steps is never lower, since idle
intervals that cross the first and the last step's edge count in fewer of them."""


def lower_bound_s(trace: Trace, hardware: Hardware, capacity_bytes: int) -> float:
    """Time that no schedule can beat: max(compute, unavoidable traffic / link bandwidth).

    Parameters
    ----------
    trace
        With durations.
    hardware
        The machine; of its ways to move bytes the fastest counts.
    capacity_bytes
        Device memory for tensors.

    Returns
    -------
    float
        Seconds per step.
    """
    compute_s = float(require_durations(trace).sum())
    in_bytes, out_bytes = unavoidable_bytes(trace, capacity_bytes)
    in_rate = max(
        hardware.to_device_bytes_per_s,
        hardware.copy_to_device_bytes_per_s,
        hardware.mapped_read_bytes_per_s,
    )
    out_rate = max(
        hardware.to_host_bytes_per_s,
        hardware.copy_to_host_bytes_per_s,
        hardware.mapped_write_bytes_per_s,
    )
    both_rate = max(hardware.link_bytes_per_s, hardware.mapped_bytes_per_s)
    return max(
        compute_s, in_bytes / in_rate, out_bytes / out_rate, (in_bytes + out_bytes) / both_rate
    )


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
