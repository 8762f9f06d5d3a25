"""Buffers on their way: CUPTI asks this process for them, and hands them back full.

It does so in threads of its own, which know nothing of recordings. So who gets what they bring, and
how many of them are at work, is kept for the whole process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from umem.notices import notify

__all__ = ["LONGEST_DRAIN_S", "Buffers", "Taker"]

_BUFFER_BYTES = 2**20
"""cupti-python makes an object of every record before it calls us, for some 15 us each, and nobody
can see it work: buffers are small so that this is over soon."""

_BETWEEN_FLUSHES_S = 0.02
LONGEST_DRAIN_S = 20.0
"""In all: other threads of the process may go on making records."""
_NOTICE_S = 2.0


class Taker(Protocol):
    """Gets the records of full buffers, while its recording is running and afterwards."""

    running: bool

    def take(self, activities: Sequence[Any]) -> None: ...


class Buffers:
    """CUPTI's two callbacks, and what they were called for."""

    def __init__(self) -> None:
        self.taker: Taker | None = None
        """Stays when its recording has ended, so that what comes late is counted as lost there."""
        self.is_primed = False
        """Whether CUPTI has recorded in this process before."""
        self._lock = threading.Lock()
        self._out = 0
        self._inside = 0
        self._returned = 0

    @property
    def out(self) -> int:
        """Buffers that CUPTI has asked for and not brought back."""
        return self._out

    def wanted(self) -> tuple[int, int]:
        """Size of a buffer, and the number of records in it (0: as many as fit)."""
        with self._lock:
            self._out += 1
        return _BUFFER_BYTES, 0

    def full(self, activities: Sequence[Any]) -> None:
        """Give the records of a buffer to the taker."""
        with self._lock:
            self._inside += 1
        try:
            taker = self.taker
            if taker is not None:
                taker.take(activities)
        finally:
            with self._lock:
                self._inside -= 1
                # Some may have been asked for before we were there to count.
                self._out = max(self._out - 1, 0)
                self._returned += 1

    def drain(self, flush: Callable[[], object], quiet_s: float, end_s: float) -> bool:
        """Ask for buffers until none come any more and no callback is at work.

        Parameters
        ----------
        flush
            Asks CUPTI for what it has.
        quiet_s
            Without a new buffer for so long, there is none any more.
        end_s
            When to give up, by :func:`time.monotonic`.

        Returns
        -------
        bool
            Whether it became quiet in time.
        """
        begin_s = last_s = time.monotonic()
        returned, told = -1, False
        while True:
            flush()
            now_s = time.monotonic()
            with self._lock:
                if self._inside or self._returned != returned:
                    last_s, returned = now_s, self._returned
            if now_s - last_s >= quiet_s:
                return True
            if now_s >= end_s:
                return False
            if not told and now_s - begin_s >= _NOTICE_S:
                told = True
                notify(f"CUPTI is still handing over records: at most {end_s - now_s:.0f} s more")
            time.sleep(_BETWEEN_FLUSHES_S)
