"""Lets events count work that a stream has not waited for yet as part of that stream.

A deferred optimizer step returns before the program's stream has waited for the updates. A program
may record an event on that stream, or let another stream wait for it, and rely on the step being
over then. So an event that is recorded on the stream carries the updates: whoever waits for the
event waits for them too. The stream itself does not, but for an event of ``torch.Event``, which
carries nothing: the stream waits for the updates before one is recorded.

A stream that is captured into a graph has no such work, and must not wait for any: the graph would
have an event from outside of it. All updates are waited for before a capture begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from umem import patches
from umem.cuda import bindings

__all__ = ["StreamOrder", "cuda_stream_order"]


class StreamOrder:
    """Wraps the methods of stream classes and event classes that order work.

    These are ``torch.cuda.Stream`` and ``torch.cuda.Event``; objects of ``torch.Stream`` and
    ``torch.Event`` may be of the same device. `current_stream` returns the stream on which an event
    without one is recorded, `is_capturing` whether a stream, by its handle, is captured.
    """

    def __init__(
        self,
        stream_class: Any,
        event_class: Any,
        any_stream_class: Any,
        any_event_class: Any,
        current_stream: Callable[[], Any],
        is_capturing: Callable[[int], bool],
    ) -> None:
        self._current_stream = current_stream
        self._is_capturing = is_capturing
        self._behind: dict[tuple[int, int], Any] = {}
        """By device and handle of a stream, an event that counts as part of its work. Objects of
        torch for one stream may differ."""
        self._apart: dict[int, Any] = {}
        """Streams that wait for the work itself, by ``id``: torch gives the streams of its pool out
        again, as other objects."""
        self._event_class = event_class
        self._stream_class = stream_class
        self._any_event_class = any_event_class
        self._any_stream_class = any_stream_class
        self._record = event_class.record
        self._wait = event_class.wait
        self._synchronize = event_class.synchronize
        self._query = event_class.query
        self._is_installed = False

    def add(self, stream: Any, event: Any) -> None:
        """Count the work before an event as part of a stream, in place of what was added before.

        `event` must be recorded after everything that was added for this stream earlier. In the
        place of an event that is recorded later, a function waits for that, and returns it.
        """
        self._behind[_key(stream)] = event
        self.install()

    def leave_out(self, stream: Any) -> None:
        """Have a stream, as this object, not wait for what was added to an event that it waits for.

        All that it does with the results of such work waits for it in another way.
        """
        self._apart[id(stream)] = stream

    def _of_class(self, stream: Any) -> Any:
        """The same stream as an object of the stream class; None for one of another device."""
        if isinstance(stream, self._stream_class):
            return stream
        if stream.device.type != "cuda":
            return None
        return self._stream_class(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    def _behind_of(self, stream: Any) -> Any:
        """What an event carries that is recorded on a stream, or None."""
        stream = self._of_class(stream)
        behind = None if stream is None else self._behind.get(_key(stream))
        return None if behind is None or self._is_capturing(stream.cuda_stream) else behind

    def _have_wait(self, stream: Any, behind: Any) -> None:
        """Let a stream wait for what an event carries."""
        stream = self._of_class(stream)
        if behind is not None and not self._is_capturing(stream.cuda_stream):
            self._wait(_event_of(behind), stream)

    def _has_waited(self, stream: Any, behind: Any = None) -> None:
        """Complete a stream's wait, for what carries `behind`. None is the current stream."""
        is_apart = id(stream) in self._apart
        stream = stream or self._current_stream()
        if not is_apart:
            self._have_wait(stream, behind)

    def install(self) -> None:
        """Wrap torch's classes, once."""
        if self._is_installed:
            return
        self._is_installed = True
        self._wrap_classes()
        self._wrap_any_classes()

    def _wrap_classes(self) -> None:
        order = self

        @functools.wraps(self._record)
        def record(event: Any, stream: Any = None) -> None:
            order._record(event, stream)
            event.umem_behind = order._behind_of(stream or order._current_stream())

        @functools.wraps(self._wait)
        def wait(event: Any, stream: Any = None) -> None:
            order._wait(event, stream)
            order._has_waited(stream, _behind(event))

        @functools.wraps(self._synchronize)
        def synchronize(event: Any) -> None:
            order._synchronize(event)
            if (behind := _behind(event)) is not None:
                order._synchronize(_event_of(behind))

        @functools.wraps(self._query)
        def query(event: Any) -> bool:
            behind = _behind(event)
            return order._query(event) and (behind is None or order._query(_event_of(behind)))

        _replace(
            "cuda_event",
            self._event_class,
            record=record,
            wait=wait,
            synchronize=synchronize,
            query=query,
        )
        self._wrap_host_waits("cuda_stream", self._stream_class)

    def _wrap_any_classes(self) -> None:
        order = self
        record, wait = self._any_event_class.record, self._any_event_class.wait
        record_event = self._any_stream_class.record_event
        wait_event = self._any_stream_class.wait_event
        wait_stream = self._any_stream_class.wait_stream

        @functools.wraps(record)
        def any_record(event: Any, stream: Any = None) -> None:
            if stream is None and event.device.type == "cuda":
                stream = order._current_stream()
            if stream is not None:
                order._have_wait(stream, order._behind_of(stream))
            record(event, stream)

        @functools.wraps(record_event)
        def any_record_event(stream: Any, event: Any = None) -> Any:
            order._have_wait(stream, order._behind_of(stream))
            return record_event(stream, event)

        @functools.wraps(wait)
        def any_wait(event: Any, stream: Any = None) -> None:
            wait(event, stream)
            if stream is not None or event.device.type == "cuda":
                order._has_waited(stream)

        @functools.wraps(wait_event)
        def any_wait_event(stream: Any, event: Any) -> None:
            wait_event(stream, event)
            order._has_waited(stream, _behind(event))

        @functools.wraps(wait_stream)
        def any_wait_stream(stream: Any, other: Any) -> None:
            wait_stream(stream, other)
            order._has_waited(stream, order._behind_of(other))

        _replace("event", self._any_event_class, record=any_record, wait=any_wait)
        _replace(
            "stream",
            self._any_stream_class,
            record_event=any_record_event,
            wait_event=any_wait_event,
            wait_stream=any_wait_stream,
        )
        self._wrap_host_waits("stream", self._any_stream_class)

    def _wrap_host_waits(self, key: str, kind: Any) -> None:
        """Have the host wait for what is behind a stream's work as well."""
        order, finish, is_finished = self, kind.synchronize, kind.query

        @functools.wraps(finish)
        def any_finish(stream: Any) -> None:
            finish(stream)
            if (behind := order._behind_of(stream)) is not None:
                order._synchronize(_event_of(behind))

        @functools.wraps(is_finished)
        def any_is_finished(stream: Any) -> bool:
            if not is_finished(stream):
                return False
            behind = order._behind_of(stream)
            return behind is None or order._query(_event_of(behind))

        _replace(key, kind, synchronize=any_finish, query=any_is_finished)


def _replace(key: str, kind: Any, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        patches.replace(f"{key}_{name}", method, owner=kind)


def _behind(event: Any) -> Any:
    return getattr(event, "umem_behind", None)


def _event_of(behind: Any) -> Any:
    """What an event carries, which may be a function that waits until it is recorded."""
    return behind() if callable(behind) else behind


def _key(stream: Any) -> tuple[int, int]:
    return stream.device_index, stream.cuda_stream


@functools.cache
def cuda_stream_order() -> StreamOrder:
    """The order of this process's CUDA streams."""
    return StreamOrder(
        torch.cuda.Stream,
        torch.cuda.Event,
        torch.Stream,
        torch.Event,
        torch.cuda.current_stream,
        bindings.is_capturing,
    )
