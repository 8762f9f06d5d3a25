"""Host memory that activations wait in, kept from step to step."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from umem.activations._mover import Mover
from umem.host import host_memory_bytes
from umem.units import format_bytes

__all__ = ["HostBuffer", "HostPool"]

GRAIN_BYTES = 2 << 20
"""Sizes are rounded up to this: the kernel's huge pages, which take the fewest calls to pin."""

LEAST_RESERVE_BYTES = 2 << 30
RESERVE_PARTS = 16
"""A sixteenth of the host's memory, and 2 GiB at least, stay available when the pool grows. Pinned
pages cannot be swapped out or dropped, so that what data loaders and a checkpoint being written
need next would otherwise wake the out-of-memory killer. 2 GiB is a few batches and one shard."""


class HostBuffer:
    """Host memory of one tensor at a time.

    Attributes
    ----------
    memory
        Its bytes.
    mark
        The last copy from or to it.
    """

    def __init__(self, memory: torch.Tensor, mover: Mover) -> None:
        self.memory = memory
        self.mark: Any = None
        self._mover = mover

    @property
    def size_bytes(self) -> int:
        """Bytes that it can hold."""
        return self.memory.nbytes

    def __del__(self) -> None:
        if sys.is_finalizing():  # the process gives everything back
            return
        if self.mark is not None:
            self._mover.finish(self.mark)
        self._mover.free_host(self.memory)


class HostPool:
    """Buffers by size, handed out again when a tensor is done with them.

    Parameters
    ----------
    mover
        Allocates them.
    limit_bytes
        Most bytes that are held at a time; None where only the host's own memory limits them.
    host_bytes
        Tells the host's (total, available) memory in bytes, or None.
    """

    def __init__(
        self,
        mover: Mover,
        limit_bytes: int | None = None,
        host_bytes: Callable[[], tuple[int, int] | None] = host_memory_bytes,
    ) -> None:
        self._mover = mover
        self._limit_bytes = limit_bytes
        self._host_bytes = host_bytes
        # All that are there: each takes itself off the books when it goes, in whatever thread.
        self._buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._free: dict[int, list[HostBuffer]] = {}
        # Filled by finalizers, which run anywhere and so must not take a lock.
        self._returned: deque[HostBuffer] = deque()
        # Sizes that were refused though no buffer was unused, since unused ones were freed last.
        self._refused: set[int] = set()
        self._has_warned = False
        self._is_closed = False
        self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(buffer.size_bytes for buffer in self._buffers)

    def take(self, size_bytes: int) -> HostBuffer | None:
        """A buffer of at least this size; None where the host has no room for one."""
        self._sort_returned()
        wanted = -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES
        # Lengths of batches vary: a somewhat larger buffer serves as well as a new one.
        fitting = [size for size in self._free if wanted <= size <= 2 * wanted]
        if fitting:
            return self._pop(min(fitting))
        refusal = self._refusal(wanted)
        # Steps are alike. In a size that found no room before, what is unused now is what the rest
        # of the step used then: freed, it would be pinned anew in every step.
        if refusal and self._free and wanted not in self._refused:
            self.trim()
            self._refused.clear()  # the steps are others now
            refusal = self._refusal(wanted)
        if refusal:
            self._refused.add(wanted)
        if not refusal:
            try:
                return self._grow(wanted)
            except MemoryError as error:
                refusal = str(error)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"activations stay on the device, as there is no host memory for {refusal}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None

    def give_back(self, buffer: HostBuffer) -> None:
        """Take a buffer back, from any thread and at any moment."""
        self._returned.append(buffer)
        if self._is_closed:
            self._returned.clear()

    def trim(self) -> None:
        """Free what is not in use. Waits for the copies that are at work on it."""
        self._returned.clear()
        self._free.clear()

    def close(self) -> None:
        """Free what is not in use now, and the rest when it is given back."""
        self._is_closed = True  # first: what is given back meanwhile is freed on either side
        self.trim()

    def _grow(self, size_bytes: int) -> HostBuffer:
        buffer = HostBuffer(self._mover.allocate_host(size_bytes), self._mover)
        self._buffers.add(buffer)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer

    def _pop(self, size_bytes: int) -> HostBuffer:
        buffers = self._free[size_bytes]
        buffer = buffers.pop()
        if not buffers:
            del self._free[size_bytes]
        return buffer

    def _sort_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._free.setdefault(buffer.size_bytes, []).append(buffer)

    def _refusal(self, size_bytes: int) -> str:
        """Why the pool must not grow by this much, or ""."""
        grown = self.held_bytes + size_bytes
        if self._limit_bytes is not None and grown > self._limit_bytes:
            return (
                f"{format_bytes(size_bytes)} more than the {format_bytes(self.held_bytes)} in use: "
                f"host_limit_bytes is {format_bytes(self._limit_bytes)}"
            )
        known = self._host_bytes()
        if known is None:
            return ""
        total_bytes, available_bytes = known
        reserve_bytes = max(LEAST_RESERVE_BYTES, total_bytes // RESERVE_PARTS)
        if available_bytes - size_bytes < reserve_bytes:
            return (
                f"{format_bytes(size_bytes)} more: {format_bytes(available_bytes)} are available, "
                f"of which {format_bytes(reserve_bytes)} stay in reserve"
            )
        return ""
