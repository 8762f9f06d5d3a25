"""What a trace says of memory: who uses it in a phase, how much is allocated, and for how long."""

from __future__ import annotations

from typing import Any

import numpy as np

from umem.core.classes import TensorClass
from umem.trace import Access, Trace

CLASSES = list(TensorClass)


def accesses(trace: Trace, phase: int) -> dict[str, Access]:
    """How a phase uses tensors, by name."""
    span = slice(trace.access_start[phase], trace.access_start[phase + 1])
    names = [trace.tensor_names[tensor] for tensor in trace.access_tensor[span]]
    return dict(zip(names, map(Access, trace.access_mode[span].tolist()), strict=True))


def class_bytes(trace: Trace, tensor_class: TensorClass, *, persistent: bool) -> int:
    """Bytes of all tensors of a class that stay, or of those that come and go."""
    chosen = (trace.tensor_class == tensor_class.number) & (trace.persistent == persistent)
    return int(trace.tensor_bytes[chosen].sum())


def live_bytes(trace: Trace, *classes: TensorClass) -> Any:
    """Bytes of the classes that are allocated in each phase."""
    chosen = np.isin(trace.tensor_class, [tensor_class.number for tensor_class in classes])
    return live_sizes(trace, np.where(chosen, trace.tensor_bytes, 0))


def live_sizes(trace: Trace, sizes: Any) -> Any:
    """The sum of the sizes of the tensors that are allocated in each phase."""
    change = np.zeros(trace.phase_count + 1, np.int64)
    np.add.at(change, trace.first_phase, sizes)
    np.add.at(change, trace.last_phase + 1, -sizes)
    return change.cumsum()[:-1]


def lifetimes_of(trace: Trace) -> dict[str, tuple[int, str, bool, int, int]]:
    """Size in bytes, class, whether it persists, first and last phase, by name."""
    return {
        name: (
            int(trace.tensor_bytes[index]),
            CLASSES[trace.tensor_class[index]].value,
            bool(trace.persistent[index]),
            int(trace.first_phase[index]),
            int(trace.last_phase[index]),
        )
        for index, name in enumerate(trace.tensor_names)
    }
