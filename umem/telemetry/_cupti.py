"""Memory operations of this process, live, through CUPTI.

The calls and the records' attributes are those of NVIDIA's cupti-python 13; what the numbers in the
records mean is in CUPTI's reference (``CUpti_ActivityUnifiedMemoryCounter3``).
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from umem.errors import UnsupportedError
from umem.telemetry._records import (
    CAUSE_OF_NUMBER,
    MAX_RECORDS,
    MigrationRecords,
    RecordKind,
    Row,
    concatenated,
    records_of,
)

__all__ = ["CuptiCollector", "Numbers", "numbers_of", "read_activities"]

_BUFFER_BYTES = 8 * 2**20
_INSTALL = "pip install 'umem[telemetry]'"
_FLUSH_FORCED = 1
_BETWEEN_FLUSHES_S = 0.02
_QUIET_S = 0.2
"""Without a new record for so long, there is none any more."""
_LONGEST_DRAIN_S = 3.0
"""In all: other threads of the process may go on making records."""

_ACCESS_TYPES = 5
_LATEST_NS = 2**63 - 1
"""What a column holds."""


@dataclass(frozen=True)
class Numbers:
    """CUPTI's numbers of the kinds of activity, and of unified-memory counters by record kind."""

    unified_memory: int
    memcpy: int
    memset: int
    counters: dict[int, RecordKind]


def numbers_of(cupti: Any) -> Numbers:
    """The numbers that a version of cupti-python uses.

    Parameters
    ----------
    cupti
        The module ``cupti.cupti``.
    """
    counters = cupti.ActivityUnifiedMemoryCounterKind
    return Numbers(
        unified_memory=int(cupti.ActivityKind.UNIFIED_MEMORY_COUNTER),
        memcpy=int(cupti.ActivityKind.MEMCPY),
        memset=int(cupti.ActivityKind.MEMSET),
        counters={
            int(counters.BYTES_TRANSFER_HTOD): RecordKind.TO_DEVICE,
            int(counters.BYTES_TRANSFER_DTOH): RecordKind.TO_HOST,
            int(counters.GPU_PAGE_FAULT): RecordKind.GPU_FAULT,
            int(counters.CPU_PAGE_FAULT_COUNT): RecordKind.CPU_FAULT,
        },
    )


def read_activities(activities: Iterable[Any], numbers: Numbers) -> MigrationRecords:
    """Records of CUPTI's activities; those of other kinds are left out.

    Parameters
    ----------
    activities
        Of kinds ``UNIFIED_MEMORY_COUNTER`` (with ``counter_kind``, ``value``, ``start``, ``end``,
        ``address``, ``flags_``), ``MEMCPY`` (``bytes``, ``copy_kind``, ``start``, ``end``) and
        ``MEMSET`` (``bytes``, ``start``, ``end``), as cupti-python hands them over.
    numbers
        Of that version.
    """
    rows: list[Row] = []
    last_ns = 0
    for activity in activities:
        row = _row(activity, numbers)
        if row is None:
            continue
        if row[1] > _LATEST_NS:  # some page faults of the host come with no time that can be
            row = (row[0], last_ns, last_ns, *row[3:])
        last_ns = row[1]
        rows.append(row)
    return records_of(rows)


def _row(activity: Any, numbers: Numbers) -> Row | None:
    if activity.kind == numbers.unified_memory:
        return _counter_row(activity, numbers.counters.get(int(activity.counter_kind)))
    if activity.kind == numbers.memcpy:
        start_ns, end_ns = _times(activity)
        size, how = int(activity.bytes), int(activity.copy_kind)
        return (RecordKind.MEMCPY, start_ns, end_ns, 0, size, 0, 0, 0, how)
    if activity.kind == numbers.memset:
        start_ns, end_ns = _times(activity)
        return (RecordKind.MEMSET, start_ns, end_ns, 0, int(activity.bytes), 0, 0, 0, 0)
    return None


def _counter_row(activity: Any, kind: RecordKind | None) -> Row | None:
    if kind is None:
        return None
    address, value, flags = int(activity.address), int(activity.value), int(activity.flags_)
    start_ns, end_ns = _times(activity)
    if kind == RecordKind.CPU_FAULT:
        # The value is the program counter of what faulted, and the end means nothing.
        return (kind, start_ns, start_ns, address, 0, 1, 0, _access(flags), 0)
    if kind == RecordKind.GPU_FAULT:
        return (kind, start_ns, end_ns, address, 0, value, 0, _access(flags), 0)
    cause = flags if flags < len(CAUSE_OF_NUMBER) else 0
    return (kind, start_ns, end_ns, address, value, 0, cause, 0, 0)


