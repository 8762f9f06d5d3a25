"""CUPTI's activities as it hands them over: copied in its callback, read afterwards.

An attribute of a cupti-python record costs microseconds, under the interpreter's lock and in a
thread of CUPTI's. So nothing is read there: the bytes of a buffer are copied, and become columns
when the recording has ended. What the numbers in them mean is in CUPTI's reference
(``CUpti_ActivityUnifiedMemoryCounter3``).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.telemetry._records import (
    CAUSE_OF_NUMBER,
    MigrationRecords,
    RecordKind,
    concatenated,
    records_of,
)

__all__ = ["Numbers", "RawActivities", "copied", "numbers_of", "read_activities"]

_ALIGNMENT = 8
"""Of the records in a buffer."""
_KIND_BYTES = 4
"""A record begins with its kind."""
_ACCESS_TYPES = 5

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Numbers:
    """CUPTI's numbers of the kinds of activity, and of unified-memory counters by record kind.

    `layouts` says how the records of each of the three kinds lie in memory.
    """

    unified_memory: int
    memcpy: int
    memset: int
    counters: dict[int, RecordKind]
    layouts: Mapping[int, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class RawActivities:
    """The bytes of one buffer, and where in them each record begins."""

    data: bytes
    offsets: _Integers

    def __len__(self) -> int:
        return len(self.offsets)


def numbers_of(cupti: Any) -> Numbers:
    """The numbers and layouts that a version of cupti-python uses.

    Parameters
    ----------
    cupti
        The module ``cupti.cupti``.
    """
    counters = cupti.ActivityUnifiedMemoryCounterKind
    kinds = cupti.ActivityKind
    names = {
        int(kinds.UNIFIED_MEMORY_COUNTER): "unified_memory_counter",
        int(kinds.MEMCPY): "memcpy",
        int(kinds.MEMSET): "memset",
    }
    return Numbers(
        unified_memory=int(kinds.UNIFIED_MEMORY_COUNTER),
        memcpy=int(kinds.MEMCPY),
        memset=int(kinds.MEMSET),
        counters={
            int(counters.BYTES_TRANSFER_HTOD): RecordKind.TO_DEVICE,
            int(counters.BYTES_TRANSFER_DTOH): RecordKind.TO_HOST,
            int(counters.GPU_PAGE_FAULT): RecordKind.GPU_FAULT,
            int(counters.CPU_PAGE_FAULT_COUNT): RecordKind.CPU_FAULT,
        },
        layouts={kind: _layout(cupti, name) for kind, name in names.items()},
    )


def _layout(cupti: Any, name: str) -> np.dtype[Any]:
    """The newest layout of a kind: ``activity_memcpy6_dtype`` and the like."""
    found = [re.fullmatch(rf"activity_{name}(\d*)_dtype", it) for it in dir(cupti)]
    versions = [int(it[1] or 1) for it in found if it]
    if not versions:
        raise AttributeError(f"no layout of {name} records")
    newest = max(versions)
    layout = getattr(cupti, f"activity_{name}{newest if newest > 1 else ''}_dtype")
    return np.dtype(layout)


def copied(activities: Sequence[Any], numbers: Numbers) -> RawActivities:
    """Copy the records of a buffer.

    Parameters
    ----------
    activities
        Of any kinds, as cupti-python hands them over: all of one buffer, in its order. Each has its
        address in memory, ``ptr``.
    numbers
        Of that version.
    """
    if not activities:
        return RawActivities(b"", np.zeros(0, np.int64))
    # Of all the records only two are asked, because asking is what takes time.
    first, last = int(activities[0].ptr), int(activities[-1].ptr)
    data = _bytes_of(first, last, numbers)
    offsets = _walked(data, numbers)
    if len(offsets) != len(activities) or offsets[-1] != last - first:
        # They do not lie one behind the other as we know them: then each has to say where it is.
        pointers = [int(it.ptr) for it in activities]
        first = min(pointers)
        data = _bytes_of(first, max(pointers), numbers)
        offsets = [pointer - first for pointer in pointers]
    return RawActivities(data, np.array(offsets, np.int64))


def _bytes_of(first: int, last: int, numbers: Numbers) -> bytes:
    kind = int.from_bytes(ctypes.string_at(last, _KIND_BYTES), "little", signed=True)
    layout = numbers.layouts.get(kind)
    return ctypes.string_at(first, last - first + (layout.itemsize if layout else _KIND_BYTES))


def _walked(data: bytes, numbers: Numbers) -> list[int]:
    """Where records begin that lie one behind the other, up to one of a kind that is not known."""
    sizes = {kind: layout.itemsize for kind, layout in numbers.layouts.items()}
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


def read_activities(buffers: Sequence[RawActivities], numbers: Numbers) -> MigrationRecords:
    """Records of CUPTI's activities, by start; those of other kinds are left out.

    What has a time that cannot be keeps its bytes: it gets the start of the record in front of it,
    and no length.

    Parameters
    ----------
    buffers
        From :func:`copied`.
    numbers
        Of the version of cupti-python.
    """
    return concatenated(_read(it, numbers) for it in buffers)


def _read(raw: RawActivities, numbers: Numbers) -> MigrationRecords:
    if not len(raw):
        return records_of([])
    kinds = np.ndarray(
        (len(raw.data) - _KIND_BYTES) // _ALIGNMENT + 1, np.int32, raw.data, strides=(_ALIGNMENT,)
    )[raw.offsets // _ALIGNMENT]
    table = np.zeros((len(raw), 9), np.int64)
    known = np.zeros(len(raw), np.bool_)
    for kind, fill in (
        (numbers.unified_memory, _fill_counters),
        (numbers.memcpy, _fill_copies),
        (numbers.memset, _fill_memory_sets),
    ):
        rows = np.flatnonzero(kinds == kind)
        if len(rows):
            columns = _columns(raw, raw.offsets[rows], numbers.layouts[kind])
            table[rows], known[rows] = fill(columns, numbers)
    table = table[known]
    table[:, 1:3] = _possible(table[:, 1], table[:, 2])
    return records_of(table)


_Columns = Callable[[str], _Integers]
_Filled = tuple[_Integers, npt.NDArray[np.bool_]]


def _columns(raw: RawActivities, offsets: _Integers, layout: np.dtype[Any]) -> _Columns:
    """A function that returns a field of the records at some offsets, by its name."""
    # A record could begin at every eighth byte: so a field is an array with that stride.
    places = (len(raw.data) - layout.itemsize) // _ALIGNMENT + 1
    every = np.ndarray(places, layout, raw.data, strides=(_ALIGNMENT,))
    at = offsets // _ALIGNMENT

    def column(name: str) -> _Integers:
        # Unsigned times beyond what a column holds become negative, which no time is.
        return every[name][at].astype(np.int64)

    return column


def _fill_counters(column: _Columns, numbers: Numbers) -> _Filled:
    counter, flags = column("counter_kind"), column("flags_")
    kind = np.full(len(counter), -1, np.int64)
    for number, of_kind in numbers.counters.items():
        kind[counter == number] = of_kind
    start_ns, value = column("start"), column("value")
    on_host, on_device = kind == RecordKind.CPU_FAULT, kind == RecordKind.GPU_FAULT
    faults = on_host | on_device
    table = np.zeros((len(kind), 9), np.int64)
    table[:, 0] = kind
    table[:, 1] = start_ns
    # On the host the end means nothing, and the value is the program counter of what faulted.
    table[:, 2] = np.where(on_host, start_ns, column("end"))
    table[:, 3] = column("address")
    table[:, 4] = np.where(faults, 0, value)
    table[:, 5] = np.where(on_host, 1, np.where(on_device, value, 0))
    table[:, 6] = np.where(faults | (flags >= len(CAUSE_OF_NUMBER)), 0, flags)
    table[:, 7] = np.where(faults & (flags < _ACCESS_TYPES), flags, 0)
    return table, kind >= 0


def _fill_copies(column: _Columns, _: Numbers) -> _Filled:
    table, known = _filled(column, RecordKind.MEMCPY)
    table[:, 8] = column("copy_kind")
    return table, known


def _fill_memory_sets(column: _Columns, _: Numbers) -> _Filled:
    return _filled(column, RecordKind.MEMSET)


def _filled(column: _Columns, kind: RecordKind) -> _Filled:
    start_ns = column("start")
    table = np.zeros((len(start_ns), 9), np.int64)
    table[:, 0] = kind
    table[:, 1], table[:, 2], table[:, 4] = start_ns, column("end"), column("bytes")
    return table, np.ones(len(table), np.bool_)


def _possible(start_ns: _Integers, end_ns: _Integers) -> _Integers:
    """Starts and ends that can be, side by side: CUPTI writes 0 for a time that it did not take."""
    taken = start_ns > 0
    ends = np.where(taken & (end_ns > start_ns), end_ns, start_ns)
    if taken.all():
        return np.stack([start_ns, ends], axis=1)
    # The record in front of it, or the first one that has a time, or the start of the clock.
    rows = np.arange(len(start_ns))
    before = np.maximum.accumulate(np.where(taken, rows, -1))
    found = start_ns[np.where(before < 0, int(taken.argmax()), before)]
    starts = np.where(taken, start_ns, np.where(found > 0, found, 0))
    return np.stack([starts, np.where(taken, ends, starts)], axis=1)
