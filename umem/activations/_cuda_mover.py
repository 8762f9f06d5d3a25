"""Copies between a GPU and pinned host memory, on streams of their own."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from umem.activations._host_pool import HostBuffer
from umem.activations._link import Link
from umem.activations._mover import bytes_of

__all__ = ["CudaMover"]

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every context of the process."""

_WIPE_ON_FORK = 18
"""``MADV_WIPEONFORK``, which Python has no name for."""


class CudaMover:
    """Moves tensors of one GPU, on streams of its own for each direction.

    Parameters
    ----------
    device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward = Link(device, leaves=True)
        self._inward = Link(device, leaves=False)
        self._process = os.getpid()

    def is_ready(self) -> bool:
        """Not while a graph is captured, which would be captured with the copies in it."""
        return not torch.cuda.is_current_stream_capturing()

    def stream(self) -> torch.cuda.Stream:
        """The current stream of the device in this thread."""
        return torch.cuda.current_stream(self._device)

    def copy_out(
        self, pairs: Sequence[tuple[torch.UntypedStorage, HostBuffer]], stream: torch.cuda.Stream
    ) -> list[torch.cuda.Event]:
        """Copy storages into buffers, behind what the stream holds now."""
        marks = []
        self._outward.wait_stream(stream)
        for storage, buffer in pairs:
            if buffer.mark is not None:  # an earlier step may still read from it
                self._outward.wait_event(buffer.mark)
            memory = buffer.memory[: storage.nbytes()]
            buffer.mark = mark = self._outward.copy(memory, bytes_of(storage))
            marks.append(mark)
        return marks

    def copy_in(
        self, buffers: Sequence[tuple[HostBuffer, int]], stream: torch.cuda.Stream
    ) -> list[tuple[torch.UntypedStorage, Any]]:
        """Copy the first bytes of each buffer into new storages allocated on the stream."""
        with torch.cuda.stream(stream):
            blocks = [
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
                for _, size_bytes in buffers
            ]
        # The allocator hands out memory that the stream may still be using.
        self._inward.wait_stream(stream)
        moved: list[tuple[torch.UntypedStorage, Any]] = []
        for block, (buffer, size_bytes) in zip(blocks, buffers, strict=True):
            self._inward.wait_event(buffer.mark)
            buffer.mark = mark = self._inward.copy(block, buffer.memory[:size_bytes])
            moved.append((block.untyped_storage(), mark))
        return moved

    def wait(self, stream: torch.cuda.Stream, mark: torch.cuda.Event) -> None:
        """Let what the stream is given from now on wait for a mark."""
        stream.wait_event(mark)

    def use(self, storage: torch.UntypedStorage, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that another stream than the storage's own uses it."""
        bytes_of(storage).record_stream(stream)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory of this size; torch's own pinned allocator takes powers of two."""
        memory = host_pages(size_bytes)
        with torch.cuda.device(self._device):
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size_bytes, _PORTABLE)
        if int(status) != 0:
            self._forget_error()
            raise MemoryError(f"{size_bytes} bytes, which CUDA cannot pin (error {int(status)})")
        return memory

    def free_host(self, memory: torch.Tensor) -> None:
        """Unpin it; the last reference gives the pages back."""
        if not self._is_forked():
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def finish(self, mark: torch.cuda.Event) -> None:
        """Wait, in this thread, until a mark is over."""
        if not self._is_forked():
            mark.synchronize()

    def _is_forked(self) -> bool:
        """Whether this is a child of the process that made it, which has no CUDA."""
        return os.getpid() != self._process

    def _forget_error(self) -> None:
        # The runtime keeps the error of a refused call, and the next kernel launch would raise it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)


def host_pages(size_bytes: int) -> torch.Tensor:
    """Memory to pin.

    What a forked child shares, the parent's next write would move to other pages than the GPU's. So
    the child has zeros there: pages of its own, for in a hole (``MADV_DONTFORK``) its next memory
    would lie, and go when its copy of these pages does.

    Raises
    ------
    MemoryError
        Where there is none.
    """
    try:
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size_bytes} bytes: {error}") from error
    try:
        pages.madvise(_WIPE_ON_FORK)
    except OSError:  # a kernel older than that; then the hole is the lesser evil
        pages.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
    return torch.frombuffer(pages, dtype=torch.uint8)
