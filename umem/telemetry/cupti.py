"""Records this process's memory operations live through CUPTI, with NVIDIA's cupti-python 13.

Reading an attribute of a cupti-python record takes microseconds, under the interpreter's lock and
in a thread of CUPTI's. The callback therefore only copies a buffer's bytes; they become columns
when the recording has ended. CUPTI's reference explains the numbers in them
(``CUpti_ActivityUnifiedMemoryCounter3``).
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.core.errors import UmemError, UnsupportedError
from umem.core.progress import notify
from umem.core.report import Source
from umem.cuda import Range
from umem.telemetry.driver_events import PROBE_BYTES, prefetch_probe, recorded_bytes
from umem.telemetry.records import (
    CAUSE_OF_NUMBER,
    MAX_RECORDS,
    Integers,
    MigrationRecords,
    RecordKind,
    concatenate,
    make_records,
)
from umem.torch_compat import torch_profiler_runs

__all__ = [
    "ActivityBuffer",
    "ActivityFormat",
    "BufferCallbacks",
    "CuptiCollector",
    "CuptiTiming",
    "activity_format",
    "copy_buffer",
    "read_activities",
    "torch_profiles",
]

_ALIGNMENT = 8
"""Of the records in a buffer."""
_KIND_BYTES = 4
"""A record begins with its kind."""
_ACCESS_TYPES = 5


@dataclass(frozen=True)
class ActivityFormat:
    """How a version of cupti-python numbers and lays out the activities that are recorded.

    Parameters
    ----------
    unified_memory, memcpy, memset : int
        Kinds of activity.
    counters : mapping of int to RecordKind
        Unified-memory counters.
    layouts : mapping of int to dtype
        Memory layout of the records of each kind.
    """

    unified_memory: int
    memcpy: int
    memset: int
    counters: Mapping[int, RecordKind]
    layouts: Mapping[int, np.dtype[Any]]


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
    """Copy the records of a buffer.

    Parameters
    ----------
    activities
        Of any kinds, as cupti-python passes them: all of one buffer, in its order. Each has its
        address in memory, ``ptr``.
    form
        Of that version.
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

    Parameters
    ----------
    buffers
        From :func:`copy_buffer`.
    form
        Of the version of cupti-python.
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
        (form.memcpy, _read_copies),
        (form.memset, _read_memory_sets),
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
        "access": np.where(is_fault & (flags < _ACCESS_TYPES), flags, 0),
    }
    return columns, kind >= 0


def _read_copies(rows: npt.NDArray[Any], _: ActivityFormat) -> _Fields:
    columns, known = _read_memory_sets(rows, _)
    return {**columns, "kind": RecordKind.MEMCPY, "copy_kind": rows["copy_kind"]}, known


def _read_memory_sets(rows: npt.NDArray[Any], _: ActivityFormat) -> _Fields:
    columns = {
        "kind": RecordKind.MEMSET,
        "start_ns": rows["start"],
        "end_ns": rows["end"],
        "bytes": rows["bytes"],
    }
    return columns, np.ones(len(rows), np.bool_)


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


# ------------------------------------------------------------------------ buffers and callbacks

_BUFFER_BYTES = 2**20
"""cupti-python makes an object of every record before it calls back, some 15 us each, and nothing
shows that it is busy: small buffers keep that time short."""

_BETWEEN_FLUSHES_S = 0.02


@dataclass(frozen=True)
class CuptiTiming:
    """How long a collector waits for CUPTI. docs/telemetry.md has the measurements behind it.

    Parameters
    ----------
    first_s : float
        Length of the empty recording that a process begins with. Without it, the first recording of
        a process lacks most of its records.
    answer_s : float
        A probe block is moved when a recording begins, and CUPTI has this time to report it;
        otherwise it is stopped, which takes 2 s, and started again.
    flush_every_s : float
        CUPTI reads the driver's queue when it is flushed; what comes to a full queue is lost.
    quiet_s, quiet_after_s : float
        If no buffer arrives for so long there is none any more: while CUPTI records, and after it
        was told to stop.
    longest_drain_s : float
        Limit of all waiting at the end: other threads may go on making records.
    notice_s : float
        Waiting for longer than this is announced.
    """

    first_s: float = 0.3
    answer_s: float = 0.5
    flush_every_s: float = 0.01
    quiet_s: float = 1.5
    quiet_after_s: float = 0.2
    longest_drain_s: float = 20.0
    notice_s: float = 2.0


