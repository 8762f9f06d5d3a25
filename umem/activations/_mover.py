"""Who copies between the device and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from umem.activations._host_pool import HostBuffer

__all__ = ["Mover", "bytes_of"]


class Mover(Protocol):
    """Copies of one device. Nothing here waits for a copy but `finish`.

    A *stream* orders work on the device; a *mark* is the point where a copy is over. Both are the
    mover's own kind of object. A mark of None is over already.
    """

    def is_ready(self) -> bool:
        """Whether copies may be asked for in this thread now; not while a graph is captured."""

    def stream(self) -> Any:
        """What orders this thread's work on the device at present."""

    def copy_out(
        self, pairs: Sequence[tuple[torch.UntypedStorage, HostBuffer]], stream: Any
    ) -> Sequence[Any]:
        """Copy storages into buffers, behind what the stream holds now.

        In order, a mark for each. Each buffer's own mark is waited for first, and becomes the new
        one.
        """

    def copy_in(
        self, buffers: Sequence[tuple[HostBuffer, int]], stream: Any
    ) -> list[tuple[torch.UntypedStorage, Any]]:
        """Copy the first bytes of each buffer into new storages allocated on the stream.

        In order, a mark for each, which becomes the buffer's. Where the device has no memory, the
        error comes before the first copy.
        """

    def wait(self, stream: Any, mark: Any) -> None:
        """Let what the stream is given from now on wait for a mark."""

    def use(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """Tell the allocator that another stream than the storage's own uses it."""

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Host memory that copies are fast to and from, as one row of bytes.

        Raises
        ------
        MemoryError
            Where there is none to be had.
        """

    def free_host(self, memory: torch.Tensor) -> None:
        """Give back what `allocate_host` gave; no copy uses it any more."""

    def finish(self, mark: Any) -> None:
        """Wait, in this thread, until a mark is over."""


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage as one row, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
