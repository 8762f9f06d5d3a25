"""CUPTI's activities as it hands them over: copied in its callback, read afterwards.

An attribute of a cupti-python record costs microseconds, under the interpreter's lock and in a
thread of CUPTI's. So nothing is read there: the bytes of a buffer are copied, and become columns
when the recording has ended. What the numbers in them mean is in CUPTI's reference
(``CUpti_ActivityUnifiedMemoryCounter3``).
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from umem.core.errors import UmemError, UnsupportedError
from umem.core.progress import notify
from umem.core.report import Source
from umem.cuda import Range
from umem.telemetry.known_transfers import KNOWN_BYTES, moved_block, told_bytes
from umem.telemetry.records import (
    CAUSE_OF_NUMBER,
    MAX_RECORDS,
    MigrationRecords,
    RecordKind,
    concatenated,
    records_of,
)

__all__ = [
    "LONGEST_DRAIN_S",
    "Buffers",
    "CuptiCollector",
    "Numbers",
    "RawActivities",
    "Taker",
    "copied",
    "numbers_of",
    "read_activities",
    "torch_profiles",
]

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


# Buffers on their way: CUPTI asks this process for them, and hands them back full.
#
# It does so in threads of its own, which know nothing of recordings. So who gets what they bring,
# and how many of them are at work, is kept for the whole process.

_BUFFER_BYTES = 2**20
"""cupti-python makes an object of every record before it calls us, for some 15 us each, and nobody
can see it work: buffers are small so that this is over soon."""

_BETWEEN_FLUSHES_S = 0.02
LONGEST_DRAIN_S = 20.0
"""In all: other threads of the process may go on making records."""
_NOTICE_S = 2.0


class Taker(Protocol):
    """Gets the records of full buffers, while its recording is running and afterwards."""

    running: bool

    def take(self, activities: Sequence[Any]) -> None:
        """Receive the records of one buffer."""


class Buffers:
    """CUPTI's two callbacks, and what they were called for."""

    def __init__(self) -> None:
        self.taker: Taker | None = None
        """Stays when its recording has ended, so that what comes late is counted as lost there."""
        self.is_primed = False
        """Whether CUPTI has recorded in this process before."""
        self._lock = threading.Lock()
        self._out = 0
        self._inside = 0
        self._returned = 0

    @property
    def out(self) -> int:
        """Buffers that CUPTI has asked for and not brought back."""
        return self._out

    def wanted(self) -> tuple[int, int]:
        """Size of a buffer, and the number of records in it (0: as many as fit)."""
        with self._lock:
            self._out += 1
        return _BUFFER_BYTES, 0

    def full(self, activities: Sequence[Any]) -> None:
        """Give the records of a buffer to the taker."""
        with self._lock:
            self._inside += 1
        try:
            taker = self.taker
            if taker is not None:
                taker.take(activities)
        finally:
            with self._lock:
                self._inside -= 1
                # Some may have been asked for before we were there to count.
                self._out = max(self._out - 1, 0)
                self._returned += 1

    def drain(self, flush: Callable[[], object], quiet_s: float, end_s: float) -> bool:
        """Ask for buffers until none come any more and no callback is at work.

        Parameters
        ----------
        flush
            Asks CUPTI for what it has.
        quiet_s
            Without a new buffer for so long, there is none any more.
        end_s
            When to give up, by :func:`time.monotonic`.

        Returns
        -------
        bool
            Whether it became quiet in time.
        """
        begin_s = last_s = time.monotonic()
        returned, told = -1, False
        while True:
            flush()
            now_s = time.monotonic()
            with self._lock:
                if self._inside or self._returned != returned:
                    last_s, returned = now_s, self._returned
            if now_s - last_s >= quiet_s:
                return True
            if now_s >= end_s:
                return False
            if not told and now_s - begin_s >= _NOTICE_S:
                told = True
                notify(f"CUPTI is still handing over records: at most {end_s - now_s:.0f} s more")
            time.sleep(_BETWEEN_FLUSHES_S)


# Memory operations of this process, live, through CUPTI.
#
# The calls are those of NVIDIA's cupti-python 13.

_INSTALL = "pip install 'umem[telemetry]'"
_FLUSH_COMPLETE = 0
_FLUSH_FORCED = 1

_FIRST_S = 0.3
"""CUPTI is asked to record for so long, once in a process, before it is relied on: without that,
the first recording of a process lacks most of its records. docs/telemetry.md has the figures."""
_ANSWER_S = 0.5
_BETWEEN_LOOKS_S = 0.02
_MOST_STARTS = 4
"""A block is moved when a recording begins, and CUPTI has so long to hand over a record of it;
otherwise it is stopped, which takes 2 s, and started again."""
_FLUSH_EVERY_S = 0.01
"""CUPTI reads the driver's queue when it is flushed, and what comes to a full queue is lost.
docs/telemetry.md has how much that was, on one machine."""
_QUIET_S = 1.5
"""Without a new buffer for so long there is none any more; once CUPTI was told to stop, it is
`_QUIET_AFTER_S`."""
_QUIET_AFTER_S = 0.2