class BufferCallbacks:
    """CUPTI's two callbacks, which ask for empty buffers and return full ones.

    CUPTI calls them in threads of its own, which know nothing of recordings. The state is therefore
    the process's: which collector gets the buffers, and how many are in use.
    """

    def __init__(self) -> None:
        self.collector: CuptiCollector | None = None
        """Stays after its recording has ended: it counts late records as lost."""
        self.is_primed = False
        """Whether CUPTI has recorded in this process before."""
        self._lock = threading.Lock()
        self._requested = 0
        self._active = 0
        self._returned = 0

    @property
    def requested(self) -> int:
        """Buffers that CUPTI has asked for and not returned."""
        return self._requested

    def buffer_requested(self) -> tuple[int, int]:
        """Size of a buffer, and the number of records in it (0: as many as fit)."""
        with self._lock:
            self._requested += 1
        return _BUFFER_BYTES, 0

    def buffer_completed(self, activities: Sequence[Any]) -> None:
        """Pass the records of a buffer to the collector."""
        with self._lock:
            self._active += 1
        try:
            if self.collector is not None:
                self.collector.take(activities)
        finally:
            with self._lock:
                self._active -= 1
                # Some may have been requested before these callbacks were registered.
                self._requested = max(self._requested - 1, 0)
                self._returned += 1

    def drain(
        self, flush: Callable[[], object], quiet_s: float, end_s: float, notice_s: float
    ) -> bool:
        """Flush until no buffer arrives any more and no callback is active.

        Parameters
        ----------
        flush
            Makes CUPTI return its buffers.
        quiet_s
            Time without a buffer after which there is none any more.
        end_s
            When to give up, by :func:`time.monotonic`.
        notice_s
            Time after which the wait is announced.

        Returns
        -------
        bool
            Whether all buffers arrived in time.
        """
        begin_s = last_s = time.monotonic()
        returned, is_announced = -1, False
        while True:
            flush()
            now_s = time.monotonic()
            with self._lock:
                if self._active or self._returned != returned:
                    last_s, returned = now_s, self._returned
            if now_s - last_s >= quiet_s:
                return True
            if now_s >= end_s:
                return False
            if not is_announced and now_s - begin_s >= notice_s:
                is_announced = True
                notify(f"CUPTI is still handing over records: at most {end_s - now_s:.0f} s more")
            time.sleep(_BETWEEN_FLUSHES_S)


# ------------------------------------------------------------------------------- the collector

_INSTALL = "pip install 'umem[telemetry]'"
_FLUSH_COMPLETE = 0
_FLUSH_FORCED = 1
_BETWEEN_LOOKS_S = 0.02
_MOST_STARTS = 4

_process_callbacks = BufferCallbacks()


