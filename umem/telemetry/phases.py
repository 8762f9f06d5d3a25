"""Phases of the executor while they run, passed to watchers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["phase_begins", "watched_phases"]

_lock = threading.Lock()
_watchers: tuple[Callable[[], object], ...] = ()


def phase_begins() -> None:
    """Call the functions of :func:`watched_phases`, in the thread that runs the phase."""
    for watch in _watchers:
        watch()


@contextmanager
def watched_phases(watch: Callable[[], object]) -> Iterator[None]:
    """Call a function wherever a phase of the executor begins; it must not raise into the step."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watch)
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(it for it in _watchers if it is not watch)
