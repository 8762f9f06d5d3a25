"""The exchange format: traces in plain words, as published ones come."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.io.documents import (
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
    shown,
    text,
    texts,
    write_document,
)
from umem.trace.check import (
    MAX_ACCESSES,
    MAX_METADATA,
    MAX_PHASE_S,
    MAX_PHASES,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
    check_trace,
)
from umem.trace.model import Access, PhaseKind, Precision, Trace, ranges

__all__ = [
    "EXCHANGE_FORMAT",
    "EXCHANGE_KEYS",
    "EXCHANGE_PHASE_KEYS",
    "EXCHANGE_TENSOR_KEYS",
    "TRACE_FORMAT",
    "TRACE_KEYS",
    "load_trace",
    "save_trace",
    "trace_fingerprint",
    "trace_of_exchange",
]

EXCHANGE_FORMAT = "umem-trace/1"

_REQUIRED_KEYS = ("format", "tensors", "phases")
EXCHANGE_KEYS = (*_REQUIRED_KEYS, "name", "source", "published")
EXCHANGE_TENSOR_KEYS = ("id", "bytes", "class", "persistent")
EXCHANGE_PHASE_KEYS = ("name", "duration_us", "reads", "writes")

_CLASSES = [str(member) for member in TensorClass]
_US_PER_S = 1e6


def trace_of_exchange(document: Document) -> Trace:
    """Make a trace of a document in the exchange format.

    A tensor that is not persistent lives from the first phase that uses it to the last one; one
    that no phase uses takes no memory and is dropped; ``dropped_tensors`` in the metadata says how
    many were. What a phase only writes, it overwrites as a whole. All phases are kernels, with no
    FLOPs and the bytes of the tensors that they touch, each counted once. ``published`` goes to the
    metadata as ``published_<key>``, with numbers in the unit that it names.

    Parameters
    ----------
    document
        With the keys of :data:`EXCHANGE_KEYS`; durations are microseconds.

    Raises
    ------
    TraceError
        If the document does not hold such a trace; the message names place and remedy.
    """
    # Other tools may write more beside these keys.
    require_keys(document, "", document.data, _REQUIRED_KEYS, document.data)
    tensors = items(document, "tensors", MAX_TENSORS)
    phases = items(document, "phases", MAX_PHASES)
    numbers = _tensor_numbers(document, tensors)
    accesses = [
        _accesses(document, f"phases[{index}]", phase, numbers)
        for index, phase in enumerate(phases)
    ]
    counts = np.array([len(uses) for uses in accesses], dtype=np.int64)
    start = ranges(counts)
    if start[-1] > MAX_ACCESSES:
        refuse(document, "phases", f"{start[-1]} accesses: at most {MAX_ACCESSES} are read")
    used = np.array([number for uses in accesses for number in uses], dtype=np.int32)
    mode = np.array([mode for uses in accesses for mode in uses.values()], dtype=np.uint8)

    # From here on over the tensors that stay, in their order.
    persistent = np.array([tensor["persistent"] for tensor in tensors], dtype=np.bool_)
    stays = persistent.copy()
    stays[used] = True
    sizes = np.array([tensor["bytes"] for tensor in tensors], dtype=np.int64)
    phase_of = np.repeat(np.arange(len(phases), dtype=np.int32), counts)
    first = np.zeros(len(tensors), dtype=np.int32)
    last = np.full(len(tensors), len(phases) - 1, dtype=np.int32)
    # The accesses are in the order of the phases: the last assignment to a tensor wins.
    first[used[::-1]] = phase_of[::-1]
    last[used] = phase_of
    first[persistent] = 0
    last[persistent] = len(phases) - 1
    # If this overflows, so does the total size, which is refused.
    touched = ranges(sizes[used])
    return Trace(
        name=_text_or(document, "name", Path(document.place).name.split(".")[0]),
        source=_text_or(document, "source", EXCHANGE_FORMAT),
        tensor_names=tuple(
            f"tensor {tensor['id']}" for tensor, keep in zip(tensors, stays, strict=True) if keep
        ),
        tensor_bytes=sizes[stays],
        tensor_class=np.array(
            [TensorClass(tensor["class"]).number for tensor in tensors], dtype=np.uint8
        )[stays],
        persistent=persistent[stays],
        first_phase=first[stays],
        last_phase=last[stays],
        phase_names=tuple(phase["name"] for phase in phases),
        phase_kind=np.full(len(phases), PhaseKind.KERNEL, dtype=np.uint8),
        phase_precision=np.full(len(phases), Precision.FP32, dtype=np.uint8),
        flops=np.zeros(len(phases)),
        memory_bytes=np.diff(touched[start]),
        duration_s=np.array([phase["duration_us"] for phase in phases], dtype=np.float64)
        / _US_PER_S,
        access_start=start,
        access_tensor=(np.cumsum(stays, dtype=np.int32) - np.int32(1))[used],
        access_mode=mode,
        metadata=_metadata(document, dropped=int((~stays).sum())),
    )


def _tensor_numbers(document: Document, tensors: list[Any]) -> dict[int, int]:
    """Index of each tensor by its id, after checking every tensor."""
    numbers: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        where = f"tensors[{index}]"
        require_keys(document, where, tensor, EXCHANGE_TENSOR_KEYS)
        own_id, size_bytes = tensor["id"], tensor["bytes"]
        if type(own_id) is not int or not -(2**63) <= own_id < 2**63:
            refuse(document, f"{where}.id", f"{shown(own_id)} is not an integer of 64 bits")
        if own_id in numbers:
            refuse(
                document,
                f"{where}.id",
                f"{own_id} is also the id of tensors[{numbers[own_id]}]: give each its own",
            )
        if type(size_bytes) is not int or not 0 < size_bytes <= MAX_TENSOR_BYTES:
            refuse(
                document,
                f"{where}.bytes",
                f"{shown(size_bytes)} is not a size: give an integer from 1 to 2**50",
            )
        if tensor["class"] not in _CLASSES:
            refuse(
                document,
                f"{where}.class",
                f"{shown(tensor['class'])} is no class: give one of {', '.join(_CLASSES)}",
            )
        if not isinstance(tensor["persistent"], bool):
            refuse(
                document,
                f"{where}.persistent",
                f"{shown(tensor['persistent'])} is neither true nor false",
            )
        numbers[own_id] = index
    return numbers


def _accesses(
    document: Document, where: str, phase: Any, numbers: dict[int, int]
) -> dict[int, int]:
    """Mode by tensor of one phase, after checking it."""
    require_keys(document, where, phase, EXCHANGE_PHASE_KEYS)
    if not isinstance(phase["name"], str):
        refuse(document, f"{where}.name", f"{shown(phase['name'])} is not text")
    duration_us = phase["duration_us"]
    # NaN cannot be written in JSON; 1e999 is infinity.
    if type(duration_us) not in (int, float) or not 0 <= duration_us < MAX_PHASE_S * _US_PER_S:
        refuse(
            document,
            f"{where}.duration_us",
            f"{shown(duration_us)} is not a duration: give microseconds from 0 to below 1e12",
        )
    uses: dict[int, int] = {}
    for key, mode in (("reads", Access.READ), ("writes", Access.WRITE)):
        if not isinstance(phase[key], list):
            refuse(document, f"{where}.{key}", f"{shown(phase[key])} is not a list of tensor ids")
        for index, own_id in enumerate(phase[key]):
            # By exact type: true and 1.0 would find tensor 1.
            number = numbers.get(own_id) if type(own_id) is int else None
            if number is None:
                refuse(
                    document,
                    f"{where}.{key}[{index}]",
                    f"tensor {shown(own_id)} is not among the tensors: add it there, or remove it "
                    "here",
                )
            # A kernel may name an argument twice, as x * x does.
            uses[number] = uses.get(number, 0) | int(mode)
    return uses


def _text_or(document: Document, key: str, otherwise: str) -> str:
    return text(document, key) if key in document.data else otherwise


def _metadata(document: Document, dropped: int) -> dict[str, str | int | float]:
    published = document.data.get("published", {})
    if not isinstance(published, dict):
        refuse(document, "published", f"{shown(published)} is not an object of names and numbers")
    if len(published) >= MAX_METADATA:
        refuse(document, "published", f"{len(published)} keys: at most {MAX_METADATA - 1} are read")
    for key, value in published.items():
        if type(value) not in (str, int, float) or value in (math.inf, -math.inf):
            refuse(
                document,
                "published",
                f"{shown(key)} is {shown(value)}: give text or a finite number",
            )
    metadata = {f"published_{key}": value for key, value in published.items()}
    return metadata | ({"dropped_tensors": dropped} if dropped else {})


# Traces as files: umem's own format, and the exchange format read beside it.

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


# The content of a trace in one short text.


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
