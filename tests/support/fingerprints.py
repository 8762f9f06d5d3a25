"""The numbers of a trace in one text, to compare traces."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from umem.trace import Trace

__all__ = ["trace_fingerprint"]


def trace_fingerprint(trace: Trace) -> str:
    """Equal for traces with the same columns of numbers, bit for bit, whatever their names."""
    digest = hashlib.sha256()
    for field in dataclasses.fields(trace):
        column = getattr(trace, field.name)
        if isinstance(column, np.ndarray):
            # The length keeps neighbouring columns apart.
            digest.update(f"{field.name} {column.dtype.str} {len(column)}\n".encode())
            digest.update(column.tobytes())
    return digest.hexdigest()
