"""Clocks for the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from umem.runtime.cuda_events import new_event
from umem.runtime.cuda_streams import CurrentStream

__all__ = ["Clock", "CudaClock", "clock_for"]


class Clock:
    """The host's clock, for models on the CPU, whose operators are done when they return.

    It marks moments without waiting for them, to be read once they are past. A mark may be of any
    type: callers only hand it back.
    """

    def is_usable(self) -> bool:
        """Whether marks that are taken now can be read later."""
        return True

    def mark(self) -> Any:
        """The moment at which the device has finished the work it was given so far."""
        return time.perf_counter_ns()

    def is_past(self, mark: Any) -> bool:
        """Whether a mark can be read without waiting."""
        return True

    def has_run_dry(self, mark: Any) -> bool:
        """Whether the device was done with all work before a mark ahead of the calls behind it."""
        return False

    def seconds(self, first: Any, second: Any) -> float:
        """Time from one mark to another, after waiting for both."""
        return float(second - first) * 1e-9

    def reserve(self, count: int) -> None:
        """Prepare for this number of marks held at the same time."""

    def release(self, marks: Iterable[Any]) -> None:
        """Take back marks that nobody will read again."""


class CudaClock(Clock):
    """CUDA events on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = CurrentStream(device)
        self._free: list[torch.cuda.Event] = []

    def is_usable(self) -> bool:
        """False while a graph is captured: its events have no time; a query ends the capture."""
        return not torch.cuda.is_current_stream_capturing()

    def mark(self) -> torch.cuda.Event:
        """Record an event; the autograd engine runs a node on the stream of its forward pass."""
        event = self._free.pop() if self._free else new_event(timing=True)
        event.record(self._stream())
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has reached the event."""
        return mark.query()

    def has_run_dry(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has reached the event while the processor made further calls."""
        return self.is_past(mark)

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Time between two events on the device."""
        second.synchronize()
        return first.elapsed_time(second) * 1e-3

    def reserve(self, count: int) -> None:
        """Record events now: the driver makes an event when it is recorded for the first time."""
        self.release([self.mark() for _ in range(count)])

    def release(self, marks: Iterable[torch.cuda.Event]) -> None:
        """Keep the events for later marks."""
        self._free.extend(marks)


def clock_for(device: torch.device) -> Clock:
    """CUDA events for a GPU, the host's clock for any other device."""
    return CudaClock(device) if device.type == "cuda" else Clock()
