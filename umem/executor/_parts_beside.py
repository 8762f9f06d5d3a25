"""A step some of whose optimizer's parts run beside the backward pass, as planners see it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from umem.classes import TensorClass
from umem.executor._slices import part_name
from umem.trace import (
    Access,
    Trace,
    is_optimizer_phase,
    phase_of_access,
    require_durations,
    with_accesses,
)

__all__ = ["with_parts_beside"]

_OF_PARTS = [
    it.number for it in (TensorClass.WEIGHTS, TensorClass.GRADIENTS, TensorClass.OPTIMIZER_STATE)
]
"""What a part uses. Others are of the block's backward pass, which it begins in."""


def with_parts_beside(
    trace: Trace, in_place: npt.NDArray[np.bool_], slowdown_s_per_byte: float
) -> tuple[Trace, dict[str, int]]:
    """Let what the optimizer's parts use in place be used while later phases compute.

    Such a part takes the link's time, and next to none of the device's. So it counts as part of the
    longest phase before the next such part: state is used there, and weights and gradients are in
    use until then. Parts behind which nothing else comes stay as they are.

    Parameters
    ----------
    trace
        With durations, and with parts of the optimizer's step in the backward pass.
    in_place
        bool[tensors]: what is used in place on the host.
    slowdown_s_per_byte
        What a byte that kernels move over the link costs the computation beside them, seconds.

    Returns
    -------
    Trace
        The same phases and tensors, by the same numbers.
    dict of str to int
        The parts that run beside others by name, each with the last phase that it runs beside.
    """
    phase, tensor = phase_of_access(trace), trace.access_tensor
    own = np.array([is_optimizer_phase(name) for name in trace.phase_names])
    duration_s = require_durations(trace).copy()
    parts = np.unique(phase[own[phase] & in_place[tensor]])
    beside = {
        int(part): int(later[np.argmax(duration_s[later])])
        for part, end in pairwise([*parts, trace.phase_count])
        if len(later := np.flatnonzero(~own[part:end]) + part)
    }
    if not beside:
        return trace, {}

    target = np.arange(trace.phase_count)
    target[list(beside)] = list(beside.values())
    is_part = target[phase] != phase
    moves = is_part & in_place[tensor]
    stays = is_part & ~in_place[tensor] & np.isin(trace.tensor_class[tensor], _OF_PARTS)
    for way in (Access.READ, Access.WRITE):
        moved_bytes = np.where(moves & (trace.access_mode & way > 0), trace.tensor_bytes[tensor], 0)
        np.add.at(duration_s, target[phase], moved_bytes * slowdown_s_per_byte)
    duration_s[list(beside)] = 0.0
    # What a part uses on the device is used by both phases.
    phases = np.concatenate([np.where(moves, target[phase], phase), target[phase[stays]]])
    tensors = np.concatenate([tensor, tensor[stays]])
    modes = np.concatenate([trace.access_mode, trace.access_mode[stays]])
    _, kept = np.unique(phases * trace.tensor_count + tensors, return_index=True)
    last_phase = trace.last_phase.copy()
    np.maximum.at(last_phase, tensor[stays], target[phase[stays]].astype(np.int32))
    changed = replace(trace, duration_s=duration_s, last_phase=last_phase)
    names = {part_name(trace.phase_names[part]): last for part, last in beside.items()}
    return with_accesses(changed, phases[kept], tensors[kept], modes[kept]), names
