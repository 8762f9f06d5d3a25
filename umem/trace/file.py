"""Traces as files: umem's own format, the exchange format of published traces, and fingerprints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.io.columns import (
    Checker,
    Header,
    Items,
    Model,
    is_archive,
    read_columns,
    read_json,
    write_columns,
)
from umem.io.problems import shown
from umem.trace.check import (
    DTYPES,
    MAX_ACCESSES,
    MAX_PHASE_S,
    MAX_PHASES,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
    check_trace,
)
from umem.trace.model import Access, PhaseKind, Precision, Trace, ranges

__all__ = [
    "TRACE_FORMAT",
    "Exchange",
    "ExchangePhase",
    "ExchangeTensor",
    "TraceHeader",
    "load_trace",
    "save_trace",
]

EXCHANGE_FORMAT = "umem-trace/1"
TRACE_FORMAT = "umem-trace/3"

_US_PER_S = 1e6


class TraceHeader(Header):
    """Header of a trace's file. Its columns are those of :class:`Trace`."""

    format: str = TRACE_FORMAT
    name: str
    source: str
    metadata: dict[str, Any]
    tensor_names: Items[str]
    phase_names: Items[str]


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Save a trace in umem's own format, compressed, in a file such as ``llama.npz``.

    The file is replaced in one piece, missing folders are made, and equal traces give equal bytes.
    :func:`load_trace` gives back every number bit for bit.

    Raises TraceError if the trace is not valid (see :func:`umem.trace.check_trace`) or the file
    cannot be written; an old file is then as it was.
    """
    check_argument("trace", trace, Trace, "give one from umem.load_trace() or umem.record()")
    check_argument("path", path, (str, os.PathLike), "give the path of the file to write")
    check_trace(trace, f"{os.fspath(path)}: not written")
    header = {key: getattr(trace, key) for key in TraceHeader.model_fields if key != "format"}
    header["metadata"] = dict(sorted(trace.metadata.items()))
    columns = {key: getattr(trace, key) for key in DTYPES}
    if trace.duration_s is None:
        del columns["duration_s"]
    write_columns(path, TraceHeader, header, columns, error=TraceError)


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Load a trace from a file.

    Parameters
    ----------
    path
        A file that :func:`save_trace` wrote, or one of the exchange format ``umem-trace/1``, plain
        or compressed with gzip. It may come from a stranger: it is read as data, within bounds of
        size and count.

    Raises
    ------
    TraceError
        If the file cannot be read, or holds no trace that :func:`umem.trace.check_trace` accepts;
        the message names file, place and remedy.
    """
    check_argument("path", path, (str, os.PathLike), "give the path of a trace's file")
    if not is_archive(path):
        trace = _imported(path)
    else:
        header, columns = read_columns(
            path, TraceHeader, DTYPES, noun="a trace", error=TraceError, optional=("duration_s",)
        )
        fields: dict[str, Any] = {"duration_s": None, **dict(header), **columns}
        fields |= {key: tuple(fields[key]) for key in ("tensor_names", "phase_names")}
        del fields["format"]
        trace = Trace(**fields)
    check_trace(trace, os.fspath(path))
    return trace


# The exchange format: traces in plain words, as published ones come.


class ExchangeTensor(Model):
    """A tensor of the exchange format."""

    id: int = Field(ge=-(2**63), lt=2**63)
    bytes: int = Field(ge=1, le=MAX_TENSOR_BYTES)
    tensor_class: TensorClass = Field(alias="class")
    persistent: bool


class ExchangePhase(Model):
    """A phase of the exchange format; `reads` and `writes` are ids of tensors."""

    name: str
    duration_us: float = Field(ge=0, le=MAX_PHASE_S * _US_PER_S)
    reads: Items[int]
    writes: Items[int]


class Exchange(Model):
    """A file of the exchange format. Other tools may write more beside these keys."""

    model_config = ConfigDict(extra="ignore")

    format: str = EXCHANGE_FORMAT
    tensors: Items[ExchangeTensor] = Field(max_length=MAX_TENSORS)
    phases: Items[ExchangePhase] = Field(max_length=MAX_PHASES)
    name: str = ""
    source: str = EXCHANGE_FORMAT
    published: dict[str, Any] = Field(default_factory=dict)


