"""Sizes of the blocks that umem's allocator hands out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["PAGE_BYTES", "block_bytes"]

PAGE_BYTES = 2 << 20
"""Requests from here on get pages of their own. Smaller ones share them with their neighbours."""

_SMALL_STEP_BYTES = 512


def block_bytes(requested_bytes: ArrayLike) -> NDArray[np.int64]:
    """Bytes of the blocks that requests are served from.

    Parameters
    ----------
    requested_bytes
        One size, or many. From :data:`PAGE_BYTES` on they are rounded up to whole pages, smaller
        ones to 512 bytes: so does ``DeviceAllocator::serve``.
    """
    sizes = np.asarray(requested_bytes, np.int64)
    step = np.where(sizes < PAGE_BYTES, _SMALL_STEP_BYTES, PAGE_BYTES)
    rounded: NDArray[np.int64] = -(-sizes // step) * step
    return rounded
