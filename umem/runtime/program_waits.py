"""Waits of the program's stream for umem's own copies, updates and looks: no time of its own work.

Whoever makes the stream wait does so within :data:`program_waits`, and so does what keeps the
processor from launching the program's kernels in measured steps alone; whoever measures listens.
"""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["ProgramWaits", "WaitListener", "program_waits"]


class WaitListener(Protocol):
    """Hears of waits in the thread that makes the stream wait."""

    def wait_begins(self) -> None:
        """The calling thread's stream is about to be made to wait."""

    def wait_ends(self) -> None:
        """It has been: its later work comes after the wait."""


class ProgramWaits:
    """A context around a call that makes the stream wait. Costs nothing while nobody listens."""

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[WaitListener] = weakref.WeakSet()
        """Those who measure now."""

    def __enter__(self) -> None:
        if self.listeners:
            for listener in tuple(self.listeners):
                listener.wait_begins()

    def __exit__(self, *_: object) -> None:
        if self.listeners:
            for listener in tuple(self.listeners):
                listener.wait_ends()


program_waits = ProgramWaits()
