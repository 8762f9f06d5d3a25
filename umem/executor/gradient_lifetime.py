"""Memory that outlives its contents, which a plan could drop and a running program keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.trace import (
    Access,
    Trace,
    first_and_last_use,
    is_optimizer_phase,
    phase_of_access,
    with_accesses,
)

__all__ = ["with_lingering", "with_open_blocks"]


def with_lingering(trace: Trace) -> Trace:
    """The trace with what lingers as tensors of their own, which every phase uses.

    A gradient is there from the optimizer's part that has used it to the end of the step. A plan
    that discards it counts with its memory, but the program may still look at it, so that nobody
    discards it: to be kept in use is what holds its memory. Numbers of tensors stay, and those that
    are new follow them.
    """
    _, last_use = first_and_last_use(trace)
    lingers = np.flatnonzero(~trace.persistent & (last_use >= 0) & (last_use < trace.last_phase))
    if not len(lingers):
        return trace
    spans, which = np.unique(
        np.stack([last_use[lingers] + 1, trace.last_phase[lingers]], axis=1),
        axis=0,
        return_inverse=True,
    )
    size = np.zeros(len(spans), np.int64)
    np.add.at(size, which.ravel(), trace.tensor_bytes[lingers])
    last_phase = trace.last_phase.copy()
    last_phase[lingers] = last_use[lingers]
    return _with_tensors(replace(trace, last_phase=last_phase), spans, size)


def with_open_blocks(trace: Trace) -> Trace:
    """The trace with what a block's backward pass uses until the optimizer's part behind it ends.

    A part begins when the last gradient of its block is complete. Autograd is still in the block
    then: a norm has made its weight's gradient before it computes that of its input, and an adapter
    its own before that of the frozen weight beside it is used.

    Parameters
    ----------
    trace
        With parts of the optimizer's step in the backward pass; those behind it change nothing.
    """
    end = _open_until(trace)
    stays = ~trace.persistent & (end[trace.last_phase] > trace.last_phase)
    last_phase = np.where(stays, end[trace.last_phase], trace.last_phase).astype(np.int32)
    phase = phase_of_access(trace)
    # What lives on is used by the parts too, unless they do so by themselves.
    held = np.flatnonzero(trace.persistent[trace.access_tensor] & (end[phase] > phase))
    which, later = _phases_of(phase[held] + 1, end[phase[held]])
    phases = np.concatenate([phase, later])
    tensors = np.concatenate([trace.access_tensor, trace.access_tensor[held[which]]])
    modes = np.concatenate([trace.access_mode, np.full(len(later), Access.READ, np.uint8)])
    _, kept = np.unique(phases * trace.tensor_count + tensors, return_index=True)
    kept.sort()
    return with_accesses(
        replace(trace, last_phase=last_phase), phases[kept], tensors[kept], modes[kept]
    )


def _open_until(trace: Trace) -> npt.NDArray[np.int64]:
    """The last of the optimizer's phases right behind each phase of a pass, int64[P].

    The phase itself where there is none, and where the backward pass is over.
    """
    own = np.array([is_optimizer_phase(name) for name in trace.phase_names])
    end = np.arange(trace.phase_count)
    for phase in range(int(np.flatnonzero(~own)[-1]) - 1, -1, -1):
        if own[phase + 1]:
            end[phase] = end[phase + 1]
    end[own] = np.flatnonzero(own)
    return end


def _with_tensors(trace: Trace, spans: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Trace:
    """The trace with tensors that are used in all phases of their spans, first and last."""
    first, last = spans[:, 0], spans[:, 1]
    new, phase = _phases_of(first, last)
    mode = np.where(phase == first[new], Access.WRITE, Access.READ)
    none = np.zeros(len(spans), np.bool_)
    larger = replace(
        trace,
        tensor_names=(*trace.tensor_names, *(f"lingers from {a} to {b}" for a, b in spans)),
        tensor_bytes=np.concatenate([trace.tensor_bytes, size]),
        tensor_class=np.concatenate(
            [trace.tensor_class, np.full(len(spans), TensorClass.OTHER.number, np.uint8)]
        ),
        persistent=np.concatenate([trace.persistent, none]),
        first_phase=np.concatenate([trace.first_phase, first.astype(np.int32)]),
        last_phase=np.concatenate([trace.last_phase, last.astype(np.int32)]),
    )
    return with_accesses(
        larger,
        np.concatenate([phase_of_access(trace), phase]),
        np.concatenate([trace.access_tensor, (trace.tensor_count + new).astype(np.int32)]),
        np.concatenate([trace.access_mode, mode.astype(np.uint8)]),
    )


def _phases_of(
    first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All phases of some spans, one span after the other: the span's number, and the phase."""
    counts = last - first + 1
    span = np.repeat(np.arange(len(first)), counts)
    return span, np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts - first, counts)
