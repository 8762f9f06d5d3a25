"""New memory for copies, which nothing has to fill before.

Where algorithms are deterministic, torch fills what ``torch.empty`` makes. Memory on the host would
be filled over the link, which takes as long as the copy that comes next.

Source: https://docs.pytorch.org/docs/stable/deterministic.html
"""

from __future__ import annotations

import torch

__all__ = ["unfilled_bytes", "unfilled_like"]


def unfilled_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """A tensor of bytes."""
    storage = torch.UntypedStorage(size_bytes, device=device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def unfilled_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for the contents of a tensor that fills its own, of the same layout."""
    storage = torch.UntypedStorage(tensor.nbytes, device=tensor.device)
    new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return new.set_(storage, 0, tensor.size(), tensor.stride())
