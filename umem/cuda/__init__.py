"""Prefetch, advice and discard for managed memory, on cuda-python 12 and 13.

One API over both generations of the calls: targets are tensors, CUDA arrays or address
ranges, places are :class:`Location` objects, and a stream is always named.

Importing this package needs neither cuda-python nor a GPU; the first call does.
"""

from __future__ import annotations

from umem.cuda.operations import (
    Advice,
    accessed_by,
    advise,
    discard,
    is_read_mostly,
    last_prefetch_location,
    managed_buffer,
    preferred_location,
    prefetch,
    unadvise,
)
from umem.cuda.targets import Location, Range

__all__ = [
    "Advice",
    "Location",
    "Range",
    "accessed_by",
    "advise",
    "discard",
    "is_read_mostly",
    "last_prefetch_location",
    "managed_buffer",
    "preferred_location",
    "prefetch",
    "unadvise",
]
