"""Records this process's memory operations live through CUPTI, with NVIDIA's cupti-python 13."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from umem.core.errors import UmemError, UnsupportedError
from umem.core.install import install_command
from umem.core.progress import notify
from umem.core.report import Source
from umem.cuda import Range
from umem.telemetry.cupti_activities import (
    ActivityBuffer,
    ActivityFormat,
    activity_format,
    copy_buffer,
    read_activities,
)
from umem.telemetry.driver_events import PROBE_BYTES, prefetch_probe, recorded_bytes
from umem.telemetry.records import MAX_RECORDS, MigrationRecords
from umem.torch_compat import torch_profiler_runs

__all__ = ["BufferCallbacks", "CuptiCollector", "CuptiTiming"]

# ------------------------------------------------------------------------ buffers and callbacks

_BUFFER_BYTES = 2**20
"""cupti-python makes an object of every record before it calls back, some 15 us each, and nothing
shows that it is busy: small buffers keep that time short."""

_BETWEEN_FLUSHES_S = 0.02


@dataclass(frozen=True)
class CuptiTiming:
    """How long a collector waits for CUPTI. docs/telemetry.md has the measurements behind it."""

    first_s: float = 0.3
    """Length of the empty recording that a process begins with. Without it, the first recording of
    a process lacks most of its records."""
    answer_s: float = 0.5
    """A probe block is moved when a recording begins, and CUPTI has this time to report it;
    otherwise it is stopped, which takes 2 s, and started again."""
    flush_every_s: float = 0.01
    """CUPTI reads the driver's queue when it is flushed; what comes to a full queue is lost."""
    quiet_s: float = 1.5
    quiet_after_s: float = 0.2
    """If no buffer arrives for so long there is none any more: while CUPTI records, and after it
    was told to stop."""
    longest_drain_s: float = 20.0
    """Limit of all waiting at the end: other threads may go on making records."""
    notice_s: float = 2.0
    """Waiting for longer than this is announced."""


class BufferCallbacks:
    """CUPTI's two callbacks, which ask for empty buffers and return full ones.

    CUPTI calls them in its own threads, which know nothing of recordings: the state is the
    process's.
    """

    def __init__(self) -> None:
        self.collector: CuptiCollector | None = None
        """Stays after its recording has ended: it counts late records as lost."""
        self.is_primed = False
        """Whether CUPTI has recorded in this process before."""
        self._lock = threading.Lock()
        self.requested = 0
        """Buffers that CUPTI has asked for and not returned."""
        self._active = 0
        self._returned = 0

    def buffer_requested(self) -> tuple[int, int]:
        """Size of a buffer, and the number of records in it (0: as many as fit)."""
        with self._lock:
            self.requested += 1
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
                self.requested = max(self.requested - 1, 0)
                self._returned += 1

    def drain(
        self, flush: Callable[[], object], quiet_s: float, end_s: float, notice_s: float
    ) -> bool:
        """Flush until no buffer arrives for `quiet_s` and no callback is active.

        Gives up at `end_s`, by :func:`time.monotonic`, and announces the wait after `notice_s`.
        Returns whether all buffers arrived in time.
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

_INSTALL = install_command("telemetry")
_FLUSH_COMPLETE = 0
_FLUSH_FORCED = 1
_BETWEEN_LOOKS_S = 0.02
_MOST_STARTS = 4

_process_callbacks = BufferCallbacks()


class CuptiCollector:
    """Collects this process's memory operations between `start` and `stop`.

    What comes after `limit` records is counted as dropped. Unless `unified_memory`, only copies and
    memory sets are recorded: others take time at both ends. `move` as for the driver's queue.
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

        Raises UnsupportedError where CUPTI is missing, does not fit, or is used by another
        profiler.
        """
        callbacks = self._callbacks
        if callbacks.collector is not None and callbacks.collector.running:
            raise UnsupportedError("another collector has CUPTI in this process: end it first")
        # CUPTI has one pair of buffer callbacks: a later profiler takes an earlier one's records
        # without an error, so torch has to be asked.
        if torch_profiler_runs():
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

        Returns the records by start, and how many were dropped. Raises UnsupportedError if
        CUPTI failed meanwhile.
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
        "another profiler has this process (Nsight Systems, torch.profiler, a debugger): end it"
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
