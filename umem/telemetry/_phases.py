"""Phases of a step while they run: named for profilers, and told to an open profile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from umem.telemetry._nsys import PHASE_PREFIX

__all__ = ["PhaseRanges", "nvtx_phases", "watched_phases"]

_VARIABLE = "UMEM_NVTX"

_lock = threading.Lock()
_switches = 0
_watchers: tuple[Callable[[], None], ...] = ()


class PhaseRanges:
    """NVTX ranges of the phases that follow each other in a step.

    Whoever runs the step calls :meth:`begin` where a phase begins, in the thread that runs it. The
    ranges are pushed and popped in that thread, as NVTX wants it: a phase that another thread began
    stays open there until that thread comes to its next phase, or ends.

    Ranges are made inside of :func:`nvtx_phases`, and always where the environment variable
    ``UMEM_NVTX`` is ``1`` when the object is made. Otherwise calls cost well below a microsecond.
    """

    def __init__(self) -> None:
        self._always = os.environ.get(_VARIABLE) == "1"
        self._thread = threading.local()

    def begin(self, label: str) -> None:
        """Say that a phase begins, which ends the one before it in this thread."""
        for watch in _watchers:
            watch()
        self.end()
        if _switches or self._always:
            nvtx = _torch_nvtx()
            if nvtx is not None:
                nvtx.range_push(PHASE_PREFIX + label)
                self._thread.open = True

    def end(self) -> None:
        """Say that the phase which this thread began is over. Does nothing where none is open."""
        if getattr(self._thread, "open", False):
            self._thread.open = False
            nvtx = _torch_nvtx()
            if nvtx is not None:
                nvtx.range_pop()


@contextmanager
def nvtx_phases() -> Iterator[None]:
    """Make NVTX ranges of the phases of every step that runs in the ``with`` block.

    They show in Nsight Systems, and ``umem report`` finds them in its exports. A torch without CUDA
    makes none.

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
    """Call a function wherever a phase begins, in the thread that runs it."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watch)
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(it for it in _watchers if it is not watch)


def _torch_nvtx() -> ModuleType | None:
    import torch

    return torch.cuda.nvtx if torch.version.cuda is not None else None
