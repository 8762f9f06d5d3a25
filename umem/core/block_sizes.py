"""Sizes of the blocks that umem's allocator hands out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["LARGE_BYTES", "LARGE_STEP_BYTES", "block_bytes"]

LARGE_BYTES = 2 << 20
"""Requests from here on are large: their blocks share no page with a neighbour, and can move.
Smaller ones do."""

LARGE_STEP_BYTES = 64 << 10
"""What large blocks are multiples of: the largest page by which a driver knows where memory is."""

_SMALL_STEP_BYTES = 512


def block_bytes(requested_bytes: ArrayLike) -> NDArray[np.int64]:
    """Bytes of the blocks that requests are served from.

    Parameters
    ----------
    requested_bytes
        One size, or many. From :data:`LARGE_BYTES` on they are rounded up to
        :data:`LARGE_STEP_BYTES`, smaller ones to 512 bytes: so does ``DeviceAllocator::serve``.
    """
    sizes = np.asarray(requested_bytes, np.int64)
    step = np.where(sizes < LARGE_BYTES, _SMALL_STEP_BYTES, LARGE_STEP_BYTES)
    rounded: NDArray[np.int64] = -(-sizes // step) * step
    return rounded
