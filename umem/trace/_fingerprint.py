"""The content of a trace in one short text."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from umem.trace._model import Trace

__all__ = ["trace_fingerprint"]


def trace_fingerprint(trace: Trace) -> str:
    """Content address of what a step does: equal for traces that a planner cannot tell apart.

    Parameters
    ----------
    trace
        Every column of numbers counts, bit for bit. Its name, source and metadata, and the names of
        tensors and phases, do not.

    Returns
    -------
    str
        64 hexadecimal digits of SHA-256; the same in every process and on every machine.
    """
    digest = hashlib.sha256()
    for field in dataclasses.fields(trace):
        column = getattr(trace, field.name)
        if isinstance(column, np.ndarray):
            # Little-endian everywhere. The length keeps neighbouring columns apart.
            column = column.astype(column.dtype.newbyteorder("<"))
            digest.update(f"{field.name} {column.dtype.str} {len(column)}\n".encode())
            digest.update(column.tobytes())
    return digest.hexdigest()
