"""When the phases of a step begin, on the device that runs them."""

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
    """Marks moments without waiting for them; they are read when they are past.

    A mark is whatever the clock makes of it: others only hand it back.
    """

    def is_usable(self) -> bool:
        """Whether marks that are taken now can be read later."""

    def mark(self) -> Any:
        """The moment at which the device has done what it was given so far."""

    def is_past(self, mark: Any) -> bool:
        """Whether a mark can be read without waiting."""

    def seconds(self, first: Any, second: Any) -> float:
        """Time from one mark to another, after waiting for both."""

    def reserve(self, count: int) -> None:
        """Get ready for so many marks that are held at the same time."""

    def release(self, marks: Iterable[Any]) -> None:
        """Take marks back that nobody reads any more."""


class CudaClock:
    """CUDA events on the current stream of a device.

    Parameters
    ----------
    device
        A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._free: list[torch.cuda.Event] = []
        # By address: to ask torch for the current stream costs more than to record an event.
        self._streams: dict[int, torch.cuda.Stream] = {}

    def is_usable(self) -> bool:
        """Not while a graph is captured: its events have no time, and to ask ends the capture."""
        return not torch.cuda.is_current_stream_capturing()

    def mark(self) -> torch.cuda.Event:
        """Record an event; the autograd engine runs a node on the stream of its forward pass."""
        event = self._free.pop() if self._free else new_event(timing=True)
        address = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = torch.cuda.current_stream(self._device)
        event.record(stream)
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has come to the event."""
        return mark.query()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Time between two events on the device."""
        second.synchronize()
        return first.elapsed_time(second) * 1e-3

    def reserve(self, count: int) -> None:
        """Make the events now: the driver does so when an event is recorded for the first time."""
        marks = [self.mark() for _ in range(count)]
        self.release(marks)

    def release(self, marks: Iterable[torch.cuda.Event]) -> None:
        """Keep the events for later marks: to make one costs more than to record it."""
        self._free.extend(marks)


class WallClock:
    """The host's clock, for models that run on the CPU."""

    def is_usable(self) -> bool:
        """Always."""
        return True

    def mark(self) -> int:
        """Nanoseconds since some moment."""
        return time.perf_counter_ns()

    def is_past(self, mark: int) -> bool:
        """Always: an operator on the CPU is done when it returns."""
        return True

    def seconds(self, first: int, second: int) -> float:
        """Time between two marks."""
        return (second - first) * 1e-9

    def reserve(self, count: int) -> None:
        """Nothing to get ready."""

    def release(self, marks: Iterable[int]) -> None:
        """Nothing to keep."""


def clock_for(device: torch.device) -> Clock:
    """The clock of a device: CUDA's events on a GPU, the host's clock elsewhere."""
    return CudaClock(device) if device.type == "cuda" else WallClock()


# Which part of a step is timed: over several steps all of it, in each a few blocks only.

_MOST_WINDOWS = 3
_LEAST_SAMPLES = 3
"""So often at least each phase is timed, for a median that one odd step does not decide."""

_LEAST_BLOCKS = 2
"""A window follows up to two blocks more than its own, for their edges."""


@dataclass(frozen=True, eq=False)
class Window:
    """What is followed and timed of a step.

    Parameters
    ----------
    skipped
        Names of the blocks whose calls and backward passes are let pass.
    labels
        Of the phases that are told of, if the step is like the one that was looked at.
    begins
        Of each of them, the number of the phase of the trace that begins with it; None where none
        does.
    """

    skipped: frozenset[str]
    labels: tuple[str, ...]
    begins: tuple[int | None, ...]

    @property
    def marked(self) -> tuple[int, ...]:
        """Numbers of the phases of the trace whose begin is marked, in order."""
        return tuple(number for number in self.begins if number is not None)


def find_windows(
    labels: Sequence[str],
    begins: Sequence[int | None],
    blocks: Mapping[str, str],
    gaps: Collection[str],
    steps: int,
) -> tuple[Window, ...]:
    """Cut a step into windows for steps to take in turns.

    Each one follows a run of blocks, in the order in which the step first came to them, and of
    their neighbours those at which a phase of these ends. What is no block's is in all of them.

    Parameters
    ----------
    labels
        Of the phases that the step was told of when it was looked at.
    begins
        Of each of them, the number of the phase of the trace that begins with it, or None.
    blocks
        Name of the block of each label that is one's.
    gaps
        Labels of what the model does between blocks. Where a block's phase comes before, that
        block's hooks tell of it.
    steps
        How many are timed.

    Returns
    -------
    tuple of Window
        Together they have every phase between two marks. One that is the whole step where the
        steps or the blocks are too few for more.
    """
    tellers: list[str | None] = []
    for label in labels:
        before = tellers[-1] if tellers else None
        tellers.append(before if label in gaps else blocks.get(label))
    names = list(dict.fromkeys(name for name in tellers if name is not None))
    count = min(_MOST_WINDOWS, steps // _LEAST_SAMPLES, len(names) // _LEAST_BLOCKS)
    if count < 2:
        return (Window(frozenset(), tuple(labels), tuple(begins)),)
    edges = [teller for teller, number in zip(tellers, begins, strict=True) if number is not None]
    windows = []
    for window in range(count):
        own = set(names[window * len(names) // count : (window + 1) * len(names) // count])
        followed = {None, *own, *(end for begin, end in pairwise(edges) if begin in own)}
        kept = [place for place, teller in enumerate(tellers) if teller in followed]
        windows.append(
            Window(
                frozenset(names) - followed,
                tuple(labels[place] for place in kept),
                tuple(begins[place] for place in kept),
            )
        )
    return tuple(windows)
