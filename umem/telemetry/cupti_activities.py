"""CUPTI's activities: copied in its callback, and read as records when the recording has ended.

Reading an attribute of a cupti-python record takes microseconds, under the interpreter's lock and
in a thread of CUPTI's. The callback therefore only copies a buffer's bytes. CUPTI's reference
explains the numbers in them (``CUpti_ActivityUnifiedMemoryCounter3``).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.telemetry.records import (
    CAUSE_OF_NUMBER,
    Integers,
    MigrationRecords,
    RecordKind,
    concatenate,
    make_records,
)

__all__ = ["ActivityBuffer", "ActivityFormat", "activity_format", "copy_buffer", "read_activities"]

_ALIGNMENT = 8
"""Of the records in a buffer."""
_KIND_BYTES = 4
"""A record begins with its kind."""


@dataclass(frozen=True)
class ActivityFormat:
    """How a version of cupti-python numbers and lays out the activities that are recorded."""

    unified_memory: int
    memcpy: int
    memset: int
    counters: Mapping[int, RecordKind]
    """Unified-memory counters."""
    layouts: Mapping[int, np.dtype[Any]]
    """Memory layout of the records of each kind."""


@dataclass(frozen=True, eq=False)
class ActivityBuffer:
    """The bytes of one buffer, and the offset of each record in them."""

    data: bytes
    offsets: Integers

    def __len__(self) -> int:
        return len(self.offsets)


def activity_format(cupti: Any) -> ActivityFormat:
    """The format of the module ``cupti.cupti``."""
    counters = cupti.ActivityUnifiedMemoryCounterKind
    kinds = cupti.ActivityKind
    names = {
        int(kinds.UNIFIED_MEMORY_COUNTER): "unified_memory_counter",
        int(kinds.MEMCPY): "memcpy",
        int(kinds.MEMSET): "memset",
    }
    return ActivityFormat(
        unified_memory=int(kinds.UNIFIED_MEMORY_COUNTER),
        memcpy=int(kinds.MEMCPY),
        memset=int(kinds.MEMSET),
        counters={
            int(counters.BYTES_TRANSFER_HTOD): RecordKind.TO_DEVICE,
            int(counters.BYTES_TRANSFER_DTOH): RecordKind.TO_HOST,
            int(counters.GPU_PAGE_FAULT): RecordKind.GPU_FAULT,
            int(counters.CPU_PAGE_FAULT_COUNT): RecordKind.CPU_FAULT,
        },
        layouts={kind: _newest_layout(cupti, name) for kind, name in names.items()},
    )


def _newest_layout(cupti: Any, name: str) -> np.dtype[Any]:
    """The newest layout of a kind: ``activity_memcpy6_dtype`` and the like."""
    found = [re.fullmatch(rf"activity_{name}(\d*)_dtype", it) for it in dir(cupti)]
    versions = [int(it[1] or 1) for it in found if it]
    if not versions:
        raise AttributeError(f"no layout of {name} records")
    newest = max(versions)
    return np.dtype(getattr(cupti, f"activity_{name}{newest if newest > 1 else ''}_dtype"))


def copy_buffer(activities: Sequence[Any], form: ActivityFormat) -> ActivityBuffer:
    """Copy all records of one buffer, of any kinds, in the order in which cupti-python has them.

    Each has its address in memory, ``ptr``.
    """
    if not activities:
        return ActivityBuffer(b"", np.zeros(0, np.int64))
    # Reading `ptr` is slow, so only the first and the last record are read.
    first, last = int(activities[0].ptr), int(activities[-1].ptr)
    data = _bytes_between(first, last, form)
    offsets = _packed_offsets(data, form)
    if len(offsets) != len(activities) or offsets[-1] != last - first:
        # The records are not packed as expected: read the place of each.
        pointers = [int(it.ptr) for it in activities]
        first = min(pointers)
        data = _bytes_between(first, max(pointers), form)
        offsets = [pointer - first for pointer in pointers]
    return ActivityBuffer(data, np.array(offsets, np.int64))


def _bytes_between(first: int, last: int, form: ActivityFormat) -> bytes:
    kind = int.from_bytes(ctypes.string_at(last, _KIND_BYTES), "little", signed=True)
    layout = form.layouts.get(kind)
    return ctypes.string_at(first, last - first + (layout.itemsize if layout else _KIND_BYTES))


def _packed_offsets(data: bytes, form: ActivityFormat) -> list[int]:
    """Offsets of records that are packed one behind the other, up to one of an unknown kind."""
    sizes = {kind: layout.itemsize for kind, layout in form.layouts.items()}
    whole = len(data) // _KIND_BYTES * _KIND_BYTES
    kinds = memoryview(data)[:whole].cast("i")
    offsets, at = [], 0
    while at + _KIND_BYTES <= whole:
        size = sizes.get(kinds[at // _KIND_BYTES])
        if size is None:
            break
        offsets.append(at)
        at += size
    return offsets


def read_activities(buffers: Sequence[ActivityBuffer], form: ActivityFormat) -> MigrationRecords:
    """Records of CUPTI's activities by start; activities of other kinds are left out.

    A record with an impossible time keeps its bytes: it gets the start of the record before it, and
    no length.
    """
    return concatenate(_read_buffer(it, form) for it in buffers)


def _read_buffer(buffer: ActivityBuffer, form: ActivityFormat) -> MigrationRecords:
    count = len(buffer)
    if not count:
        return make_records(0)
    at = buffer.offsets // _ALIGNMENT
    # A record may begin at every eighth byte, so a field is an array with that stride.
    places = (len(buffer.data) - _KIND_BYTES) // _ALIGNMENT + 1
    kinds = np.ndarray(places, np.int32, buffer.data, strides=(_ALIGNMENT,))[at]
    columns: dict[str, Integers] = {}
    is_known = np.zeros(count, np.bool_)
    for kind, read in (
        (form.unified_memory, _read_counters),
        (form.memcpy, partial(_read_operations, RecordKind.MEMCPY)),
        (form.memset, partial(_read_operations, RecordKind.MEMSET)),
    ):
        rows = np.flatnonzero(kinds == kind)
        if not len(rows):
            continue
        layout = form.layouts[kind]
        places = (len(buffer.data) - layout.itemsize) // _ALIGNMENT + 1
        every = np.ndarray(places, layout, buffer.data, strides=(_ALIGNMENT,))
        found, is_known[rows] = read(every[at[rows]], form)
        for name, values in found.items():
            columns.setdefault(name, np.zeros(count, np.int64))[rows] = values
    records = make_records(count, **columns).select(is_known)
    start_ns, end_ns = _possible_times(records.start_ns, records.end_ns)
    return replace(records, start_ns=start_ns, end_ns=end_ns)


_Fields = tuple[dict[str, Any], npt.NDArray[np.bool_]]


def _read_counters(rows: npt.NDArray[Any], form: ActivityFormat) -> _Fields:
    counter, flags, value = rows["counter_kind"], rows["flags_"], rows["value"]
    kind = np.full(len(rows), -1, np.int64)
    for number, of_kind in form.counters.items():
        kind[counter == number] = of_kind
    on_host, on_device = kind == RecordKind.CPU_FAULT, kind == RecordKind.GPU_FAULT
    is_fault = on_host | on_device
    columns = {
        "kind": kind,
        "start_ns": rows["start"],
        # For faults on the host the end means nothing, and the value is a program counter.
        "end_ns": np.where(on_host, rows["start"], rows["end"]),
        "address": rows["address"],
        "bytes": np.where(is_fault, 0, value),
        "faults": np.where(on_host, 1, np.where(on_device, value, 0)),
        "cause": np.where(is_fault | (flags >= len(CAUSE_OF_NUMBER)), 0, flags),
    }
    return columns, kind >= 0


def _read_operations(kind: RecordKind, rows: npt.NDArray[Any], _: ActivityFormat) -> _Fields:
    fields = {"start_ns": "start", "end_ns": "end", "bytes": "bytes"}
    columns: dict[str, Any] = {name: rows[field] for name, field in fields.items()}
    return columns | {"kind": kind}, np.ones(len(rows), np.bool_)


def _possible_times(start_ns: Integers, end_ns: Integers) -> tuple[Integers, Integers]:
    """Replace impossible starts and ends: CUPTI writes 0 for a time that it did not take.

    Unsigned times beyond int64 have become negative, and are as impossible.
    """
    is_taken = start_ns > 0
    ends = np.where(is_taken & (end_ns > start_ns), end_ns, start_ns)
    if is_taken.all():
        return start_ns, ends
    # From the record before it, or else the first record with a time, or else 0.
    rows = np.arange(len(start_ns))
    before = np.maximum.accumulate(np.where(is_taken, rows, -1))
    found = start_ns[np.where(before < 0, int(is_taken.argmax()), before)]
    starts = np.where(is_taken, start_ns, np.maximum(found, 0))
    return starts, np.where(is_taken, ends, starts)
