"""Steps and phases while they run: marked for reports, and passed to watchers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from umem.telemetry.records import NamedRange

__all__ = ["Marks", "phase_begins", "watched_phases"]

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


class Marks:
    """Steps, which follow each other, and named phases, on any clock."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.phases: list[NamedRange] = []
        self._step_begin_ns = 0

    def begin_step(self, now_ns: int) -> None:
        """Begin the next step."""
        self._step_begin_ns = now_ns

    def end_step(self, now_ns: int) -> None:
        """End the step."""
        self.steps.append((self._step_begin_ns, now_ns))

    @contextmanager
    def phase(self, name: str, now_ns: Callable[[], int]) -> Iterator[None]:
        """Mark a phase that lasts as long as the ``with`` block."""
        begin_ns = now_ns()
        try:
            yield
        finally:
            self.phases.append(NamedRange(name, begin_ns, now_ns()))

    def columns_since(self, begin_ns: int) -> dict[str, Any]:
        """The fields of a recording that began at `begin_ns`."""
        starts, ends = zip(*self.steps, strict=True) if self.steps else ((), ())
        return {
            "step_start_ns": np.array(starts, np.int64) - begin_ns,
            "step_end_ns": np.array(ends, np.int64) - begin_ns,
            "phases": tuple(
                NamedRange(it.name, it.start_ns - begin_ns, it.end_ns - begin_ns)
                for it in self.phases
            ),
        }
