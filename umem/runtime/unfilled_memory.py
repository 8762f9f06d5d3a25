"""New memory for copies, which nothing has to fill before.

Where algorithms are deterministic, torch fills what ``torch.empty`` makes. Memory on the host would
be filled over the link, which takes as long as the copy that comes next.

Source: https://docs.pytorch.org/docs/stable/deterministic.html
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["unfilled", "unfilled_bytes", "unfilled_like"]


def unfilled(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor."""
    storage = torch.UntypedStorage(math.prod(size) * dtype.itemsize, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage).resize_(size)


def unfilled_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """A tensor of bytes."""
    return unfilled((size_bytes,), torch.uint8, device)


def unfilled_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for the contents of a tensor that fills its own, of the same layout."""
    storage = torch.UntypedStorage(tensor.nbytes, device=tensor.device)
    new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return new.set_(storage, 0, tensor.size(), tensor.stride())
