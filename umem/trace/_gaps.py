"""Idle intervals: when each tensor's contents wait for their next use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umem.trace._model import Access, Trace
from umem.trace._uses import phase_of_access

__all__ = ["NO_GAP", "Gaps", "find_gaps"]

NO_GAP = -1


@dataclass(frozen=True, eq=False)
class Gaps:
    """Idle intervals of a step that repeats; G of them, A accesses.

    Parameters
    ----------
    tensor : int32[G]
    last_use : int64[G]
        Phase before the interval.
    next_use : int64[G]
        Phase after it; P or more where it lies in the next step.
    is_dead : bool[G]
        The next use overwrites the tensor as a whole, so that its contents are dead meanwhile.
    after_access : int32[A]
        Interval that follows each access of the trace; :data:`NO_GAP` after the last use of a
        tensor that dies.
    """

    tensor: npt.NDArray[np.int32]
    last_use: npt.NDArray[np.int64]
    next_use: npt.NDArray[np.int64]
    is_dead: npt.NDArray[np.bool_]
    after_access: npt.NDArray[np.int32]


def find_gaps(trace: Trace) -> Gaps:
    """Idle intervals of all tensors of a trace, by tensor and time; O(A log A)."""
    phases = phase_of_access(trace)
    order = np.lexsort((phases, trace.access_tensor))
    tensor = trace.access_tensor[order]
    phase = phases[order]
    overwrites = (trace.access_mode[order] & Access.READ) == 0
    is_last = np.append(tensor[1:] != tensor[:-1], True)[: len(tensor)]
    is_first = np.append(True, tensor[1:] != tensor[:-1])[: len(tensor)]
    first_of = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    following = np.where(is_last, first_of, np.arange(1, len(tensor) + 1))
    has_gap = ~is_last | trace.persistent[tensor]
    after_access = np.full(len(tensor), NO_GAP, np.int32)
    after_access[order[has_gap]] = np.arange(has_gap.sum(), dtype=np.int32)
    return Gaps(
        tensor=tensor[has_gap],
        last_use=phase[has_gap],
        next_use=(phase[following] + np.where(is_last, trace.phase_count, 0))[has_gap],
        is_dead=overwrites[following][has_gap],
        after_access=after_access,
    )
