"""Values of buffers that a block's call changes, such as averages of BatchNorm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from umem.torch_compat import foreach_copy

__all__ = ["BufferValues", "have_equal_bits"]


class BufferValues:
    """Buffers, and values that they had at one moment.

    To put them back counts as no change: autograd may have saved the buffers.

    Parameters
    ----------
    buffers
        The buffers.
    values
        The value of each; those of now by default.
    """

    def __init__(
        self, buffers: Iterable[torch.Tensor], values: Iterable[torch.Tensor] | None = None
    ) -> None:
        self.buffers = [it.data for it in buffers]
        self._values = [it.clone() for it in self.buffers] if values is None else list(values)

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(it.nbytes for it in self._values)

    def are_there(self) -> bool:
        """Whether the buffers have these bits."""
        return all(map(have_equal_bits, self.buffers, self._values))

    def put_back(self) -> None:
        """Give the buffers these values again."""
        with torch.no_grad():
            for kind in {it.dtype for it in self.buffers}:  # one kernel for each
                its = [number for number, it in enumerate(self.buffers) if it.dtype is kind]
                values = [self._values[number] for number in its]
                foreach_copy([self.buffers[number] for number in its], values)

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
