"""Uses of tensors in a trace: by phase, first and last, and the idle intervals between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from umem.trace.model import Access, Trace

__all__ = [
    "NEVER_MADE",
    "NO_GAP",
    "Gaps",
    "find_gaps",
    "first_and_last_use",
    "live_bytes",
    "phase_of_access",
    "with_accesses",
    "written_tensors",
]


def phase_of_access(trace: Trace) -> npt.NDArray[np.int64]:
    """Phase of each access, int64[A]."""
    return np.repeat(np.arange(trace.phase_count), np.diff(trace.access_start))


def live_bytes(trace: Trace, size: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes allocated in each phase, int64[P], given those to count of each tensor, int64[T]."""
    change = np.zeros(trace.phase_count + 1, np.int64)
    np.add.at(change, trace.first_phase, size)
    np.subtract.at(change, trace.last_phase + 1, size)
    return np.cumsum(change)[:-1]


def with_accesses(
    trace: Trace,
    phase: npt.NDArray[np.int64],
    tensor: npt.NDArray[np.int32],
    mode: npt.NDArray[np.uint8],
) -> Trace:
    """Replace the accesses of a trace, given the phase, tensor and mode of each.

    They may come in any order; accesses of one phase keep theirs.
    """
    order = np.argsort(phase, kind="stable")
    return replace(
        trace,
        access_start=np.searchsorted(phase[order], np.arange(trace.phase_count + 1)),
        access_tensor=tensor[order],
        access_mode=mode[order],
    )


def first_and_last_use(trace: Trace) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and last phase that use each tensor, int64[T] each; P and -1 where none does."""
    phase = phase_of_access(trace)
    first = np.full(trace.tensor_count, trace.phase_count, np.int64)
    last = np.full(trace.tensor_count, -1, np.int64)
    np.minimum.at(first, trace.access_tensor, phase)
    np.maximum.at(last, trace.access_tensor, phase)
    return first, last


def written_tensors(trace: Trace) -> npt.NDArray[np.bool_]:
    """Tensors that a phase writes, as bool[T]."""
    written = np.zeros(trace.tensor_count, np.bool_)
    written[trace.access_tensor[(trace.access_mode & Access.WRITE) > 0]] = True
    return written


# Idle intervals, in which a tensor waits for its next use.

NO_GAP = -1

NEVER_MADE = -(2**40)
"""A phase before all steps."""


@dataclass(frozen=True, eq=False)
class Gaps:
    """Idle intervals of a step that repeats."""

    tensor: npt.NDArray[np.int32]
    last_use: npt.NDArray[np.int64]
    """Phase before the interval."""
    next_use: npt.NDArray[np.int64]
    """Phase after it; P or more where it lies in the next step."""
    is_dead: npt.NDArray[np.bool_]
    """The next use overwrites the tensor as a whole, so that its contents are dead until then."""
    made: npt.NDArray[np.int64]
    """Phase that wrote the contents last; below 0 where it lies in the step before, and
    :data:`NEVER_MADE` where no phase writes them."""
    after_access: npt.NDArray[np.int32]
    """Interval that follows each access of the trace; :data:`NO_GAP` after the last use of a tensor
    that dies."""

    def __post_init__(self) -> None:
        for column in vars(self).values():
            column.flags.writeable = False


@lru_cache(maxsize=1)
def find_gaps(trace: Trace) -> Gaps:
    """Find the idle intervals of all tensors of a trace, by tensor and time, in O(A log A).

    The last trace's are kept, for a planner that looks at it many times.
    """
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
        made=_last_writes(trace, phase, order, is_first, is_last)[has_gap],
        after_access=after_access,
    )


def _last_writes(
    trace: Trace,
    phase: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
    is_first: npt.NDArray[np.bool_],
    is_last: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Phase of the last write up to each access, in the order of tensors and time, int64[A]."""
    index = np.arange(len(order))
    writes = (trace.access_mode[order] & Access.WRITE) > 0
    latest = np.maximum.accumulate(np.where(writes, index, -1))
    number = np.cumsum(is_first) - 1  # of the access's tensor, among those that are used
    first, last = np.flatnonzero(is_first)[number], np.flatnonzero(is_last)[number]
    in_step = latest >= first
    before = latest[last]  # the tensor's last write, which is of the step before
    lives_on = trace.persistent[trace.access_tensor[order]] & (before >= first)
    wrapped = np.where(lives_on, phase[before] - trace.phase_count, NEVER_MADE)
    return np.where(in_step, phase[latest], wrapped)
