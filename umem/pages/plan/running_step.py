"""The trace of a step as a running program carries it out.

A trace says what a step computes. A program holds some memory longer than the trace needs it, and
its optimizer steps at once. Numbers of tensors stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.trace import (
    OPTIMIZER,
    Access,
    Trace,
    first_and_last_use,
    phase_of_access,
    with_accesses,
)

__all__ = ["with_gradient_lifetimes", "with_whole_optimizer_step"]


def with_whole_optimizer_step(trace: Trace) -> Trace:
    """Join the optimizer's phases at the end of a step: a program's optimizer steps at once."""
    own = [name.split(" ", 1)[0].rstrip(":") == OPTIMIZER for name in trace.phase_names]
    last = trace.phase_count - 1
    while last > 0 and own[last] and own[last - 1]:
        last -= 1
    if last == trace.phase_count - 1:
        return trace
    phases = np.minimum(phase_of_access(trace), last)
    keys, which = np.unique(
        (phases * trace.tensor_count + trace.access_tensor).astype(np.int64), return_inverse=True
    )
    modes = np.zeros(len(keys), np.uint8)
    np.bitwise_or.at(modes, which.ravel(), trace.access_mode)
    joined = replace(
        trace,
        phase_names=(*trace.phase_names[:last], OPTIMIZER),
        phase_kind=trace.phase_kind[: last + 1],
        phase_precision=trace.phase_precision[: last + 1],
        flops=_joined(trace.flops, last),
        memory_bytes=_joined(trace.memory_bytes, last),
        duration_s=None if trace.duration_s is None else _joined(trace.duration_s, last),
        first_phase=np.minimum(trace.first_phase, last).astype(np.int32),
        last_phase=np.minimum(trace.last_phase, last).astype(np.int32),
    )
    tensors = (keys % trace.tensor_count).astype(np.int32)
    return with_accesses(joined, keys // trace.tensor_count, tensors, modes)


def _joined(values: npt.NDArray[np.generic], last: int) -> npt.NDArray[Any]:
    """The values with those from `last` on summed."""
    return np.concatenate([values[:last], values[last:].sum(keepdims=True, dtype=values.dtype)])


def with_gradient_lifetimes(trace: Trace) -> Trace:
    """Extend the lifetimes of gradients to the point where the program frees them.

    The optimizer's part that uses a gradient leaves it in memory until the end of the step. A plan
    may not discard it, for the program may look at it. So new tensors, behind those of the trace,
    stand for this memory: they are used in each phase from a last use to the end of a lifetime.
    """
    _, last_use = first_and_last_use(trace)
    kept = np.flatnonzero(~trace.persistent & (last_use >= 0) & (last_use < trace.last_phase))
    if not len(kept):
        return trace
    spans, which = np.unique(
        np.stack([last_use[kept] + 1, trace.last_phase[kept]], axis=1), axis=0, return_inverse=True
    )
    size = np.zeros(len(spans), np.int64)
    np.add.at(size, which.ravel(), trace.tensor_bytes[kept])
    last_phase = trace.last_phase.copy()
    last_phase[kept] = last_use[kept]
    return _with_tensors(replace(trace, last_phase=last_phase), spans, size)


def _with_tensors(trace: Trace, spans: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> Trace:
    """The trace with tensors that are used in all phases of their spans, first and last."""
    first, last = spans[:, 0], spans[:, 1]
    new, phase = _phases_of(first, last)
    mode = np.where(phase == first[new], Access.WRITE, Access.READ)
    none = np.zeros(len(spans), np.bool_)
    larger = replace(
        trace,
        tensor_names=(*trace.tensor_names, *(f"gradients kept from {a} to {b}" for a, b in spans)),
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
