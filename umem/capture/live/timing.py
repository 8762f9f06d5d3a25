"""Clocks for the phases of a step, and the part of a step that each timed step measures."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from umem.runtime.cuda_events import new_event

__all__ = ["Clock", "CudaClock", "WallClock", "Window", "clock_for", "find_windows"]


class Clock(Protocol):
    """Marks moments without waiting for them, to be read once they are past.

    A mark may be of any type: callers only hand it back.
    """

    def is_usable(self) -> bool:
        """Whether marks that are taken now can be read later."""

    def mark(self) -> Any:
        """The moment at which the device has finished the work it was given so far."""

    def is_past(self, mark: Any) -> bool:
        """Whether a mark can be read without waiting."""

    def seconds(self, first: Any, second: Any) -> float:
        """Time from one mark to another, after waiting for both."""

    def reserve(self, count: int) -> None:
        """Prepare for this number of marks held at the same time."""

    def release(self, marks: Iterable[Any]) -> None:
        """Take back marks that nobody will read again."""


class CudaClock:
    """CUDA events on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        from umem.torch_compat import current_raw_stream  # not in a torch without CUDA

        self._raw_stream = current_raw_stream
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._free: list[torch.cuda.Event] = []
        # By address: asking torch for the current stream takes longer than recording an event.
        self._streams: dict[int, torch.cuda.Stream] = {}

    def is_usable(self) -> bool:
        """False while a graph is captured: its events have no time; a query ends the capture."""
        return not torch.cuda.is_current_stream_capturing()

    def mark(self) -> torch.cuda.Event:
        """Record an event; the autograd engine runs a node on the stream of its forward pass."""
        event = self._free.pop() if self._free else new_event(timing=True)
        address = self._raw_stream(self._index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = torch.cuda.current_stream(self._device)
        event.record(stream)
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has reached the event."""
        return mark.query()

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


class WallClock:
    """The host's clock, for models on the CPU, whose operators are done when they return."""

    def is_usable(self) -> bool:
        """Always true."""
        return True

    def mark(self) -> int:
        """The present time in nanoseconds."""
        return time.perf_counter_ns()

    def is_past(self, mark: int) -> bool:
        """Always true."""
        return True

    def seconds(self, first: int, second: int) -> float:
        """Time between two marks."""
        return (second - first) * 1e-9

    def reserve(self, count: int) -> None:
        """Do nothing."""

    def release(self, marks: Iterable[int]) -> None:
        """Do nothing."""


def clock_for(device: torch.device) -> Clock:
    """CUDA events for a GPU, the host's clock for any other device."""
    return CudaClock(device) if device.type == "cuda" else WallClock()


_MAX_WINDOWS = 3
_MIN_SAMPLES = 3
"""Each phase is timed at least this often, so that one odd step does not decide its median."""

_MIN_BLOCKS = 2
"""A window tracks up to two blocks beyond this number, for the phases at its edges."""


@dataclass(frozen=True, eq=False)
class Window:
    """The part of a step that one timed step measures."""

    skipped: frozenset[str]
    """Names of the blocks whose forward and backward passes are not tracked."""
    labels: tuple[str, ...]
    """Of the tracked phases in a step like the recorded one."""
    begins: tuple[int | None, ...]
    """For each of them the index of the trace's phase that begins with it, or None."""

    @property
    def marked(self) -> tuple[int, ...]:
        """Indices of the trace's phases whose begin is marked, in order."""
        return tuple(number for number in self.begins if number is not None)


def find_windows(
    labels: Sequence[str],
    begins: Sequence[int | None],
    blocks: Mapping[str, str],
    gaps: Collection[str],
    steps: int,
) -> tuple[Window, ...]:
    """Divide a step into windows that timed steps measure in turn; together they time every phase.

    A window has a run of blocks, in the order in which the step first reaches them, and the
    neighbouring blocks at which their phases end. Phases outside of blocks are in all windows.
    Where there are too few steps or blocks for more, one window has the whole step.

    `labels` and `begins` are those of :class:`Window` for the whole step, and `blocks` has the name
    of the block by label. `gaps` are the labels of what the model does between blocks; the hooks of
    the block before report them.
    """
    reporters: list[str | None] = []  # the block whose hooks report each phase
    for label in labels:
        before = reporters[-1] if reporters else None
        reporters.append(before if label in gaps else blocks.get(label))
    names = list(dict.fromkeys(name for name in reporters if name is not None))
    count = min(_MAX_WINDOWS, steps // _MIN_SAMPLES, len(names) // _MIN_BLOCKS)
    if count < 2:
        return (Window(frozenset(), tuple(labels), tuple(begins)),)
    edges = [name for name, number in zip(reporters, begins, strict=True) if number is not None]
    windows = []
    for window in range(count):
        own = set(names[window * len(names) // count : (window + 1) * len(names) // count])
        tracked = {None, *own, *(end for begin, end in pairwise(edges) if begin in own)}
        kept = [place for place, name in enumerate(reporters) if name in tracked]
        windows.append(
            Window(
                frozenset(names) - tracked,
                tuple(labels[place] for place in kept),
                tuple(begins[place] for place in kept),
            )
        )
    return tuple(windows)
