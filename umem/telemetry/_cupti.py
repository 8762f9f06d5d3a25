"""Memory operations of this process, live, through CUPTI.

The calls are those of NVIDIA's cupti-python 13.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from umem.cuda import Range
from umem.errors import UmemError, UnsupportedError
from umem.notices import notify
from umem.report import Source
from umem.telemetry._activities import (
    Numbers,
    RawActivities,
    copied,
    numbers_of,
    read_activities,
)
from umem.telemetry._buffers import LONGEST_DRAIN_S, Buffers
from umem.telemetry._known import KNOWN_BYTES, moved_block, told_bytes
from umem.telemetry._records import MAX_RECORDS, MigrationRecords

__all__ = ["CuptiCollector", "torch_profiles"]

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
