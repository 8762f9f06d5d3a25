"""The trace of a step as a running program carries it out.

A trace says what a step computes. A program holds some memory longer than the trace needs it, and
runs parts of the optimizer's step beside the backward pass. Numbers of tensors and phases stay.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.trace import (
    OPTIMIZER,
    Access,
    Trace,
    first_and_last_use,
    is_optimizer_phase,
    phase_of_access,
    require_durations,
    with_accesses,
)

__all__ = ["with_gradient_lifetimes", "with_open_blocks", "with_overlapped_parts"]

_USED_BY_PARTS = [
    it.number for it in (TensorClass.WEIGHTS, TensorClass.GRADIENTS, TensorClass.OPTIMIZER_STATE)
]
"""What a part of the optimizer's step uses. Its other tensors belong to the block's backward pass,
in which it begins."""


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


def with_open_blocks(trace: Trace) -> Trace:
    """Extend the use of what a block's backward pass uses to the end of the optimizer's part.

    A part begins when the last gradient of its block is complete. Autograd is then still in the
    block: a norm makes its weight's gradient before that of its input, and an adapter its own
    before it uses the frozen weight beside it.

    Parameters
    ----------
    trace
        With parts of the optimizer's step in the backward pass. Parts behind it change nothing.
    """
    end = _open_until(trace)
    stays = ~trace.persistent & (end[trace.last_phase] > trace.last_phase)
    last_phase = np.where(stays, end[trace.last_phase], trace.last_phase).astype(np.int32)
    phase = phase_of_access(trace)
    # Parts use what lives on, too, where they do not use it by themselves.
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


def with_overlapped_parts(
    trace: Trace, in_place: npt.NDArray[np.bool_]
) -> tuple[Trace, dict[str, int]]:
    """Let the optimizer's parts use state in place while later phases compute.

    Such a part takes the link's time, and next to none of the device's. So it counts as part of the
    longest phase before the next such part: state is used there, and weights and gradients are in
    use until then. Parts behind which nothing else comes stay as they are.

    Parameters
    ----------
    trace
        With durations, and with parts of the optimizer's step in the backward pass.
    in_place
        bool[T]: what is used in place on the host.

    Returns
    -------
    Trace
    dict of str to int
        The overlapped parts by the names of their blocks, each with the last phase that it runs
        beside.
    """
    phase, tensor = phase_of_access(trace), trace.access_tensor
    own = np.array([is_optimizer_phase(name) for name in trace.phase_names])
    duration_s = require_durations(trace).copy()
    parts = np.unique(phase[own[phase] & in_place[tensor]])
    overlapped = {
        int(part): int(later[np.argmax(duration_s[later])])
        for part, end in pairwise([*parts, trace.phase_count])
        if len(later := np.flatnonzero(~own[part:end]) + part)
    }
    if not overlapped:
        return trace, {}

    target = np.arange(trace.phase_count)
    target[list(overlapped)] = list(overlapped.values())
    is_part = target[phase] != phase
    moves = is_part & in_place[tensor]
    stays = is_part & ~in_place[tensor] & np.isin(trace.tensor_class[tensor], _USED_BY_PARTS)
    duration_s[list(overlapped)] = 0.0
    # What a part uses on the device is used by both phases.
    phases = np.concatenate([np.where(moves, target[phase], phase), target[phase[stays]]])
    tensors = np.concatenate([tensor, tensor[stays]])
    modes = np.concatenate([trace.access_mode, trace.access_mode[stays]])
    _, kept = np.unique(phases * trace.tensor_count + tensors, return_index=True)
    last_phase = trace.last_phase.copy()
    np.maximum.at(last_phase, tensor[stays], target[phase[stays]].astype(np.int32))
    changed = replace(trace, duration_s=duration_s, last_phase=last_phase)
    names = {
        trace.phase_names[part].removeprefix(OPTIMIZER).lstrip(): last
        for part, last in overlapped.items()
    }
    return with_accesses(changed, phases[kept], tensors[kept], modes[kept]), names


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
