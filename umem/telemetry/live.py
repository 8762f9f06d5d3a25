"""The sources of a live recording.

Records of memory operations come from the driver and CUPTI, hint statistics and residency from the
executor, live blocks from umem's allocator.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from umem.core.classes import TensorClass
from umem.core.errors import EnableError, UnsupportedError
from umem.core.report import HintReport, Source, Traffic
from umem.runtime.copies import copy_counts
from umem.telemetry.cupti import CuptiCollector
from umem.telemetry.driver_events import DriverEvents, DriverQueue
from umem.telemetry.records import (
    MAX_RECORDS,
    MAX_SAMPLES,
    MigrationRecords,
    Residency,
    concatenate,
    make_records,
)
from umem.telemetry.reports import hints_between

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from umem.runtime.hints import HintStatistics
    from umem.runtime.inspection import LiveTensor

__all__ = [
    "LiveCollector",
    "ResidencySampler",
    "StepLog",
    "current_residency",
    "current_statistics",
    "device_name",
    "ideal_step_s",
    "live_blocks",
    "name_numbers",
    "policy_name",
]

_TAKE_EVERY_S = 0.01
"""Heavy faulting makes some 300,000 events a second, so a queue of 2^18 lasts for most of a second
in which the thread that empties it does not run."""

_MOST_EVENTS = 2**23
"""Most driver events kept of one recording: 0.6 GiB."""

_CLOCK_READINGS = 9

_recording_process: int | None = None
"""The process in which a recording is going on. A forked child compares it with its own number."""


class LiveCollector:
    """Collects this process's memory operations between `start` and `stop`.

    Migrations and faults come from the driver's event queue, which is complete, copies and memory
    sets from CUPTI; without the queue all from CUPTI. What is past the limits counts as dropped.
    """

    def __init__(
        self,
        queue: Callable[[], DriverQueue] = DriverQueue,
        cupti: Callable[..., CuptiCollector] = CuptiCollector,
        limit: int = MAX_RECORDS,
        event_limit: int = _MOST_EVENTS,
    ) -> None:
        self._open_queue = queue
        self._make_cupti = cupti
        self._limit = limit
        self._event_limit = event_limit
        self._driver: _DriverCollector | None = None
        self._cupti: CuptiCollector | None = None
        self._cupti_ahead_ns = 0
        self._notes: list[str] = []

    @property
    def source(self) -> Source:
        """What the records come from, once started."""
        if self._driver is None:
            return "cupti"
        return "driver" if self._cupti is not None else "driver_only"

    def start(self) -> None:
        """Begin. CUDA has to be initialised.

        Raises UnsupportedError if neither the driver's queue nor CUPTI is available.
        """
        global _recording_process
        if _recording_process == os.getpid():
            raise UnsupportedError(
                "another umem.profile() is recording in this process: end it first"
            )
        no_queue: UnsupportedError | None = None
        try:
            self._driver = _DriverCollector(self._open_queue(), self._event_limit)
        except UnsupportedError as error:
            no_queue = error
        cupti = self._make_cupti(self._limit, unified_memory=no_queue is not None)
        try:
            cupti.start()
        except UnsupportedError as error:
            if no_queue is not None:
                raise UnsupportedError(
                    f"{error}. The driver's own queue is not available either: {no_queue}"
                ) from error
            self._notes.append(f"copies and memory sets were not recorded: {error}")
        except BaseException:
            if self._driver is not None:
                self._driver.stop()
            raise
        else:
            self._cupti = cupti
            if no_queue is None:
                self._cupti_ahead_ns = _ahead_ns(cupti.now_ns, _now_ns)
            else:
                self._notes.append(f"recorded by CUPTI alone, which may lose records: {no_queue}")
        _recording_process = os.getpid()

    def now_ns(self) -> int:
        """The time on the clock of the records."""
        if self._driver is None:
            assert self._cupti is not None
            return self._cupti.now_ns()
        return _now_ns()

    def stop(self) -> tuple[MigrationRecords, int]:
        """End, once the device has finished its work.

        Returns the records by start, and how many were dropped. Raises UnsupportedError if
        the driver failed meanwhile, or CUPTI where it records everything.
        """
        global _recording_process
        _recording_process = None
        if self._driver is None:
            assert self._cupti is not None
            return self._cupti.stop()
        try:
            copies, dropped = self._stop_copies()
        finally:
            moved, lost = self._driver.stop()
        records = concatenate((moved, copies))
        over = max(len(records) - self._limit, 0)
        return records.select(np.arange(len(records) - over)), dropped + lost + over

    def late(self) -> int:
        """Records that came after the end, so far; they are lost too."""
        return self._cupti.late() if self._cupti is not None else 0

    def notes(self) -> tuple[str, ...]:
        """What to know before trusting the records; complete after :meth:`stop`."""
        return (*self._notes, *(self._cupti.notes() if self._cupti is not None else ()))

    def _stop_copies(self) -> tuple[MigrationRecords, int]:
        """CUPTI's records on the host's clock, and how many it dropped; none if it has failed."""
        if self._cupti is None:
            return make_records(0), 0
        try:
            records, dropped = self._cupti.stop()
        except UnsupportedError as error:
            self._notes.append(f"copies and memory sets were lost: {error}")
            self._cupti = None
            return make_records(0), 0
        return records.since(self._cupti_ahead_ns), dropped


class _DriverCollector:
    """Empties the driver's queue in a thread, from its construction until it is stopped."""

    def __init__(self, queue: DriverQueue, limit: int) -> None:
        self._queue = queue
        self._limit = limit
        self._events = DriverEvents()
        self._dropped = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umem events", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[MigrationRecords, int]:
        """The records, and how many events were dropped."""
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
        free = max(self._limit - self._events.count, 0)
        self._events.add(entries[:free])
        self._dropped += max(len(entries) - free, 0)


