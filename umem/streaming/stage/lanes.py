"""Queues of work beside the program: copies to the device, updates, copies to the host."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch

from umem.core.classes import TensorClass
from umem.core.report import Direction
from umem.cuda import bindings
from umem.runtime.copies import copy_counts
from umem.runtime.cuda_events import new_event
from umem.runtime.cuda_streams import CurrentStream, own_stream, run_on
from umem.runtime.native_library import native
from umem.runtime.program_waits import program_waits
from umem.runtime.torch_hooks.stream_order import cuda_stream_order
from umem.runtime.unguarded import PastGuards
from umem.streaming.stage.held_tensors import HeldTensors
from umem.torch_compat import set_tracing_state, tracing_state

__all__ = ["Copy", "CudaLanes", "HostLanes", "Lane", "Lanes", "Moment", "cuda_lanes", "untraced"]


class Lane(IntEnum):
    """A queue, whose work runs in the order of its submission."""

    COPY_IN = 0
    UPDATE = 1
    COPY_OUT = 2
    WEIGHTS_IN = 3
    """Apart from the copies of state, all of which stand in their queue from `step()` on."""
    WEIGHTS_OUT = 4
    """Of units that the host updates; apart from the copies of state, which wait for updates."""
    GRADIENTS_IN = 5
    """Apart from the copies of state that stand in their queue beside a backward pass."""


_LONG_LANES = (Lane.COPY_IN, Lane.COPY_OUT, Lane.WEIGHTS_OUT)
"""Lanes whose copies all stand in their queue from `step()` on. They give way after each chunk."""

_DIRECTIONS: dict[Lane, Direction] = {
    Lane.COPY_IN: "to_device",
    Lane.COPY_OUT: "to_host",
    Lane.WEIGHTS_IN: "to_device",
    Lane.WEIGHTS_OUT: "to_host",
    Lane.GRADIENTS_IN: "to_device",
}

Moment = Any
"""A point in the work of a stream or a lane, for others to wait for."""


class Copy(NamedTuple):
    """Bytes to copy from one address to another."""

    to: int
    source: int
    size_bytes: int


class Lanes(Protocol):
    """The lanes of one device. Work of two lanes, or of a lane and a stream, may run at once."""

    def mark(self) -> Moment:
        """The moment after the current work of the calling thread's stream."""

    def run(
        self,
        lane: Lane,
        work: Callable[[], None],
        after: Sequence[Moment] = (),
        uses: Sequence[torch.Tensor] = (),
    ) -> Moment:
        """Queue work, and return the moment after it.

        A lane reads and writes memory later than the function returns, and keeps no reference to
        the function. So each tensor that the work uses has one of three owners until the lane has
        passed the work: somebody who waits for the moment, on the stream that owns the memory,
        before the tensor is freed (weights, gradients, state, slots and buffers); the lane itself,
        for what the function allocates on an update's stream; or `uses`, for all else.

        Parameters
        ----------
        lane
            Its queue.
        work
            A function that launches kernels or copies.
        after
            Moments that the work waits for, besides the earlier work of its lane.
        uses
            Small tensors that nobody else holds. The lane holds them until it has passed the work;
            it looks when it is given others. Pass one sequence for all work that uses it.
        """

    def copy(self, lane: Lane, copies: Sequence[Copy], tensor_class: TensorClass) -> None:
        """Copy tensors of a class, or parts of them, from within work of a lane."""

    def wait(self, moment: Moment) -> None:
        """Let later work of the calling thread's stream wait for a moment."""

    def wait_on_stream_of(self, marked: Moment, moment: Moment) -> None:
        """Let later work of the stream of a call of :meth:`mark` wait for a moment."""

    def events_of(self, moment: Moment) -> list[tuple[int, int]] | None:
        """The CUDA events of a moment, each with its device's number; None without any."""
        del moment
        return None

    def count_behind(self, marked: Moment, moment: Moment) -> None:
        """Count a moment as part of the stream of a call of :meth:`mark`, which does not wait.

        Events that the program records on that stream from now on, and streams that wait for it,
        wait for the moment too. It takes the place of an earlier one. In the place of a moment that
        is known later, a function waits for that in the calling thread, and returns it.
        """

    def leave_out(self, stream: Any) -> None:
        """Do not count moments as part of a stream for this one: it waits for each it needs."""

    def finish(self, moment: Moment) -> None:
        """Block the calling thread until a moment has passed."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's stream is captured into a graph."""
        return False

    def stream_key(self) -> int:
        """A number for the calling thread's stream."""
        return 0


_OVER = object()
"""A moment that has passed."""


@contextmanager
def untraced() -> Iterator[None]:
    """Leave umem's own work out of what ``torch.jit.trace`` records of a use that begins it."""
    state = tracing_state()
    if state is None:
        yield
        return
    set_tracing_state(None)
    try:
        yield
    finally:
        set_tracing_state(state)


