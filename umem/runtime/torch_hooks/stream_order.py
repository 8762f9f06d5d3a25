"""Lets events count work that a stream has not waited for yet as part of that stream.

A deferred optimizer step returns before the program's stream has waited for the updates. A program
may record an event on that stream, or let another stream wait for it, and rely on the step being
over then. So an event that is recorded on the stream carries the updates: whoever waits for the
event waits for them too. The stream itself does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["StreamOrder", "cuda_stream_order"]


class StreamOrder:
    """Wraps the methods of a stream class and an event class that order work.

    Parameters
    ----------
    stream_class, event_class
        ``torch.cuda.Stream`` and ``torch.cuda.Event``.
    current_stream
        Returns the stream on which an event without one is recorded.
    """

    def __init__(
        self, stream_class: Any, event_class: Any, current_stream: Callable[[], Any]
    ) -> None:
        self._current_stream = current_stream
        self._behind: dict[Any, Any] = {}
        """By stream, an event that counts as part of its work."""
        self._apart: dict[int, Any] = {}
        """Streams that wait for the work itself, by ``id``: torch gives the streams of its pool out
        again, as other objects."""
        self._event_class = event_class
        self._stream_class = stream_class
        self._record = event_class.record
        self._wait = event_class.wait
        self._synchronize = event_class.synchronize
        self._query = event_class.query
        self._finish = stream_class.synchronize
        self._is_finished = stream_class.query
        self._is_installed = False
        self._listeners: list[Callable[[Any], None]] = []

    def on_wait(self, listener: Callable[[Any], None]) -> Callable[[], None]:
        """Call a function with each stream that waits for an event; the result ends that."""
        self._listeners.append(listener)
        self._install()
        return functools.partial(_remove, self._listeners, listener)

    def add(self, stream: Any, event: Any) -> None:
        """Count the work before an event as part of a stream, in place of what was added before.

        `event` must be recorded after everything that was added for this stream earlier.
        """
        self._behind[stream] = event
        self._install()

    def leave_out(self, stream: Any) -> None:
        """Have a stream, as this object, not wait for what was added to an event that it waits for.

        All that it does with the results of such work waits for it in another way.
        """
        self._apart[id(stream)] = stream

    def _install(self) -> None:
        if self._is_installed:
            return
        self._is_installed = True
        order = self

        @functools.wraps(self._record)
        def record(event: Any, stream: Any = None) -> None:
            order._record(event, stream)
            event.umem_behind = order._behind.get(stream or order._current_stream())

        @functools.wraps(self._wait)
        def wait(event: Any, stream: Any = None) -> None:
            order._wait(event, stream)
            behind = _behind(event)
            if behind is not None and id(stream) not in order._apart:
                order._wait(behind, stream)
            for listener in list(order._listeners):
                listener(stream or order._current_stream())

        @functools.wraps(self._synchronize)
        def synchronize(event: Any) -> None:
            order._synchronize(event)
            if (behind := _behind(event)) is not None:
                order._synchronize(behind)

        @functools.wraps(self._query)
        def query(event: Any) -> bool:
            behind = _behind(event)
            return order._query(event) and (behind is None or order._query(behind))

        @functools.wraps(self._finish)
        def finish(stream: Any) -> None:
            order._finish(stream)
            if (behind := order._behind.get(stream)) is not None:
                order._synchronize(behind)

        @functools.wraps(self._is_finished)
        def is_finished(stream: Any) -> bool:
            behind = order._behind.get(stream)
            return order._is_finished(stream) and (behind is None or order._query(behind))

        self._event_class.record = record
        self._event_class.wait = wait
        self._event_class.synchronize = synchronize
        self._event_class.query = query
        self._stream_class.synchronize = finish
        self._stream_class.query = is_finished


def _remove(listeners: list[Callable[[Any], None]], listener: Callable[[Any], None]) -> None:
    if listener in listeners:
        listeners.remove(listener)


def _behind(event: Any) -> Any:
    return getattr(event, "umem_behind", None)


@functools.cache
def cuda_stream_order() -> StreamOrder:
    """The order of this process's CUDA streams."""
    return StreamOrder(torch.cuda.Stream, torch.cuda.Event, torch.cuda.current_stream)