def _now_ns() -> int:
    """The clock of the driver's events (``NV_GETTIME`` of its ``uvm_linux.h``)."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)


def _ahead_ns(clock: Callable[[], int], reference: Callable[[], int]) -> int:
    """How far a clock is ahead of another, from the quickest of several readings of both."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before_ns = reference()
        time_ns = clock()
        after_ns = reference()
        readings.append((after_ns - before_ns, time_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]


# ------------------------------------------------------------------ hint statistics, residency


class StepLog:
    """Keeps the hint engine's statistics and counts of umem's own copies at marks of a run."""

    def __init__(self, ask: Callable[[], HintStatistics | None]) -> None:
        self._ask = ask  # None while there is no engine
        self._hints: list[HintStatistics | None] = []
        self._copies: list[tuple[Traffic, ...]] = []

    def mark(self) -> None:
        """Keep what there is now: at the start of the run, and at the end of each step."""
        self._hints.append(self._ask())
        self._copies.append(copy_counts.traffic())

    def hints(self) -> tuple[HintReport | None, ...]:
        """What was done between each mark and the next; empty where there was no engine."""
        if not any(self._hints):
            return ()
        return tuple(
            None if after is None else hints_between(before, after)
            for before, after in pairwise(self._hints)
        )

    def copies(self) -> tuple[tuple[Traffic, ...], ...]:
        """What was copied between each mark and the next; empty where nothing was."""
        reports = tuple(_copied_between(*marks) for marks in pairwise(self._copies))
        return reports if any(reports) else ()

    def notes(self) -> list[str]:
        """Calls of the engine that the driver refused between the first mark and the last."""
        marks = [mark.failures for mark in self._hints if mark is not None]
        if not marks:
            return []
        first = marks[0] if len(marks) > 1 else ()
        before = {(it.call, it.error): it.count for it in first}
        return [
            f"the driver refused hints: {it.call}, {it.text} ({it.error}), count {count}"
            for it in marks[-1]
            if (count := it.count - before.get((it.call, it.error), 0)) > 0
        ]


def _copied_between(before: tuple[Traffic, ...], after: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    earlier = {(it.direction, it.tensor_class): it for it in before}
    copied = []
    for now in after:
        then = earlier.get((now.direction, now.tensor_class))
        if then is not None:
            now = replace(
                now,
                bytes=now.bytes - then.bytes,
                seconds=now.seconds - then.seconds,
                count=now.count - then.count,
            )
        if now.count:
            copied.append(now)
    return tuple(copied)


class ResidencySampler:
    """Takes samples of the residency, from any thread. At the limit, every other is dropped.

    `ask` returns bytes on the device by class, or None while nothing is known.
    """

    def __init__(
        self, ask: Callable[[], Mapping[TensorClass, int] | None], limit: int = MAX_SAMPLES
    ) -> None:
        self._ask = ask
        self._limit = limit
        self._lock = threading.Lock()  # phases begin in autograd's threads too
        self._rows: list[tuple[int, ...]] = []
        self._stride = 1
        self._skipped = 0

    def take(self, now_ns: Callable[[], int]) -> None:
        """Take a sample, unless the stride leaves it out."""
        with self._lock:
            self._skipped += 1
            if self._skipped < self._stride:
                return
            self._skipped = 0
            found = self._ask()
            if found is None:
                return
            self._rows.append((now_ns(), *(int(found.get(it, 0)) for it in TensorClass)))
            if len(self._rows) >= self._limit:
                del self._rows[1::2]
                self._stride *= 2

    def series(self, begin_ns: int) -> Residency | None:
        """The samples since a moment; None where there are none."""
        rows = [row for row in self._rows if row[0] >= begin_ns]
        if not rows:
            return None
        table = np.array(rows, np.int64)
        return Residency(table[:, 0] - begin_ns, table[:, 1:].copy())


# --------------------------------------------------------------- questions to the rest of umem


def live_blocks() -> Sequence[LiveTensor] | None:
    """The blocks of :func:`umem.tensors`, or None where umem is not enabled."""
    from umem.runtime.inspection import tensors

    with suppress(EnableError):
        return tensors()
    return None


def policy_name() -> str:
    """Name of the policy in use, or ``none``."""
    from umem.runtime.state import is_enabled, runtime

    return runtime().policy.name if is_enabled() else "none"


def device_name() -> str:
    """Torch's name of the current GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else "no GPU"


def name_numbers(
    model: nn.Module | None, optimizers: Sequence[Optimizer], names: dict[str, int]
) -> dict[int, int]:
    """The numbers of the names of a model's parameters, gradients and optimizer state, by address.

    `names` has the numbers that names already have; new names are added to it.
    """
    from umem.runtime.model_parts import storage_addresses

    numbers: dict[int, int] = {}
    for name, tensor in () if model is None else _named_tensors(model, optimizers):
        for address in storage_addresses(tensor):
            numbers.setdefault(address, names.setdefault(name, len(names)))
    return numbers


def _named_tensors(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    from umem.runtime.model_parts import optimizer_parameters, optimizer_state, parameter_names

    names = parameter_names(model.named_parameters(), optimizer_parameters(*optimizers))
    for parameter, name in names.items():
        yield name, parameter
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad
    for optimizer in optimizers:
        yield from optimizer_state(optimizer, names)


def current_statistics() -> HintStatistics | None:
    """Statistics of the executor's hint engine, or None where there is no executor."""
    return _ask_executor("current_statistics")


def current_residency() -> Mapping[TensorClass, int] | None:
    """Bytes on the device by class, as the executor counts them, or None where it does not."""
    return _ask_executor("residency")


def ideal_step_s() -> float | None:
    """Time of the executor's recorded step with everything resident, or None."""
    return _ask_executor("ideal_step_s")


def _ask_executor(name: str) -> Any:
    # An engine can only run if it was imported, and a profile must not import it.
    managing = sys.modules.get("umem.managing")
    if managing is not None:
        with suppress(EnableError):
            return getattr(managing, name)()
    return None
