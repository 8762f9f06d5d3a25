"""What operators hold for a moment inside a phase, which only the allocator sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from umem.blocks import block_bytes
from umem.recorder._memory import StepLook
from umem.trace._storages import Storage

__all__ = ["LEAST_BYTES", "live_at_starts", "temporary_bytes"]

LEAST_BYTES = 1 << 20
"""Less than this is not worth a tensor of its own in the trace."""


def temporary_bytes(
    look: StepLook, numbers: NDArray[np.int64], live_bytes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Bytes allocated at the worst moment of each phase beyond those of the trace's tensors.

    Parameters
    ----------
    look
        L phases, with what the allocator has told.
    numbers
        Number in the trace of each of them, (L,).
    live_bytes
        Bytes of the blocks of all tensors that the trace says are there in its P phases, (P,).

    Returns
    -------
    array of int64, (P,)
        0 or more. What is allocated from the first phase to the last and no tensor of the step,
        such as another model, counts for nothing.
    """
    peaks = np.zeros(len(live_bytes), np.int64)
    np.maximum.at(peaks, numbers, np.array(look.peak_bytes, np.int64))
    unknown = np.array(look.start_bytes, np.int64) - live_at_starts(look.storages, len(numbers))
    return np.maximum(peaks - live_bytes - unknown.min(), 0)


def live_at_starts(storages: Sequence[Storage], phase_count: int) -> NDArray[np.int64]:
    """Bytes of the blocks of the storages that are there when each phase begins."""
    sizes = block_bytes(np.array([storage.bytes for storage in storages], np.int64))
    change = np.zeros(phase_count + 1, np.int64)
    for storage, size in zip(storages, sizes, strict=True):
        # Born in one phase, it is there when the next one begins; `died` is the phase after the
        # one in which it goes.
        change[storage.born + 1] += size
        if storage.died is not None:
            change[max(storage.died, storage.born + 1)] -= size
    return change.cumsum()[:-1]
