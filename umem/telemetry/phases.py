"""Phases of the executor while they run, passed to watchers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["phase_begins", "watched_phases"]

_LOG = logging.getLogger("umem")

_lock = threading.Lock()
_watchers: tuple[Callable[[], None], ...] = ()


def phase_begins() -> None:
    """Call the functions of :func:`watched_phases`, in the thread that runs the phase."""
    for watch in _watchers:
        if not _call_watcher(watch):
            _remove_watcher(watch)


@contextmanager
def watched_phases(watch: Callable[[], None]) -> Iterator[None]:
    """Call a function wherever a phase of the executor begins.

    A function that raises is logged and no longer called: the step goes on without it.
    """
    global _watchers
    with _lock:
        _watchers = (*_watchers, watch)
    try:
        yield
    finally:
        _remove_watcher(watch)


def _call_watcher(watch: Callable[[], None]) -> bool:
    """Call a function that observes a step, and log what it raises.

    The caller is in the middle of a training step, which an observer's error must not end. After
    False the caller should no longer call it.
    """
    try:
        watch()
    except Exception:
        _LOG.warning(
            "umem: %r failed where a phase begins; it is no longer called, and training goes on",
            watch,
            exc_info=True,
        )
        return False
    return True


def _remove_watcher(watch: Callable[[], None]) -> None:
    global _watchers
    with _lock:
        _watchers = tuple(it for it in _watchers if it is not watch)
