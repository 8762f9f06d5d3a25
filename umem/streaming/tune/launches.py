"""What the processor takes to launch updates of streamed state, where the device waits for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from umem.capture.live.timing import Clock

__all__ = ["Launches"]

_SAMPLES = 4
"""Steps that count, the latest ones."""

_MOST_S = 1e-3
"""More for a piece was not its launch: the first steps lock memory amid the calls."""


class _Sample(NamedTuple):
    piece_s: float
    is_waited_for: bool


class Launches:
    """Measures it in each step.

    Where the device is still at work for the passes when all updates are launched, they take no
    time of the step. Where it is done, it had nothing to do meanwhile.

    Parameters
    ----------
    clock
        Marks moments on the device.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mark: Any = None
        self._begun_s = 0.0
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)

    def begin(self) -> None:
        """The next calls launch updates."""
        if self._clock.is_usable():
            self._mark, self._begun_s = self._clock.mark(), time.perf_counter()

    def end(self, pieces: int) -> None:
        """Updates of so many pieces are launched."""
        if self._mark is None:
            return
        if pieces and self._clock.is_usable():
            piece_s = min(_MOST_S, (time.perf_counter() - self._begun_s) / pieces)
            self._samples.append(_Sample(piece_s, self._clock.has_run_dry(self._mark)))
        self._clock.release([self._mark])
        self._mark = None

    @property
    def waited_s(self) -> float:
        """Seconds for each piece in which the device waits; 0 in most steps where it does not."""
        waited = [it.piece_s for it in self._samples if it.is_waited_for]
        return min(waited) if 2 * len(waited) > len(self._samples) else 0.0