def _imported(path: str | os.PathLike[str]) -> Trace:
    """Read a trace in the exchange format.

    A tensor that is not persistent lives from the first phase that uses it to the last one; one
    that no phase uses takes no memory and is dropped, and ``dropped_tensors`` in the metadata
    counts those. A tensor that a phase only writes is overwritten as a whole. All phases are
    kernels, with no FLOPs and the bytes of the tensors that they touch, each counted once.
    ``published`` goes to the metadata as ``published_<key>``, with numbers in the unit that it
    names.
    """
    check = Checker(os.fspath(path), TraceError)
    formats = (EXCHANGE_FORMAT, TRACE_FORMAT)
    document = read_json(path, Exchange, noun="a trace", error=TraceError, readable=formats)
    tensors, phases = document.tensors, document.phases
    accesses = _accesses(document, check)
    counts = np.array([len(uses) for uses in accesses], dtype=np.int64)
    start = ranges(counts)
    if start[-1] > MAX_ACCESSES:
        check.refuse("phases", f"{start[-1]} accesses: at most {MAX_ACCESSES} are read")
    used = np.array([number for uses in accesses for number in uses], dtype=np.int32)
    mode = np.array([mode for uses in accesses for mode in uses.values()], dtype=np.uint8)

    # From here on over the tensors that stay, in their order.
    persistent = np.array([tensor.persistent for tensor in tensors], dtype=np.bool_)
    stays = persistent.copy()
    stays[used] = True
    sizes = np.array([tensor.bytes for tensor in tensors], dtype=np.int64)
    classes = np.array([tensor.tensor_class.number for tensor in tensors], dtype=np.uint8)
    phase_of = np.repeat(np.arange(len(phases), dtype=np.int32), counts)
    first = np.zeros(len(tensors), dtype=np.int32)
    last = np.full(len(tensors), len(phases) - 1, dtype=np.int32)
    # The accesses are in the order of the phases: the last assignment to a tensor wins.
    first[used[::-1]] = phase_of[::-1]
    last[used] = phase_of
    first[persistent] = 0
    last[persistent] = len(phases) - 1
    dropped = int((~stays).sum())
    return Trace(
        name=document.name or Path(path).name.split(".")[0],
        source=document.source,
        tensor_names=tuple(
            f"tensor {tensor.id}" for tensor, keep in zip(tensors, stays, strict=True) if keep
        ),
        tensor_bytes=sizes[stays],
        tensor_class=classes[stays],
        persistent=persistent[stays],
        first_phase=first[stays],
        last_phase=last[stays],
        phase_names=tuple(phase.name for phase in phases),
        phase_kind=np.full(len(phases), PhaseKind.KERNEL, dtype=np.uint8),
        phase_precision=np.full(len(phases), Precision.FP32, dtype=np.uint8),
        flops=np.zeros(len(phases)),
        # If this overflows, so does the total size, which is refused.
        memory_bytes=np.diff(ranges(sizes[used])[start]),
        duration_s=np.array([phase.duration_us for phase in phases]) / _US_PER_S,
        access_start=start,
        access_tensor=(np.cumsum(stays, dtype=np.int32) - np.int32(1))[used],
        access_mode=mode,
        metadata={f"published_{key}": value for key, value in document.published.items()}
        | ({"dropped_tensors": dropped} if dropped else {}),
    )


def _accesses(document: Exchange, check: Checker) -> list[dict[int, int]]:
    """Mode by index of the tensor, for each phase."""
    numbers: dict[int, int] = {}
    for index, tensor in enumerate(document.tensors):
        if numbers.setdefault(tensor.id, index) != index:
            first = numbers[tensor.id]
            check.refuse(
                f"tensors[{index}].id",
                f"{tensor.id} is also the id of tensors[{first}]: give each its own",
            )
    accesses = []
    for index, phase in enumerate(document.phases):
        uses: dict[int, int] = {}
        for key, ids, mode in (
            ("reads", phase.reads, Access.READ),
            ("writes", phase.writes, Access.WRITE),
        ):
            for at, tensor_id in enumerate(ids):
                number = numbers.get(tensor_id)
                if number is None:
                    check.refuse(
                        f"phases[{index}].{key}[{at}]",
                        f"tensor {shown(tensor_id)} is not among the tensors: add it there, or "
                        "remove it here",
                    )
                # A kernel may name an argument twice, as x * x does.
                uses[number] = uses.get(number, 0) | int(mode)
        accesses.append(uses)
    return accesses