class CuptiCollector:
    """Collects this process's memory operations between `start` and `stop`.

    Parameters
    ----------
    limit
        Most records that are kept. What comes later is counted as dropped.
    unified_memory
        Whether to ask for migrations and faults too, and not for copies and memory sets alone. They
        take preparation, and time in the end.
    """

    source: Source = "cupti"

    def __init__(self, limit: int = MAX_RECORDS, *, unified_memory: bool = True) -> None:
        self._limit = limit
        self._has_unified_memory = unified_memory
        self._lock = threading.Lock()  # buffers come in threads of CUPTI's
        self._raw: list[RawActivities] = []
        self._kept = 0
        self._dropped = 0
        self._late = 0
        self._notes: list[str] = []
        self._failure: Exception | None = None
        self._numbers: Numbers | None = None
        self._cupti: Any = None
        self._enabled: list[Any] = []
        self._flusher = _Flusher(lambda: self._cupti.activity_flush_all(_FLUSH_COMPLETE))
        self.running = False

    def start(self) -> None:
        """Begin. CUDA has to be initialised.

        Raises
        ------
        UnsupportedError
            Where CUPTI is missing, does not fit, or is in another profiler's hands.
        """
        if _buffers.taker is not None and _buffers.taker.running:
            raise UnsupportedError("another collector has CUPTI in this process: end it first")
        _refuse_beside_torch()
        self._cupti = cupti = _load()
        with _explained(cupti):
            self._numbers = numbers_of(cupti)
            cupti.activity_register_callbacks(_buffers.wanted, _buffers.full)
            self._discard()
            try:
                if self._has_unified_memory and not _buffers.is_primed:
                    self._prime()
                _buffers.taker, self.running = self, True
                if self._has_unified_memory:
                    self._begin()
                    self._flusher.start()
                else:
                    self._enable()
            except BaseException:
                self.running = False
                self._disable()
                raise

    def now_ns(self) -> int:
        """The time on the clock of the records."""
        return int(self._cupti.get_timestamp())

    def stop(self) -> tuple[MigrationRecords, int]:
        """End, once the device has finished its work.

        Returns
        -------
        tuple of MigrationRecords and int
            The records by start, and the number of those that were dropped.

        Raises
        ------
        UnsupportedError
            If CUPTI failed meanwhile.
        """
        cupti = self._cupti
        end_s = time.monotonic() + LONGEST_DRAIN_S
        try:
            with _explained(cupti):
                try:
                    self._flusher.stop(LONGEST_DRAIN_S)
                    quiet_s = _QUIET_S if self._has_unified_memory else _QUIET_AFTER_S
                    _buffers.drain(self._flush, quiet_s, end_s)
                finally:
                    self._disable()
                # The driver completes its last records when it is told to stop.
                if not _buffers.drain(self._flush, _QUIET_AFTER_S, end_s):
                    self._notes.append(
                        "the recording is incomplete, and its figures are too low: CUPTI was still "
                        f"handing over records after {LONGEST_DRAIN_S:.0f} s; record fewer steps"
                    )
                lost = ctypes.c_size_t(0)
                # Since CUDA 6 all buffers are global: no context, no stream.
                cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(lost))
        finally:
            with self._lock:
                self.running = False
                raw, self._raw = self._raw, []
        with _explained(cupti):
            if self._failure is not None:
                raise self._failure
            assert self._numbers is not None
            return read_activities(raw, self._numbers), self._dropped + lost.value

    def late(self) -> int:
        """Records that came after the end, so far: they are lost too."""
        return self._late

    def notes(self) -> tuple[str, ...]:
        """What to know before trusting the records; complete after :meth:`stop`."""
        return tuple(self._notes)

    def take(self, activities: Sequence[Any]) -> None:
        """Keep the records of a buffer, up to the limit."""
        assert self._numbers is not None
        try:
            raw = copied(activities, self._numbers)
        except Exception as error:  # it would be lost in CUPTI's thread
            self._failure = error
            return
        with self._lock:
            if not self.running:
                self._late += len(raw)
                return
            room = self._limit - self._kept
            kept = min(room, len(raw))
            self._raw.append(RawActivities(raw.data, raw.offsets[:kept]))
            self._kept += kept
            self._dropped += len(raw) - kept

    def _flush(self) -> None:
        self._cupti.activity_flush_all(_FLUSH_FORCED)

    def _discard(self) -> None:
        """Let the taker before us have what is left of its recording."""
        self._flush()
        if _buffers.out:
            _buffers.drain(self._flush, _QUIET_AFTER_S, time.monotonic() + LONGEST_DRAIN_S)

    def _prime(self) -> None:
        """Let CUPTI have its first recording of the process, of nothing."""
        _buffers.taker = None
        notify("CUPTI records for the first time in this process: some 2 s before it begins")
        self._enable()
        time.sleep(_FIRST_S)
        self._flush()
        self._disable()
        self._flush()
        _buffers.is_primed = True

    def _begin(self) -> None:
        """Have CUPTI record, anew as long as it does not hand over what is known to have moved."""
        self._enable()
        starts = 1
        while not self._answers():
            if starts == _MOST_STARTS:
                self._notes.append(
                    "the figures of unified memory are not to be believed: CUPTI handed over no "
                    "record of a block that was moved when the recording began"
                )
                break
            self._disable()
            self._enable()
            starts += 1
        with self._lock:
            self._raw.clear()
            self._kept = self._dropped = 0

    def _answers(self) -> bool:
        """Whether there is a record of a block that is moved now."""
        import torch

        if not torch.cuda.is_available():
            return True  # nothing can be told of it
        since_ns = self.now_ns()  # an earlier block may have been in the same place
        try:
            block = moved_block(KNOWN_BYTES)
        except UmemError:
            return True
        end_s = time.monotonic() + _ANSWER_S
        while not self._has_record_in(block, since_ns):
            if time.monotonic() >= end_s:
                return False
            time.sleep(_BETWEEN_LOOKS_S)
            self._flush()
        return True

    def _has_record_in(self, block: Range, since_ns: int) -> bool:
        assert self._numbers is not None
        with self._lock:
            raw = list(self._raw)
        records = read_activities(raw, self._numbers)
        return told_bytes(records.taken(records.start_ns >= since_ns), block) > 0

    def _enable(self) -> None:
        assert self._numbers is not None
        if self._has_unified_memory:
            _configure_counters(self._cupti, self._numbers)
        for kind in self._kinds():
            self._cupti.activity_enable(kind)
            self._enabled.append(kind)

    def _disable(self) -> None:
        while self._enabled:
            self._cupti.activity_disable(self._enabled.pop())

    def _kinds(self) -> list[Any]:
        kinds = self._cupti.ActivityKind
        copies = [kinds.MEMCPY, kinds.MEMSET]
        return [kinds.UNIFIED_MEMORY_COUNTER, *copies] if self._has_unified_memory else copies