class HostLanes(Lanes):
    """The CPU, which has no streams: work runs when it is queued."""

    def mark(self) -> Moment:
        """The present."""
        return _OVER

    def run(
        self,
        lane: Lane,
        work: Callable[[], None],
        after: Sequence[Moment] = (),
        uses: Sequence[torch.Tensor] = (),
    ) -> Moment:
        """Run the work."""
        del lane, after, uses
        with untraced(), PastGuards():
            work()
        return _OVER

    def copy(self, lane: Lane, copies: Sequence[Copy], tensor_class: TensorClass) -> None:
        """Copy now."""
        all_bytes = sum(it.size_bytes for it in copies)
        with copy_counts.counted(_DIRECTIONS[lane], tensor_class, all_bytes, None):
            for to, source, size_bytes in copies:
                ctypes.memmove(to, source, size_bytes)

    def wait(self, moment: Moment) -> None:
        """Return: all work has run."""

    def wait_on_stream_of(self, marked: Moment, moment: Moment) -> None:
        """Return: all work has run."""

    def count_behind(self, marked: Moment, moment: Moment) -> None:
        """Return: all work has run."""

    def leave_out(self, stream: Any) -> None:
        """Return: nothing is counted."""

    def finish(self, moment: Moment) -> None:
        """Return: all work has run."""


class _Moment(NamedTuple):
    event: torch.cuda.Event
    stream: torch.cuda.Stream


def _has_passed(moment: _Moment) -> bool:
    with bindings.relaxed_capture():  # to ask would break a capture of the program
        return moment.event.query()


class CudaLanes(Lanes):
    """Streams of a GPU, one for each lane.

    Parameters
    ----------
    device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._word = torch.zeros(1, dtype=torch.int32, device=device)
        self._current_stream = CurrentStream(device)
        self._queue_copies = native().queue_copies
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        """Those that were used: each takes about 2 MiB of the card."""
        self._held = [HeldTensors(_has_passed) for _ in Lane]

    def mark(self) -> Moment:
        """An event on the current stream."""
        return self._moment_of(self._current_stream())

    def _moment_of(self, stream: torch.cuda.Stream) -> _Moment:
        event = new_event()
        event.record(stream)
        return _Moment(event, stream)

    def _stream_of(self, lane: Lane) -> torch.cuda.Stream:
        stream = self._streams.get(lane)
        if stream is None:
            # An update is short, and copies in both directions wait for it: it goes before the
            # forward pass beside it.
            priority = -1 if lane is Lane.UPDATE else 0
            stream = own_stream(self._device, lane.name, priority=priority)
            self._streams[lane] = stream
        return stream

    def run(
        self,
        lane: Lane,
        work: Callable[[], None],
        after: Sequence[Moment] = (),
        uses: Sequence[torch.Tensor] = (),
    ) -> Moment:
        """Launch the work on the lane's stream."""
        stream = self._stream_of(lane)
        for moment in after:
            if moment.stream is not stream:
                moment.event.wait(stream)
        with untraced(), PastGuards():
            if lane is Lane.UPDATE:
                run_on(stream, work)
            else:  # copies name their stream, which takes less time than to change torch's
                work()
        moment = self._moment_of(stream)
        if uses:
            self._held[lane].hold(uses, moment)
        return moment

    def copy(self, lane: Lane, copies: Sequence[Copy], tensor_class: TensorClass) -> None:
        """Copy by a copy engine, on the lane's stream.

        While a stream has copies that are ready, the engine of their direction serves no other
        stream (https://github.com/meta-pytorch/torchrec/pull/4315). The weights of the next block,
        or a batch of the program, would wait for all of the state. A write of one word between two
        copies lets them in: copies that came last, behind 6 GiB of state, then began after 4 ms
        instead of 130 (one H100, PCIe 5, driver 580.159, 2026-11-25).
        """
        stream = self._stream_of(lane)
        word = self._word.data_ptr() if lane in _LONG_LANES else 0
        way = _DIRECTIONS[lane]
        all_bytes = sum(it.size_bytes for it in copies)
        with copy_counts.counted(way, tensor_class, all_bytes, stream):
            self._queue_copies(copies, stream.cuda_stream, way == "to_host", word)

    def wait(self, moment: Moment) -> None:
        """Make the current stream wait; while it is captured into a graph, this thread.

        A graph must not wait for work outside of it.
        """
        if torch.cuda.is_current_stream_capturing():
            with bindings.relaxed_capture():
                moment.event.synchronize()
        else:
            with program_waits:
                moment.event.wait(self._current_stream())

    def wait_on_stream_of(self, marked: Moment, moment: Moment) -> None:
        """Make that stream wait, unless it is the current one, which does already."""
        if marked.stream != self._current_stream():
            moment.event.wait(marked.stream)

    def events_of(self, moment: Moment) -> list[tuple[int, int]] | None:
        """Its event."""
        return [(self._device.index or 0, moment.event.cuda_event)]

    def count_behind(self, marked: Moment, moment: Moment) -> None:
        """Wrap torch's events."""
        later = (lambda: moment().event) if callable(moment) else moment.event
        cuda_stream_order().add(marked.stream, later)

    def leave_out(self, stream: Any) -> None:
        """Leave it out of the order that :meth:`count_behind` makes."""
        cuda_stream_order().leave_out(stream)

    def finish(self, moment: Moment) -> None:
        """Block this thread until the event has passed."""
        moment.event.synchronize()

    def is_capturing(self) -> bool:
        """Whether torch's current stream is."""
        return torch.cuda.is_current_stream_capturing()

    def stream_key(self) -> int:
        """Its handle."""
        return self._current_stream.handle()


@functools.cache
def cuda_lanes(device: torch.device) -> CudaLanes:
    """The lanes of a GPU, which all trainings on it share."""
    return CudaLanes(device)
