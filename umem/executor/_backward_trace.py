"""A recorded step as it goes where the optimizer's parts are done in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from umem.classes import TensorClass
from umem.recorder import OPTIMIZER, FollowedPhase
from umem.trace import Access, Trace, first_and_last_use, phase_of_access, ranges

__all__ = ["with_parts_in_backward"]

_Numbers = npt.NDArray[np.int64]


def with_parts_in_backward(
    trace: Trace, followed: Sequence[FollowedPhase], order: Sequence[str]
) -> tuple[Trace, tuple[FollowedPhase, ...]]:
    """Move the parts of the optimizer's step to where the last of their gradients is made.

    The gradients that a part has read are gone after it.

    Parameters
    ----------
    trace
        Recorded with the optimizer's parts as its last phases.
    followed
        What a follower tells of such a step; the optimizer's label is the last one.
    order
        Names of the parts in the order in which their gradients were complete; others stay.

    Returns
    -------
    Trace
        The same tensors, by the same numbers, and the same phases in another order.
    tuple of FollowedPhase
        The same labels, with the numbers of those phases.
    """
    count = trace.phase_count
    begin = next(phase for phase, label in enumerate(trace.phase_names) if _is_part(label))
    rank = {f"{OPTIMIZER} {name}".rstrip(): number for number, name in enumerate(order)}
    complete = _gradients_complete(trace, begin)
    moved = {part: it for part, it in complete.items() if trace.phase_names[part] in rank}
    if not moved:
        return trace, tuple(followed)

    def place(phase: int) -> tuple[int, int]:
        """A part comes right behind the phase that completes its gradients."""
        if phase in moved:
            return moved[phase], rank[trace.phase_names[phase]]
        return phase, -1

    phases = np.array(sorted(range(count), key=place), np.int64)
    number = np.argsort(phases)
    accesses = [slice(*trace.access_start[phase : phase + 2]) for phase in phases]
    reordered = replace(
        trace,
        phase_names=tuple(trace.phase_names[phase] for phase in phases),
        phase_kind=trace.phase_kind[phases],
        phase_precision=trace.phase_precision[phases],
        flops=trace.flops[phases],
        memory_bytes=trace.memory_bytes[phases],
        duration_s=None if trace.duration_s is None else trace.duration_s[phases],
        access_start=ranges(np.diff(trace.access_start)[phases]),
        access_tensor=np.concatenate([trace.access_tensor[part] for part in accesses]),
        access_mode=np.concatenate([trace.access_mode[part] for part in accesses]),
    )
    first, last = _lives(trace, reordered, number, begin, list(moved))
    result = replace(
        reordered,
        first_phase=first.astype(np.int32),
        last_phase=last.astype(np.int32),
        tensor_bytes=_without_whole_temporaries(trace, begin),
    )
    renumbered = [replace(one, phase=int(number[one.phase])) for one in followed[:-1]]
    # The step that the program calls begins what is left of the parts, if anything is.
    left = [int(number[part]) for part in range(begin, count) if part not in moved]
    return result, (*renumbered, replace(followed[-1], phase=min(left, default=count - 1)))


def _is_part(label: str) -> bool:
    return label.split(" ", 1)[0] == OPTIMIZER


def _gradients_complete(trace: Trace, begin: int) -> dict[int, int]:
    """The last phase before the optimizer's that writes a gradient of each part.

    Parts whose gradients are not all made in the step are left out.
    """
    phase = phase_of_access(trace)
    is_made = (phase < begin) & ((trace.access_mode & Access.WRITE) > 0)
    made_at = np.full(trace.tensor_count, -1, np.int64)
    np.maximum.at(made_at, trace.access_tensor[is_made], phase[is_made])
    made_at[trace.persistent] = -1  # kept from step to step
    found = {}
    for part in range(begin, trace.phase_count):
        used = trace.access_tensor[phase == part]
        gradients = used[trace.tensor_class[used] == TensorClass.GRADIENTS.number]
        if gradients.size and made_at[gradients].min() >= 0:
            found[part] = int(made_at[gradients].max())
    return found


def _lives(
    trace: Trace, reordered: Trace, number: _Numbers, begin: int, moved: Sequence[int]
) -> tuple[_Numbers, _Numbers]:
    """First and last phase of each tensor in the new order."""
    first, last = number[trace.first_phase], number[trace.last_phase]
    # What is there when the optimizer's step begins is there to the end, but for gradients that a
    # part in the backward pass has used.
    last[trace.last_phase >= begin] = trace.phase_count - 1
    _, last_use = first_and_last_use(reordered)
    taken = trace.access_tensor[np.isin(phase_of_access(trace), moved)]
    gradients = taken[trace.tensor_class[taken] == TensorClass.GRADIENTS.number]
    last[gradients] = last_use[gradients]
    # What the step itself holds for a moment, it holds from its first part to its last.
    own = trace.first_phase >= begin
    first[own], last[own] = number[begin:].min(), number[begin:].max()
    first[trace.persistent], last[trace.persistent] = 0, trace.phase_count - 1
    return first, last


def _without_whole_temporaries(trace: Trace, begin: int) -> _Numbers:
    """Sizes, where what the whole step holds for a moment is now what its largest part does."""
    size = trace.tensor_bytes.copy()
    own = ~trace.persistent & (trace.first_phase >= begin)
    touched = trace.memory_bytes[begin:]
    share = touched.max() / touched.sum() if touched.any() else 1.0
    size[own] = np.maximum(1, np.ceil(size[own] * share)).astype(np.int64)
    return size
