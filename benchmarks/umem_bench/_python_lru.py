"""Demand paging in plain Python: what a simulator costs that is written in an afternoon."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import numpy as np

from umem.core.errors import PlanError
from umem.trace import Trace, ranges

__all__ = ["PythonLru"]


class PythonLru:
    """Least recently used tensors, or pieces of them, leave the device; only bytes are counted.

    There is no link, no time and no hint in it. What is not persistent comes to the device for
    nothing when it is first used, and is gone after its last phase.

    Parameters
    ----------
    trace
        The workload.
    capacity_bytes
        Device memory.
    unit_bytes
        Pieces that tensors are moved in; None for whole tensors.
    """

    def __init__(self, trace: Trace, capacity_bytes: int, unit_bytes: int | None) -> None:
        sizes = trace.tensor_bytes
        counts = np.ones_like(sizes) if unit_bytes is None else -(-sizes // unit_bytes)
        bounds = ranges(counts)
        if unit_bytes is None:
            unit_sizes = sizes
        else:
            unit_sizes = np.full(bounds[-1], unit_bytes, np.int64)
            unit_sizes[bounds[1:] - 1] = sizes - (counts - 1) * unit_bytes
        # Lists: reading one number from an array takes Python several times as long.
        self._sizes: list[int] = unit_sizes.tolist()
        self._units = [range(first, end) for first, end in pairwise(bounds.tolist())]
        self._phases = [
            part.tolist() for part in np.split(trace.access_tensor, trace.access_start[1:-1])
        ]
        self._deaths: list[list[int]] = [[] for _ in self._phases]
        for tensor in np.flatnonzero(~trace.persistent).tolist():
            self._deaths[trace.last_phase[tensor]].append(tensor)
        self._capacity_bytes = capacity_bytes
        self._resident: OrderedDict[int, None] = OrderedDict()
        self._away = {
            unit for tensor in np.flatnonzero(trace.persistent) for unit in self._units[tensor]
        }
        self._used_bytes = 0

    @property
    def unit_count(self) -> int:
        """Pieces of all tensors."""
        return len(self._sizes)

    def step(self) -> int:
        """Run the step once more; bytes that came to the device.

        Raises
        ------
        PlanError
            If a phase does not fit.
        """
        sizes, units, resident, away = self._sizes, self._units, self._resident, self._away
        moved_bytes = 0
        for phase, tensors in enumerate(self._phases):
            used = [unit for tensor in tensors for unit in units[tensor]]
            missing = []
            # First what is there, so that it is not the oldest when the rest comes.
            for unit in used:
                if unit in resident:
                    resident.move_to_end(unit)
                else:
                    missing.append(unit)
            for unit in missing:
                self._used_bytes += sizes[unit]
                if unit in away:
                    away.remove(unit)
                    moved_bytes += sizes[unit]
                resident[unit] = None
            while self._used_bytes > self._capacity_bytes:
                oldest, _ = resident.popitem(last=False)
                self._used_bytes -= sizes[oldest]
                away.add(oldest)
                if len(resident) < len(used):
                    raise PlanError(f"phase {phase} does not fit {self._capacity_bytes} bytes")
            for tensor in self._deaths[phase]:
                for unit in units[tensor]:
                    if unit in resident:
                        del resident[unit]
                        self._used_bytes -= sizes[unit]
                    else:
                        away.discard(unit)
        return moved_bytes
