"""Host memory that activations wait in, kept from step to step."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from umem.core.units import format_bytes
from umem.cuda import bindings as _bindings
from umem.hardware.capabilities import host_memory_bytes
from umem.runtime.cuda_events import new_event
from umem.runtime.native_library import native
from umem.runtime.state import is_enabled

__all__ = ["CudaMover", "HostBuffer", "HostMover", "HostPool", "Mover", "bytes_of"]

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


# Who copies between the device and host memory.


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


# Copies within host memory, done at once.


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


# Copies between a GPU and pinned host memory in one direction, beside the training's kernels.
#
# Plain device memory goes by the copy engines. On one H200, driver 580.159, CUDA 13.0, a
# ``cudaMemcpyAsync`` between managed memory and pinned memory kept kernels from running beside it:
# products that took 34 ms alone took 20 ms longer beside 1 GiB, nearly the time of the copy. So
# managed memory goes by way of a few MiB of plain device memory, which a kernel copies to or from
# (benchmarks/results/h200-staged-copies.txt).

_LOG = logging.getLogger("umem")


class Link:
    """One direction.

    Parameters
    ----------
    device
        The GPU.
    leaves
        Whether copies go to the host.
    """

    def __init__(self, device: torch.device, *, leaves: bool) -> None:
        self._leaves = leaves
        self._pages = torch.cuda.Stream(device)
        """What reads and writes managed memory."""
        self._link = torch.cuda.Stream(device)
        """What goes over the link."""
        self._staged: Any = None
        # torch's own allocator gives plain device memory only.
        self._may_be_managed = is_enabled()

    def wait_stream(self, stream: torch.cuda.Stream) -> None:
        """Let copies from now on wait for what a stream holds now."""
        mark = new_event()
        mark.record(stream)
        self._link.wait_event(mark)
        self._pages.wait_event(mark)

    def wait_event(self, event: torch.cuda.Event) -> None:
        """Let copies from now on wait for an event before they use host memory."""
        self._link.wait_event(event)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Copy bytes between device and pinned memory.

        Returns
        -------
        torch.cuda.Event
            When it is over.
        """
        with torch.cuda.stream(self._pages):  # with its device
            end = self._copy(to, source)
        mark = new_event()
        mark.record(end)
        return mark

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Stream:
        """Returns the stream that the copy ends on."""
        addresses = to.data_ptr(), source.data_ptr()
        if self._may_be_managed and _is_managed(addresses[1] if self._leaves else addresses[0]):
            if self._staged is None:
                self._staged = self._make_staged()
            if self._staged is not None and self._staged.fits(*addresses):
                streams = self._pages.cuda_stream, self._link.cuda_stream
                self._staged.copy(*addresses, source.nbytes, *streams)
                return self._link if self._leaves else self._pages
        with torch.cuda.stream(self._link):
            to.copy_(source, non_blocking=True)
        return self._link

    def _make_staged(self) -> Any:
        try:
            return native().StagedCopy(self._pages.device_index, self._leaves)
        except RuntimeError as error:
            self._may_be_managed = False
            _LOG.warning(
                "umem: activations go by cudaMemcpyAsync, which keeps kernels waiting: %s", error
            )
            return None


def _is_managed(address: int) -> bool:
    return _bindings.memory_type(address) == "cudaMemoryTypeManaged"


# Copies between a GPU and pinned host memory, on streams of their own.

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