def _times(activity: Any) -> tuple[int, int]:
    # CUPTI writes 0 for a time that it could not take.
    start_ns = int(activity.start)
    return start_ns, max(int(activity.end), start_ns)


def _access(flags: int) -> int:
    return flags if flags < _ACCESS_TYPES else 0


class CuptiCollector:
    """Collects this process's memory operations between `start` and `stop`.

    Parameters
    ----------
    limit
        Most records that are kept. What comes later is counted as dropped.
    """

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # buffers come in a thread of CUPTI's
        self._chunks: list[MigrationRecords] = []
        self._kept = 0
        self._dropped = 0
        self._failure: Exception | None = None
        self._numbers: Numbers | None = None
        self._cupti: Any = None

    def start(self) -> None:
        """Begin. CUDA has to be initialised.

        Raises
        ------
        UnsupportedError
            Where CUPTI is missing, does not fit, or is in another profiler's hands.
        """
        global _active
        if _active is not None:
            raise UnsupportedError(
                "another umem.profile() is recording in this process: end it first"
            )
        _refuse_beside_torch()
        self._cupti = cupti = _load()
        with _explained(cupti):
            self._numbers = numbers_of(cupti)
            kinds = self._kinds()
            started = []
            _active = self
            try:
                cupti.activity_register_callbacks(_buffer_wanted, _buffer_full)
                _configure_counters(cupti, self._numbers)
                for kind in kinds:
                    cupti.activity_enable(kind)
                    started.append(kind)
            except BaseException:
                _active = None
                for kind in started:
                    cupti.activity_disable(kind)
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
        global _active
        cupti = self._cupti
        try:
            with _explained(cupti):
                try:
                    self._drain()
                finally:
                    for kind in reversed(self._kinds()):
                        cupti.activity_disable(kind)
                lost = ctypes.c_size_t(0)
                # Since CUDA 6 all buffers are global: no context, no stream.
                cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(lost))
        finally:
            _active = None
        if self._failure is not None:
            with _explained(cupti):
                raise self._failure
        with self._lock:
            return concatenated(self._chunks), self._dropped + lost.value

    def _drain(self) -> None:
        """Ask for records until none come any more.

        The driver hands over those of unified memory some time after the device is done.
        """
        end_s = time.monotonic() + _LONGEST_DRAIN_S
        last_s, taken = time.monotonic(), -1
        while time.monotonic() < min(end_s, last_s + _QUIET_S):
            self._cupti.activity_flush_all(_FLUSH_FORCED)
            if self._kept + self._dropped != taken:
                last_s, taken = time.monotonic(), self._kept + self._dropped
            time.sleep(_BETWEEN_FLUSHES_S)

    def take(self, activities: Iterable[Any]) -> None:
        """Keep the records of a buffer, up to the limit."""
        assert self._numbers is not None
        try:
            records = read_activities(activities, self._numbers)
        except Exception as error:  # it would be lost in CUPTI's thread
            self._failure = error
            return
        with self._lock:
            room = self._limit - self._kept
            self._chunks.append(records.taken(np.arange(min(room, len(records)))))
            self._kept += min(room, len(records))
            self._dropped += max(len(records) - room, 0)

    def _kinds(self) -> list[Any]:
        kinds = self._cupti.ActivityKind
        return [kinds.UNIFIED_MEMORY_COUNTER, kinds.MEMCPY, kinds.MEMSET]


_active: CuptiCollector | None = None


def _buffer_wanted() -> tuple[int, int]:
    """Size of a buffer, and the number of records in it (0: as many as fit)."""
    return _BUFFER_BYTES, 0


def _buffer_full(activities: Iterable[Any]) -> None:
    collector = _active
    if collector is not None:
        collector.take(activities)


def _refuse_beside_torch() -> None:
    """CUPTI has one pair of buffer callbacks: the later profiler takes the earlier one's records.

    It does so without an error, so that torch has to be asked.
    """
    torch_profiler = sys.modules.get("torch.autograd.profiler")
    if getattr(torch_profiler, "_is_profiler_enabled", False):
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
