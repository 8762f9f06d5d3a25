"""Memory operations of this process, live, from whoever can be asked: the driver, and CUPTI."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from umem.core.errors import UnsupportedError
from umem.core.report import Source
from umem.telemetry.cupti import CuptiCollector
from umem.telemetry.driver_events import DriverEvents, DriverQueue
from umem.telemetry.records import MAX_RECORDS, MigrationRecords, concatenated, records_of

__all__ = ["LiveCollector"]

_TAKE_EVERY_S = 0.01
"""Where much faults at once, 300,000 events a second were seen: so a queue of 2^18 lasts for the
better part of a second in which this thread does not come to run."""

_MOST_EVENTS = 2**23
"""That are kept of one recording: 0.6 GiB where all of them are migrations. What comes later counts
as dropped."""

_CLOCK_LOOKS = 9

_recording_process: int | None = None
"""The process in which a recording is going on, if one is: a child must not take it for its own."""


class LiveCollector:
    """Collects this process's memory operations between `start` and `stop`.

    Unified memory's come from the driver's own event queue, which has them all, and copies and
    memory sets from CUPTI. Where the driver's queue cannot be had, CUPTI is asked for everything.

    Parameters
    ----------
    queue
        Makes the driver's queue.
    limit
        Most records that are kept. What comes later is counted as dropped.
    """

    def __init__(
        self, queue: Callable[[], DriverQueue] = DriverQueue, limit: int = MAX_RECORDS
    ) -> None:
        self._open_queue = queue
        self._limit = limit
        self._driver: _DriverCollector | None = None
        self._cupti: CuptiCollector | None = None
        self._cupti_ahead_ns = 0
        self._notes: list[str] = []

    @property
    def source(self) -> Source:
        """Who counts, from the start on."""
        if self._driver is None:
            return "cupti"
        return "driver" if self._cupti is not None else "driver_only"

    def start(self) -> None:
        """Begin. CUDA has to be initialised.

        Raises
        ------
        UnsupportedError
            Where neither the driver nor CUPTI can be asked.
        """
        global _recording_process
        if _recording_process == os.getpid():
            raise UnsupportedError(
                "another umem.profile() is recording in this process: end it first"
            )
        try:
            self._driver = _DriverCollector(self._open_queue())
        except UnsupportedError as error:
            self._start_cupti_alone(error)
        else:
            self._start_copies()
        _recording_process = os.getpid()

    def now_ns(self) -> int:
        """The time on the clock of the records."""
        if self._driver is None:
            assert self._cupti is not None
            return self._cupti.now_ns()
        return _now_ns()

    def stop(self) -> tuple[MigrationRecords, int]:
        """End, once the device has finished its work.

        Returns
        -------
        tuple of MigrationRecords and int
            The records by start, and the number of those that were dropped.

        Raises
        ------
        UnsupportedError
            If the driver failed meanwhile, or CUPTI where everything was asked of it.
        """
        global _recording_process
        _recording_process = None
        if self._driver is None:
            assert self._cupti is not None
            return self._cupti.stop()
        try:
            copies, dropped = self._stopped_copies()
        finally:
            moved, lost = self._driver.stop()
        records = concatenated((moved, copies))
        over = max(len(records) - self._limit, 0)
        return records.taken(np.arange(len(records) - over)), dropped + lost + over

    def late(self) -> int:
        """Records that came after the end, so far: they are lost too."""
        return self._cupti.late() if self._cupti is not None else 0

    def notes(self) -> tuple[str, ...]:
        """What to know before trusting the records; complete after :meth:`stop`."""
        return (*self._notes, *(self._cupti.notes() if self._cupti is not None else ()))

    def _start_copies(self) -> None:
        assert self._driver is not None
        cupti = CuptiCollector(self._limit, unified_memory=False)
        try:
            cupti.start()
        except UnsupportedError as error:
            self._notes.append(f"copies and memory sets were not recorded: {error}")
        except BaseException:
            self._driver.stop()
            raise
        else:
            self._cupti = cupti
            self._cupti_ahead_ns = _ahead_ns(cupti.now_ns, _now_ns)

    def _start_cupti_alone(self, why: UnsupportedError) -> None:
        cupti = CuptiCollector(self._limit)
        try:
            cupti.start()
        except UnsupportedError as error:
            raise UnsupportedError(f"{error}. The driver itself cannot be asked: {why}") from error
        self._cupti = cupti
        self._notes.append(f"recorded by CUPTI alone, which may lose records: {why}")

    def _stopped_copies(self) -> tuple[MigrationRecords, int]:
        """CUPTI's records on the host's clock, and how many it dropped; none if it has failed."""
        if self._cupti is None:
            return records_of([]), 0
        try:
            records, dropped = self._cupti.stop()
        except UnsupportedError as error:
            self._notes.append(f"copies and memory sets were lost: {error}")
            self._cupti = None
            return records_of([]), 0
        shifted = replace(
            records,
            start_ns=records.start_ns - self._cupti_ahead_ns,
            end_ns=records.end_ns - self._cupti_ahead_ns,
        )
        return shifted, dropped


class _DriverCollector:
    """Empties the driver's queue in a thread, from when it is made until it is stopped."""

    def __init__(self, queue: DriverQueue) -> None:
        self._queue = queue
        self._events = DriverEvents()
        self._dropped = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umem events", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[MigrationRecords, int]:
        """The records, and how many the driver dropped."""
        self._end.set()
        self._thread.join()
        try:
            self._queue.flush()
            self._take()
            return self._events.records(), self._dropped + self._queue.dropped()
        finally:
            self._queue.close()

    def _run(self) -> None:
        while not self._end.wait(_TAKE_EVERY_S):
            self._take()

    def _take(self) -> None:
        entries = self._queue.take()
        room = max(_MOST_EVENTS - self._events.count, 0)
        self._events.add(entries[:room])
        self._dropped += max(len(entries) - room, 0)


def _now_ns() -> int:
    """The clock of the driver's events (``NV_GETTIME`` of its ``uvm_linux.h``)."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)


def _ahead_ns(clock: Callable[[], int], reference: Callable[[], int]) -> int:
    """By how much a clock is ahead of another, from the quickest of some looks at both."""
    looks = []
    for _ in range(_CLOCK_LOOKS):
        before_ns = reference()
        time_ns = clock()
        after_ns = reference()
        looks.append((after_ns - before_ns, time_ns - (before_ns + after_ns) // 2))
    return min(looks)[1]
