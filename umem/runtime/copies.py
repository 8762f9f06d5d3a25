"""Counts the copies between device and host that umem makes, by direction and tensor class.

A profiler shows copies, and not what they copy. Their times are taken while somebody asks for them:
an event with a time before each copy costs the training more than a count.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from umem.core.classes import TensorClass
from umem.core.report import Direction, Traffic

if TYPE_CHECKING:
    import torch

__all__ = ["CopyCounts", "copy_counts"]

_MOST_OPEN = 4096
"""Timed copies that nobody has asked for yet; those beyond are counted without their time."""


_Key = tuple[Direction, TensorClass]


class CopyCounts:
    """Sums over the copies of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[_Key] = Counter()
        self._count: Counter[_Key] = Counter()
        self._seconds: dict[_Key, float] = {}
        self._open: list[tuple[_Key, Callable[[], float]]] = []
        self._readers = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Take the times of all copies that begin in the block."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def counted(
        self,
        direction: Direction,
        tensor_class: TensorClass,
        size_bytes: int,
        stream: torch.cuda.Stream | None,
    ) -> AbstractContextManager[None]:
        """Count the copy that the block starts on a stream.

        `stream` is None for a copy that is over with the block.
        """
        return _Counted(self, (direction, tensor_class), size_bytes, stream)

    def begin(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """A copy begins. Returns an event at its begin if its time is taken."""
        if stream is not None and self._readers and len(self._open) < _MOST_OPEN:
            return _event_on(stream)
        return None

    def end(
        self,
        key: _Key,
        size_bytes: int,
        stream: torch.cuda.Stream | None,
        begun: torch.cuda.Event | None,
    ) -> None:
        """A copy has been started."""
        with self._lock:
            self._bytes[key] += size_bytes
            self._count[key] += 1
            if begun is not None and stream is not None:
                self._open.append((key, _seconds(begun, _event_on(stream))))

    def copied_bytes(self) -> dict[_Key, int]:
        """Bytes so far by direction and class. Waits for no copy."""
        with self._lock:
            return dict(self._bytes)

    def traffic(self) -> tuple[Traffic, ...]:
        """The sums so far, by direction and class. Waits for copies whose time is taken."""
        with self._lock:
            taken, self._open = self._open, []
            for key, seconds in taken:
                self._seconds[key] = self._seconds.get(key, 0.0) + seconds()
            return tuple(
                Traffic(key[0], "copy", key[1], size, self._seconds.get(key, 0.0), self._count[key])
                for key, size in self._bytes.items()
            )


class _Counted(AbstractContextManager[None]):
    """Counts the copy that the block starts. A generator takes longer."""

    __slots__ = ("_begun", "_counts", "_key", "_size_bytes", "_stream")

    def __init__(
        self,
        counts: CopyCounts,
        key: _Key,
        size_bytes: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._counts = counts
        self._key, self._size_bytes, self._stream = key, size_bytes, stream
        self._begun: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        self._begun = self._counts.begin(self._stream)

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        if kind is None:
            self._counts.end(self._key, self._size_bytes, self._stream, self._begun)


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    from umem.runtime.cuda_events import new_event  # imports torch, which reports do without

    event = new_event(timing=True)
    event.record(stream)
    return event


def _seconds(begun: torch.cuda.Event, ended: torch.cuda.Event) -> Callable[[], float]:
    def seconds() -> float:
        ended.synchronize()
        return begun.elapsed_time(ended) * 1e-3

    return seconds


copy_counts = CopyCounts()
"""Of this process."""