class CuptiCollector:
    """Collects this process's memory operations between `start` and `stop`.

    Parameters
    ----------
    limit
        Most records that are kept. What comes later is counted as dropped.
    unified_memory
        Whether to record migrations and faults too, and not only copies and memory sets. They
        take time at the start and at the end.
    timing
        How long to wait for CUPTI.
    move
        Moves a block of the given size to the device, and returns its former place.
    callbacks
        The process's, unless a test has its own.
    """

    source: Source = "cupti"

    def __init__(
        self,
        limit: int = MAX_RECORDS,
        *,
        unified_memory: bool = True,
        timing: CuptiTiming | None = None,
        move: Callable[[int], Range] = prefetch_probe,
        callbacks: BufferCallbacks = _process_callbacks,
    ) -> None:
        self._limit = limit
        self._has_unified_memory = unified_memory
        self._timing = timing or CuptiTiming()
        self._move = move
        self._callbacks = callbacks
        self._lock = threading.Lock()  # buffers come in threads of CUPTI's
        self._buffers: list[ActivityBuffer] = []
        self._kept = 0
        self._dropped = 0
        self._late = 0
        self._notes: list[str] = []
        self._failure: Exception | None = None
        self._format: ActivityFormat | None = None
        self._cupti: Any = None
        self._enabled: list[Any] = []
        self._end = threading.Event()
        self._flusher = threading.Thread(target=self._keep_flushing, name="umem cupti", daemon=True)
        self.running = False

    def start(self) -> None:
        """Begin. CUDA has to be initialised.

        Raises
        ------
        UnsupportedError
            Where CUPTI is missing, does not fit, or is used by another profiler.
        """
        callbacks = self._callbacks
        if callbacks.collector is not None and callbacks.collector.running:
            raise UnsupportedError("another collector has CUPTI in this process: end it first")
        if torch_profiles():
            raise UnsupportedError(
                "torch.profiler is recording in this process, and CUPTI serves one profiler: end "
                "it first, or begin umem.profile() outside of it"
            )
        self._cupti = cupti = _load()
        with _explained(cupti):
            self._format = activity_format(cupti)
            cupti.activity_register_callbacks(
                callbacks.buffer_requested, callbacks.buffer_completed
            )
            self._finish_last_recording()
            try:
                if self._has_unified_memory and not callbacks.is_primed:
                    self._prime()
                callbacks.collector, self.running = self, True
                if self._has_unified_memory:
                    self._start_until_probe_is_seen()
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
        cupti, longest_s = self._cupti, self._timing.longest_drain_s
        end_s = time.monotonic() + longest_s
        try:
            with _explained(cupti):
                try:
                    self._end.set()
                    if self._flusher.is_alive():
                        self._flusher.join(longest_s)
                    is_quick = not self._has_unified_memory
                    self._drain(
                        self._timing.quiet_after_s if is_quick else self._timing.quiet_s, end_s
                    )
                finally:
                    self._disable()
                # The driver completes its last records when it is told to stop.
                if not self._drain(self._timing.quiet_after_s, end_s):
                    self._notes.append(
                        "the recording is incomplete, and its figures are too low: CUPTI was still "
                        f"handing over records after {longest_s:.0f} s; record fewer steps"
                    )
                lost = ctypes.c_size_t(0)
                # Since CUDA 6 all buffers are global: no context, no stream.
                cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(lost))
        finally:
            with self._lock:
                self.running = False
                buffers, self._buffers = self._buffers, []
        with _explained(cupti):
            if self._failure is not None:
                raise self._failure
            assert self._format is not None
            return read_activities(buffers, self._format), self._dropped + lost.value

    def late(self) -> int:
        """Records that came after the end, so far; they are lost too."""
        return self._late

    def notes(self) -> tuple[str, ...]:
        """What to know before trusting the records; complete after :meth:`stop`."""
        return tuple(self._notes)

    def take(self, activities: Sequence[Any]) -> None:
        """Keep the records of a buffer, up to the limit."""
        assert self._format is not None
        try:
            buffer = copy_buffer(activities, self._format)
        except Exception as error:  # it would be lost in CUPTI's thread
            self._failure = error
            return
        with self._lock:
            if not self.running:
                self._late += len(buffer)
                return
            kept = min(self._limit - self._kept, len(buffer))
            self._buffers.append(ActivityBuffer(buffer.data, buffer.offsets[:kept]))
            self._kept += kept
            self._dropped += len(buffer) - kept

    def _flush(self) -> None:
        self._cupti.activity_flush_all(_FLUSH_FORCED)

    def _keep_flushing(self) -> None:
        """Let CUPTI read the driver's queue again and again, until the recording ends."""
        while not self._end.wait(self._timing.flush_every_s):
            try:
                self._cupti.activity_flush_all(_FLUSH_COMPLETE)
            except Exception:  # `stop` flushes too, and reports it
                return

    def _drain(self, quiet_s: float, end_s: float) -> bool:
        return self._callbacks.drain(self._flush, quiet_s, end_s, self._timing.notice_s)

    def _finish_last_recording(self) -> None:
        """Pass what is left of the last recording to its collector."""
        self._flush()
        if self._callbacks.requested:
            end_s = time.monotonic() + self._timing.longest_drain_s
            self._drain(self._timing.quiet_after_s, end_s)

    def _prime(self) -> None:
        """Make an empty recording, the first of the process."""
        self._callbacks.collector = None
        notify("CUPTI records for the first time in this process: some 2 s before it begins")
        self._enable()
        time.sleep(self._timing.first_s)
        self._flush()
        self._disable()
        self._flush()
        self._callbacks.is_primed = True

    def _start_until_probe_is_seen(self) -> None:
        """Start CUPTI, and again as long as it does not report a block that was moved."""
        self._enable()
        starts = 1
        while not self._reports_probe():
            if starts == _MOST_STARTS:
                self._notes.append(
                    "the figures of unified memory are not reliable: CUPTI reported no record of a "
                    "block that was moved when the recording began"
                )
                break
            self._disable()
            self._enable()
            starts += 1
        with self._lock:
            self._buffers.clear()
            self._kept = self._dropped = 0

    def _reports_probe(self) -> bool:
        """Whether CUPTI reports a block that is moved now; True where none can be moved."""
        since_ns = self.now_ns()  # an earlier probe may have had the same address
        try:
            block = self._move(PROBE_BYTES)
        except UmemError:
            return True
        end_s = time.monotonic() + self._timing.answer_s
        while not self._has_record_in(block, since_ns):
            if time.monotonic() >= end_s:
                return False
            time.sleep(_BETWEEN_LOOKS_S)
            self._flush()
        return True

    def _has_record_in(self, block: Range, since_ns: int) -> bool:
        assert self._format is not None
        with self._lock:
            buffers = list(self._buffers)
        records = read_activities(buffers, self._format)
        return recorded_bytes(records.select(records.start_ns >= since_ns), block) > 0

    def _enable(self) -> None:
        assert self._format is not None
        kinds = self._cupti.ActivityKind
        wanted = [kinds.MEMCPY, kinds.MEMSET]
        if self._has_unified_memory:
            _configure_counters(self._cupti, self._format)
            wanted.insert(0, kinds.UNIFIED_MEMORY_COUNTER)
        for kind in wanted:
            self._cupti.activity_enable(kind)
            self._enabled.append(kind)

    def _disable(self) -> None:
        while self._enabled:
            self._cupti.activity_disable(self._enabled.pop())


