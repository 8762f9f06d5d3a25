"""What is on the device, by class, sampled over a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass

__all__ = ["MAX_SAMPLES", "Residency", "ResidencySampler"]

MAX_SAMPLES = 2**16
"""Most samples that are kept of one run."""


@dataclass(frozen=True, eq=False)
class Residency:
    """Bytes on the device over a run. K samples.

    They are the executor's books: what is there once everything asked for so far has arrived. The
    host runs ahead of the device, so that the device comes to the same point a little later.

    Parameters
    ----------
    time_ns : int64[K]
        Ascending, since the start of the recording, by the time of the host.
    resident_bytes : int64[K, 6]
        By class number, from this sample until the next one.
    """

    time_ns: npt.NDArray[np.int64]
    resident_bytes: npt.NDArray[np.int64]

    def peak_bytes(self) -> dict[TensorClass, int]:
        """The most of each class that was on the device; classes that never were are left out."""
        peak = self.resident_bytes.max(axis=0, initial=0)
        return {it: int(peak[it.number]) for it in TensorClass if peak[it.number]}

    def total_peak_bytes(self) -> int:
        """The most that was on the device at once."""
        return int(self.resident_bytes.sum(axis=1).max(initial=0))


class ResidencySampler:
    """Takes samples, from any thread. Past the limit, every second one is left out.

    Parameters
    ----------
    ask : callable
        Returns bytes on the device by class, or None while nobody keeps books.
    limit
        Most samples that are kept, at least 2.
    """

    def __init__(
        self, ask: Callable[[], Mapping[TensorClass, int] | None], limit: int = MAX_SAMPLES
    ) -> None:
        self._ask = ask
        self._limit = limit
        self._lock = threading.Lock()  # phases begin in autograd's threads too
        self._rows: list[tuple[int, ...]] = []
        self._stride = 1
        self._skipped = 0

    def take(self, now_ns: Callable[[], int]) -> None:
        """Take a sample, or leave it out where that is its turn."""
        with self._lock:
            self._skipped += 1
            if self._skipped < self._stride:
                return
            self._skipped = 0
            found = self._ask()
            if found is None:
                return
            self._rows.append((now_ns(), *(int(found.get(it, 0)) for it in TensorClass)))
            if len(self._rows) >= self._limit:
                del self._rows[1::2]
                self._stride *= 2

    def series(self, begin_ns: int) -> Residency | None:
        """The samples since a moment; None where there are none."""
        rows = [row for row in self._rows if row[0] >= begin_ns]
        if not rows:
            return None
        table = np.array(rows, np.int64)
        return Residency(table[:, 0] - begin_ns, table[:, 1:].copy())
