"""The most bytes that live tensors had at once on a device, for several readers side by side."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["PeakReader"]


class PeakReader:
    """Reads the peak since it last did so.

    The allocator has one peak for a device, which a look resets. What one reader finds counts for
    all others too: two trainings on one device would hide their peaks from each other.
    """

    def __init__(self, allocator: Allocator, device: int) -> None:
        self._allocator = allocator
        self._device = device
        self._peak_bytes = 0
        """Since its last look, as others have found."""
        _readers.append(weakref.ref(self, _readers.remove))

    def take(self) -> int:
        """Bytes of live tensors at the fullest moment since the last look."""
        peak_bytes: int = self._allocator.take_peak_bytes(self._device)
        for reference in _readers.copy():  # one may end meanwhile
            reader = reference()
            if reader is None or reader._device != self._device:
                continue
            if reader._allocator is self._allocator:
                reader._peak_bytes = max(reader._peak_bytes, peak_bytes)
        peak_bytes, self._peak_bytes = self._peak_bytes, 0
        return peak_bytes


_readers: list[weakref.ref[PeakReader]] = []