def torch_profiles() -> bool:
    """Whether torch.profiler is recording in this process.

    CUPTI has one pair of buffer callbacks: a later profiler takes the earlier one's records without
    an error, so torch has to be asked.
    """
    return torch_profiler_runs()


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


def _configure_counters(cupti: Any, form: ActivityFormat) -> None:
    settings = np.zeros(len(form.counters), cupti.activity_unified_memory_counter_config_dtype)
    # Scope and device have had no effect since CUDA 7, but are checked.
    settings["scope"] = int(cupti.ActivityUnifiedMemoryCounterScope.PROCESS_SINGLE_DEVICE)
    settings["kind"] = list(form.counters)
    settings["device_id"] = 0
    settings["enable"] = 1
    cupti.activity_configure_unified_memory_counter(settings.ctypes.data, len(settings))


_REMEDIES = {
    "MULTIPLE_SUBSCRIBERS": (
        "another profiler has this process (Nsight Systems, torch.profiler, a debugger): end it, "
        "or record with Nsight Systems alone and read its export, `nsys export --type sqlite` and "
        "`umem report FILE.sqlite`"
    ),
    "PRIVILEGES": (
        "the driver lets only administrators profile: load it with "
        "NVreg_RestrictProfilingToAdminUsers=0, or give the process CAP_SYS_ADMIN"
    ),
    "UM_PROFILING_NOT_SUPPORTED": (
        "this GPU has no counters of unified memory; `umem doctor` shows what it has"
    ),
    "": f"install the cupti-python of the CUDA that torch uses, {_INSTALL}",
}
"""By a part of CUPTI's message."""


@contextmanager
def _explained(cupti: Any) -> Iterator[None]:
    """Turn CUPTI's errors, and those of bindings that lack a call, into umem's."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"this version of cupti-python does not fit ({error}): {_INSTALL}"
        ) from error
    except cupti.cuptiError as error:
        remedy = next(words for part, words in _REMEDIES.items() if part in str(error))
        raise UnsupportedError(f"CUPTI refuses ({error}): {remedy}") from error
    except (OSError, RuntimeError) as error:
        # cupti-python looks for the driver and for libcupti only at its first call.
        raise UnsupportedError(
            f"CUPTI does not work here ({type(error).__name__}: {error}): it needs NVIDIA's driver "
            f"and the libcupti of the CUDA that torch uses, {_INSTALL}"
        ) from error
