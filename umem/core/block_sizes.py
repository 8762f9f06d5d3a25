"""Sizes of the blocks that umem's allocator hands out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["LARGE_BYTES", "block_bytes"]

LARGE_BYTES = 2 << 20
"""Smallest large request. Large blocks share no page with a neighbour and can move by themselves;
smaller ones share pages."""

LARGE_STEP_BYTES = 64 << 10
"""Unit of large blocks: the largest page by which a driver tracks residency."""

_SMALL_STEP_BYTES = 512


def block_bytes(requested_bytes: ArrayLike) -> NDArray[np.int64]:
    """Sizes of the blocks that serve requests, one or many.

    Requests from :data:`LARGE_BYTES` on are rounded up to :data:`LARGE_STEP_BYTES`, smaller ones to
    512 bytes, as in ``DeviceAllocator::serve``.
    """
    sizes = np.asarray(requested_bytes, np.int64)
    step = np.where(sizes < LARGE_BYTES, _SMALL_STEP_BYTES, LARGE_STEP_BYTES)
    rounded: NDArray[np.int64] = -(-sizes // step) * step
    return rounded
