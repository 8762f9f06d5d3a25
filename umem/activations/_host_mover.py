"""Copies within host memory, done at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from umem.activations._host_pool import HostBuffer
from umem.activations._mover import bytes_of

__all__ = ["HostMover"]


class HostMover:
    """Moves tensors of the CPU into ordinary memory and back.

    No memory is saved by it. A model runs through the same store, with the same results, on a
    machine without a GPU.
    """

    def is_ready(self) -> bool:
        """Always."""
        return True

    def stream(self) -> None:
        """Work on the CPU is in order by itself."""

    def copy_out(
        self, pairs: Sequence[tuple[torch.UntypedStorage, HostBuffer]], stream: Any
    ) -> Sequence[Any]:
        """Copy storages into buffers."""
        for storage, buffer in pairs:
            buffer.memory[: storage.nbytes()].copy_(bytes_of(storage))
        return [None] * len(pairs)

    def copy_in(
        self, buffers: Sequence[tuple[HostBuffer, int]], stream: Any
    ) -> list[tuple[torch.UntypedStorage, Any]]:
        """Copy the first bytes of each buffer into a new storage."""
        return [
            (buffer.memory[:size_bytes].clone().untyped_storage(), None)
            for buffer, size_bytes in buffers
        ]

    def wait(self, stream: Any, mark: Any) -> None:
        """Nothing is ever under way."""

    def use(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """There is one order of work."""

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Ordinary memory."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def free_host(self, memory: torch.Tensor) -> None:
        """The last reference frees it."""

    def finish(self, mark: Any) -> None:
        """Nothing is ever under way."""
