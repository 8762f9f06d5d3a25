"""Lifetimes of the tensors of a trace."""

from __future__ import annotations

from umem.core.classes import TensorClass
from umem.trace import Trace

CLASSES = list(TensorClass)


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
