"""Traces as files: umem's own format, and the exchange format read beside it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.documents import (
    Document,
    digits,
    digits_text,
    integers,
    items,
    numbers,
    read_document,
    refuse,
    require_format,
    require_keys,
    text,
    texts,
    write_document,
)
from umem.errors import TraceError
from umem.trace._check import MAX_ACCESSES, MAX_PHASES, MAX_TENSORS, check_trace
from umem.trace._exchange import EXCHANGE_FORMAT, trace_of_exchange
from umem.trace._model import Trace, ranges

__all__ = ["TRACE_FORMAT", "TRACE_KEYS", "load_trace", "save_trace"]

TRACE_FORMAT = "umem-trace/2"

TRACE_KEYS = (
    "format",
    "name",
    "source",
    "metadata",
    "tensor_names",
    "tensor_bytes",
    "tensor_class",
    "persistent",
    "first_phase",
    "last_phase",
    "phase_names",
    "phase_kind",
    "phase_precision",
    "flops",
    "memory_bytes",
    "duration_s",
    "access_counts",
    "access_tensor",
    "access_mode",
)
"""Keys of the format, all required: the fields of :class:`Trace`, with the lengths of the phases'
runs of accesses in place of their bounds."""


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Save a trace in umem's own format, compressed.

    The file is replaced in one piece, missing folders are made, and equal traces give equal bytes.
    :func:`load_trace` gives back every number bit for bit.

    Parameters
    ----------
    trace
        A valid trace.
    path
        Such as ``llama.json.gz``.

    Raises
    ------
    TraceError
        If the trace is not valid (see :func:`umem.trace.check_trace`) or the file cannot be
        written; an old file is then as it was.
    """
    check_trace(trace, f"{os.fspath(path)}: not written")
    data: dict[str, Any] = {
        "format": TRACE_FORMAT,
        "name": trace.name,
        "source": trace.source,
        "metadata": dict(sorted(trace.metadata.items())),
        "tensor_names": trace.tensor_names,
        "tensor_bytes": trace.tensor_bytes.tolist(),
        "tensor_class": digits_text(trace.tensor_class),
        "persistent": digits_text(trace.persistent),
        "first_phase": trace.first_phase.tolist(),
        "last_phase": trace.last_phase.tolist(),
        "phase_names": trace.phase_names,
        "phase_kind": digits_text(trace.phase_kind),
        "phase_precision": digits_text(trace.phase_precision),
        "flops": trace.flops.tolist(),
        "memory_bytes": trace.memory_bytes.tolist(),
        "duration_s": None if trace.duration_s is None else trace.duration_s.tolist(),
        "access_counts": np.diff(trace.access_start).tolist(),
        "access_tensor": trace.access_tensor.tolist(),
        "access_mode": digits_text(trace.access_mode),
    }
    write_document(data, path, TraceError)


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Load a trace from a file.

    Parameters
    ----------
    path
        A file of format ``umem-trace/2``, which :func:`save_trace` writes, or of the exchange
        format ``umem-trace/1``; compressed with gzip or plain JSON. It may come from a stranger:
        it is read as data, within bounds of size and count.

    Returns
    -------
    Trace
        Checked as by :func:`umem.trace.check_trace`.

    Raises
    ------
    TraceError
        If the file cannot be read, or holds no valid trace; the message names file, place and
        remedy.
    """
    document = read_document(path, TraceError)
    said = require_format(document, "a trace", (EXCHANGE_FORMAT, TRACE_FORMAT))
    trace = trace_of_exchange(document) if said == EXCHANGE_FORMAT else _trace_of(document)
    check_trace(trace, document.place)
    return trace


def _trace_of(document: Document) -> Trace:
    data = document.data
    require_keys(document, "", data, TRACE_KEYS)
    if not isinstance(data["metadata"], dict):
        refuse(document, "metadata", "not an object: give keys and values, or {}")
    timed = data["duration_s"] is not None
    return Trace(
        name=text(document, "name"),
        source=text(document, "source"),
        tensor_names=texts(document, "tensor_names", MAX_TENSORS),
        tensor_bytes=integers(document, "tensor_bytes", MAX_TENSORS, np.int64),
        tensor_class=digits(document, "tensor_class", MAX_TENSORS),
        persistent=digits(document, "persistent", MAX_TENSORS, largest=1).astype(np.bool_),
        first_phase=integers(document, "first_phase", MAX_TENSORS, np.int32),
        last_phase=integers(document, "last_phase", MAX_TENSORS, np.int32),
        phase_names=texts(document, "phase_names", MAX_PHASES),
        phase_kind=digits(document, "phase_kind", MAX_PHASES),
        phase_precision=digits(document, "phase_precision", MAX_PHASES),
        flops=numbers(document, "flops", MAX_PHASES),
        memory_bytes=integers(document, "memory_bytes", MAX_PHASES, np.int64),
        duration_s=numbers(document, "duration_s", MAX_PHASES) if timed else None,
        access_start=_access_start(document),
        access_tensor=integers(document, "access_tensor", MAX_ACCESSES, np.int32),
        access_mode=digits(document, "access_mode", MAX_ACCESSES),
        metadata=data["metadata"],
    )


def _access_start(document: Document) -> npt.NDArray[np.int64]:
    # Unsigned 32-bit lengths cannot overflow their sum.
    start = ranges(integers(document, "access_counts", MAX_PHASES, np.uint32).astype(np.int64))
    accesses = len(items(document, "access_tensor", MAX_ACCESSES))
    if start[-1] != accesses:
        refuse(
            document,
            "access_counts",
            f"the phases have {start[-1]} accesses and access_tensor {accesses}: make them agree",
        )
    return start
