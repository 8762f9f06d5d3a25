"""Prefetch, advice and discard for managed memory, on cuda-python 12 and 13.

One API over both generations of the calls: targets are tensors, CUDA arrays or address
ranges, places are :class:`Location` objects, and a stream is always named.

Importing this package needs neither cuda-python nor a GPU; the first call does.
"""

from umem.cuda._location import Location
from umem.cuda._operations import (
    Advice,
    accessed_by,
    advise,
    discard,
    discard_and_prefetch,
    is_read_mostly,
    last_prefetch_location,
    preferred_location,
    prefetch,
    prefetch_batch,
    unadvise,
)
from umem.cuda._range import Range

__all__ = [
    "Advice",
    "Location",
    "Range",
    "accessed_by",
    "advise",
    "discard",
    "discard_and_prefetch",
    "is_read_mostly",
    "last_prefetch_location",
    "preferred_location",
    "prefetch",
    "prefetch_batch",
    "unadvise",
]
