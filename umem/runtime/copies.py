"""Counts the copies between device and host that umem makes, by direction and tensor class.

A profiler shows copies, and not what they copy. Their times are taken while somebody asks for them:
an event with a time before each copy costs the training more than a count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from umem.core.classes import TensorClass
from umem.core.report import Direction, Traffic

if TYPE_CHECKING:
    import torch

__all__ = ["CopyCounts", "copy_counts"]

_MOST_OPEN = 4096
"""Timed copies that nobody has asked for yet; those beyond are counted without their time."""


class CopyCounts:
    """Sums over the copies of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[Direction, TensorClass], Traffic] = {}
        self._open: list[tuple[Direction, TensorClass, Callable[[], float]]] = []
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

    @contextmanager
    def counted(
        self,
        direction: Direction,
        tensor_class: TensorClass,
        size_bytes: int,
        stream: torch.cuda.Stream | None,
    ) -> Iterator[None]:
        """Count the copy that the block starts on a stream.

        `stream` is None for a copy that is over with the block.
        """
        begun = None
        if stream is not None and self._readers and len(self._open) < _MOST_OPEN:
            begun = _event_on(stream)
        yield
        with self._lock:
            self._add(Traffic(direction, "copy", tensor_class, size_bytes, 0.0, 1))
            if begun is not None and stream is not None:
                seconds = _seconds(begun, _event_on(stream))
                self._open.append((direction, tensor_class, seconds))

    def copied_bytes(self) -> dict[tuple[Direction, TensorClass], int]:
        """Bytes so far by direction and class. Waits for no copy."""
        with self._lock:
            return {key: it.bytes for key, it in self._sums.items()}

    def traffic(self) -> tuple[Traffic, ...]:
        """The sums so far, by direction and class. Waits for copies whose time is taken."""
        with self._lock:
            taken, self._open = self._open, []
            for direction, tensor_class, seconds in taken:
                self._add(Traffic(direction, "copy", tensor_class, 0, seconds(), 0))
            return tuple(self._sums.values())

    def _add(self, more: Traffic) -> None:
        key = more.direction, more.tensor_class
        known = self._sums.get(key)
        if known is not None:
            more = Traffic(
                more.direction,
                more.cause,
                more.tensor_class,
                known.bytes + more.bytes,
                known.seconds + more.seconds,
                known.count + more.count,
            )
        self._sums[key] = more


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