class _Flusher:
    """Has CUPTI read the driver's queue again and again, in a thread, between start and stop."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umem flusher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._end.wait(_FLUSH_EVERY_S):
            try:
                self._flush()
            except Exception:  # the collector flushes too when it ends, and tells
                return


_buffers = Buffers()


def torch_profiles() -> bool:
    """Whether torch.profiler is at work in this process.

    CUPTI has one pair of buffer callbacks: the later profiler takes the earlier one's records. It
    does so without an error, so that torch has to be asked.
    """
    torch_profiler = sys.modules.get("torch.autograd.profiler")
    return bool(getattr(torch_profiler, "_is_profiler_enabled", False))


def _refuse_beside_torch() -> None:
    if torch_profiles():
        raise UnsupportedError(
            "torch.profiler is recording in this process, and CUPTI serves one profiler: end it "
            "first, or begin umem.profile() outside of it"
        )


def _load() -> Any:
    try:
        from cupti import cupti
    except ImportError as error:
        raise UnsupportedError(
            f"recording migration needs CUPTI's Python bindings ({error}): {_INSTALL}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"CUPTI does not load ({error}): install the cupti-python of the CUDA that torch "
            f"uses, {_INSTALL}"
        ) from error
    return cupti


def _configure_counters(cupti: Any, numbers: Numbers) -> None:
    settings = np.zeros(len(numbers.counters), cupti.activity_unified_memory_counter_config_dtype)
    # Scope and device have meant nothing since CUDA 7, but are checked.
    settings["scope"] = int(cupti.ActivityUnifiedMemoryCounterScope.PROCESS_SINGLE_DEVICE)
    settings["kind"] = list(numbers.counters)
    settings["device_id"] = 0
    settings["enable"] = 1
    cupti.activity_configure_unified_memory_counter(settings.ctypes.data, len(settings))


@contextmanager
def _explained(cupti: Any) -> Iterator[None]:
    """Turn CUPTI's errors, and those of bindings that lack a call, into ours."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"this version of cupti-python does not fit ({error}): {_INSTALL}"
        ) from error
    except cupti.cuptiError as error:
        raise UnsupportedError(f"CUPTI refuses ({error}): {_remedy(str(error))}") from error
    except (OSError, RuntimeError) as error:
        # cupti-python looks for the driver and for libcupti at its first call, and not before.
        raise UnsupportedError(
            f"CUPTI does not work here ({type(error).__name__}: {error}): it needs NVIDIA's driver "
            f"and the libcupti of the CUDA that torch uses, {_INSTALL}"
        ) from error


def _remedy(said: str) -> str:
    if "MULTIPLE_SUBSCRIBERS" in said:
        return (
            "another profiler has this process (Nsight Systems, torch.profiler, a debugger): end "
            "it, or record with Nsight Systems alone and read its export, `nsys export --type "
            "sqlite` and `umem report FILE.sqlite`"
        )
    if "PRIVILEGES" in said:
        return (
            "the driver lets only administrators profile: load it with "
            "NVreg_RestrictProfilingToAdminUsers=0, or give the process CAP_SYS_ADMIN"
        )
    if "UM_PROFILING_NOT_SUPPORTED" in said:
        return "this GPU has no counters of unified memory; `umem doctor` shows what it has"
    return f"install the cupti-python of the CUDA that torch uses, {_INSTALL}"
