"""Steps and phases while they run: marked for reports, named for profilers, passed to watchers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from umem.telemetry.records import NamedRange

__all__ = [
    "PHASE_PREFIX",
    "STEP_PREFIX",
    "Marks",
    "PhaseRanges",
    "call_watcher",
    "nvtx_phases",
    "watched_phases",
]

_LOG = logging.getLogger("umem")

STEP_PREFIX = "umem step "
PHASE_PREFIX = "umem phase "
"""How the names of umem's NVTX ranges begin."""

_VARIABLE = "UMEM_NVTX"

_lock = threading.Lock()
_switches = 0
_watchers: tuple[Callable[[], None], ...] = ()


class _ThreadState(threading.local):
    has_range = False
    """Whether the thread has pushed a range and not popped it."""


class PhaseRanges:
    """NVTX ranges of the phases of a step, which follow each other.

    The code that runs a step calls :meth:`begin` where a phase begins, in the thread that runs it.
    NVTX wants ranges pushed and popped in the same thread: a phase that one thread began stays open
    there until that thread begins its next phase, or calls :meth:`end`.

    Ranges are made inside of :func:`nvtx_phases`, and always if the environment variable
    ``UMEM_NVTX`` is ``1`` when the object is made. Otherwise calls cost well below a microsecond.
    """

    def __init__(self) -> None:
        self._always = os.environ.get(_VARIABLE) == "1"
        self._thread = _ThreadState()

    def begin(self, label: str) -> None:
        """Begin a phase, which ends the one before it in this thread."""
        for watch in _watchers:
            if not call_watcher(watch):
                _remove_watcher(watch)
        self.end()
        if _switches or self._always:
            nvtx = _torch_nvtx()
            if nvtx is not None:
                nvtx.range_push(PHASE_PREFIX + label)
                self._thread.has_range = True

    def end(self) -> None:
        """End the phase that this thread began. Does nothing where none is open."""
        if self._thread.has_range:
            self._thread.has_range = False
            nvtx = _torch_nvtx()
            if nvtx is not None:
                nvtx.range_pop()


@contextmanager
def nvtx_phases() -> Iterator[None]:
    """Make NVTX ranges of the phases of every step that runs in the ``with`` block.

    They show in Nsight Systems. A torch without CUDA makes none.

    Examples
    --------
    >>> with nvtx_phases():
    ...     pass  # training steps
    """
    global _switches
    with _lock:
        _switches += 1
    try:
        yield
    finally:
        with _lock:
            _switches -= 1


@contextmanager
def watched_phases(watch: Callable[[], None]) -> Iterator[None]:
    """Call a function wherever a phase begins, in the thread that runs the phase.

    A function that raises is logged and no longer called: the step goes on without it.
    """
    global _watchers
    with _lock:
        _watchers = (*_watchers, watch)
    try:
        yield
    finally:
        _remove_watcher(watch)


def call_watcher(watch: Callable[[], None]) -> bool:
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


def _torch_nvtx() -> ModuleType | None:
    import torch

    return torch.cuda.nvtx if torch.version.cuda is not None else None


class Marks:
    """Steps, which follow each other, and named phases, on any clock.

    They are NVTX ranges too, which any profiler shows. A torch without CUDA makes none.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.phases: list[NamedRange] = []
        self._step_begin_ns = 0
        self._nvtx = _torch_nvtx()
        self._step_range: Any = None

    def begin_step(self, now_ns: int) -> None:
        """Begin the next step."""
        self._step_begin_ns = now_ns
        if self._nvtx:
            self._step_range = self._nvtx.range_start(f"{STEP_PREFIX}{len(self.steps)}")

    def end_step(self, now_ns: int) -> None:
        """End the step."""
        self.steps.append((self._step_begin_ns, now_ns))
        self.abandon_step()

    def abandon_step(self) -> None:
        """Forget the step that has begun: the run ends before it does."""
        if self._nvtx and self._step_range is not None:
            self._nvtx.range_end(self._step_range)
            self._step_range = None

    @contextmanager
    def phase(self, name: str, now_ns: Callable[[], int]) -> Iterator[None]:
        """Mark a phase that lasts as long as the ``with`` block."""
        begin_ns = now_ns()
        opened = self._nvtx.range_start(PHASE_PREFIX + name) if self._nvtx else None
        try:
            yield
        finally:
            if self._nvtx:
                self._nvtx.range_end(opened)
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
