"""Values of buffers that a block's call changes, such as averages of BatchNorm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from umem.torch_compat import foreach_copy

__all__ = ["BufferValues", "have_equal_bits"]


class BufferValues:
    """Buffers, and values that they had at one moment.

    To put them back counts as no change: autograd may have saved the buffers.

    Parameters
    ----------
    values
        By buffer.
    """

    def __init__(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self.buffers = [it.data for it in values]
        self._values = list(values.values())

    @classmethod
    def of(cls, buffers: Iterable[torch.Tensor]) -> BufferValues:
        """The values now."""
        return cls({it: it.detach().clone() for it in buffers})

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(it.nbytes for it in self._values)

    def are_there(self) -> bool:
        """Whether the buffers have these bits."""
        return all(map(have_equal_bits, self.buffers, self._values))

    def put_back(self) -> None:
        """Give the buffers these values again."""
        if self.buffers:
            with torch.no_grad():
                foreach_copy(self.buffers, self._values)

    @contextmanager
    def put_back_at_end(self) -> Iterator[None]:
        """Give the buffers these values again behind what changes them."""
        try:
            yield
        finally:
            self.put_back()


def have_equal_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type have the same contents, NaN and signs included."""
    some = (it.detach().resolve_conj().resolve_neg().contiguous() for it in (tensor, other))
    return torch.equal(*(it.view(-1).view(torch.uint8) for it in some))
