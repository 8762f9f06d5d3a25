"""Copies of activations between a device and host memory, and the pool of host buffers."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from umem.core.classes import TensorClass
from umem.core.report import Direction
from umem.core.units import format_bytes
from umem.hardware.host_memory import host_memory_bytes
from umem.runtime.copies import copy_counts
from umem.runtime.cuda_events import new_event
from umem.runtime.cuda_streams import CurrentStream, own_stream, run_on
from umem.runtime.native_library import native
from umem.runtime.program_waits import program_waits
from umem.runtime.state import is_enabled, runtime

__all__ = [
    "CudaMover",
    "HostBuffer",
    "HostPool",
    "Mover",
    "allocate_host_pages",
    "returning_bytes",
]

GRAIN_BYTES = 2 << 20
"""Buffer sizes are rounded up to the kernel's huge pages, which take the fewest calls to pin."""

MIN_RESERVE_BYTES = 2 << 30
RESERVE_DIVISOR = 16
"""A sixteenth of the host's memory, and at least 2 GiB, stays available when the pool grows. The
kernel cannot swap out pinned pages: without a reserve, data loaders or the writing of a checkpoint
would trigger the out-of-memory killer. 2 GiB holds a few batches and one checkpoint shard."""

CUDA_HOST_REGISTER_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every CUDA context of the process."""

_EVENT_BYTES = 16 << 20
"""Copies to the device have a common end up to so many bytes, which PCIe 5 moves in 0.3 ms. To wait
for each of several small ones takes the processor longer than it spares the program's stream."""

MADV_WIPEONFORK = 18
"""Missing in Python's ``mmap`` module."""

_LOG = logging.getLogger("umem")

_Copy = tuple[int, int, int]
"""To, from, and bytes."""


class HostBuffer:
    """Host memory for the contents of one storage at a time.

    Attributes
    ----------
    memory
        The bytes.
    event
        The end of the last copy from or to the buffer.
    """

    def __init__(self, memory: torch.Tensor, mover: Mover) -> None:
        self.memory = memory
        self.event: Any = None
        """The end of the last copy from or to the buffer."""
        self._mover = mover

    @property
    def size_bytes(self) -> int:
        """Capacity in bytes."""
        return self.memory.nbytes

    def __del__(self) -> None:
        if sys.is_finalizing():  # the operating system frees everything
            return
        if self.event is not None:
            self._mover.finish(self.event)
        self._mover.free_host(self.memory)


class Mover:
    """Copies between one device and host memory. Only `finish` blocks the calling thread.

    A *stream* orders work on the device, and an *event* is the end of a copy; both are objects of
    the mover. An event of None is over already. The defaults are those of a device whose copies are
    over when they return.
    """

    def is_ready(self) -> bool:
        """Whether this thread may start copies now: not while it captures a CUDA graph."""
        return True

    def stream(self) -> Any:
        """The stream of this thread's work on the device."""
        return None

    def is_on_device(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage of the device's tensors has memory of the device."""
        return True

    def copy_out(
        self, pairs: Sequence[tuple[torch.UntypedStorage, HostBuffer]], stream: Any
    ) -> Sequence[Any]:
        """Start copying storages into buffers, after the work that the stream holds now.

        Returns the event of each copy, in order. A copy first waits for its buffer's event, and
        its own event becomes the buffer's.
        """
        for storage, buffer in pairs:
            buffer.memory[: storage.nbytes()].copy_(_as_bytes(storage))
        return [None] * len(pairs)

    def copy_in(
        self, buffers: Sequence[tuple[HostBuffer, int]], stream: Any
    ) -> list[tuple[torch.UntypedStorage, Any]]:
        """Start copying the first bytes of each buffer into new storages of the stream.

        Returns the storage and the event of each copy, in order; the event becomes the buffer's.
        If the device has no memory, the error comes before the first copy.
        """
        return [(buffer.memory[:size].clone().untyped_storage(), None) for buffer, size in buffers]

    def wait(self, stream: Any, event: Any) -> None:
        """Let later work of the stream wait for an event."""
        return

    def record_use(self, storage: torch.UntypedStorage, stream: Any) -> None:
        """Tell the device's allocator that another stream than the storage's own uses it."""
        return

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Allocate host memory for fast copies, as a tensor of bytes.

        Raises
        ------
        MemoryError
            If there is none.
        """
        try:
            return torch.empty(size_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def free_host(self, memory: torch.Tensor) -> None:
        """Free what `allocate_host` returned; all copies of it are over."""
        return

    def host_memory_bytes(self) -> tuple[int, int] | None:
        """The host's (total, available) memory in bytes; None if unknown."""
        return host_memory_bytes()

    def finish(self, event: Any) -> None:
        """Block this thread until an event is over."""
        return


class HostPool:
    """Host buffers by size, which later steps use again.

    Parameters
    ----------
    mover
        Allocates the buffers.
    limit_bytes
        Most bytes to hold at a time; None to be limited by the host's memory only.
    """

    def __init__(self, mover: Mover, limit_bytes: int | None = None) -> None:
        self._mover = mover
        self._limit_bytes = limit_bytes
        # All buffers, in use or not: a buffer that is freed, in any thread, leaves this set.
        self._buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._free: dict[int, list[HostBuffer]] = {}
        # Filled by finalizers, which run anywhere and so must not take a lock.
        self._returned: deque[HostBuffer] = deque()
        # Sizes that found no room since unused buffers were freed last.
        self._refused: set[int] = set()
        self._has_warned = False
        self._is_closed = False
        self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(buffer.size_bytes for buffer in self._buffers)

    def take(self, size_bytes: int) -> HostBuffer | None:
        """A buffer of at least this size; None if the host has no room for one."""
        self._sort_returned()
        wanted = -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES
        if alike := self._free.get(wanted):
            return alike.pop()
        # Batch lengths vary: a somewhat larger buffer serves as well as a new one.
        fitting = [it for it, free in self._free.items() if free and wanted <= it <= 2 * wanted]
        if fitting:
            return self._free[min(fitting)].pop()
        refusal = self._refusal(wanted)
        # Steps repeat. When a size was refused before, the buffers that are unused now are needed
        # later in the step: freed here, they would be pinned anew in every step.
        if refusal and any(self._free.values()) and wanted not in self._refused:
            self.trim()
            self._refused.clear()
            refusal = self._refusal(wanted)
        if refusal:
            self._refused.add(wanted)
        else:
            try:
                buffer = HostBuffer(self._mover.allocate_host(wanted), self._mover)
            except MemoryError as error:
                refusal = str(error)
            else:
                self._buffers.add(buffer)
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
                return buffer
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"activations stay on the device, as there is no host memory for {refusal}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None

    def give_back(self, buffer: HostBuffer) -> None:
        """Return a buffer to the pool. Safe in any thread and in finalizers."""
        self._returned.append(buffer)
        if self._is_closed:
            self._returned.clear()

    def trim(self) -> None:
        """Free the unused buffers, after waiting for their copies."""
        self._returned.clear()
        self._free.clear()

    def close(self) -> None:
        """Free the unused buffers now, and each other one when it is given back."""
        self._is_closed = True  # first: a buffer that is given back meanwhile is freed either way
        _closed_pools.add(self)
        self.trim()

    def _sort_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._free.setdefault(buffer.size_bytes, []).append(buffer)

    def _refusal(self, size_bytes: int) -> str:
        """The reason why the pool must not grow by this much, or ""."""
        held_bytes = self.held_bytes
        if self._limit_bytes is not None and held_bytes + size_bytes > self._limit_bytes:
            return (
                f"{format_bytes(size_bytes)} more than the {format_bytes(held_bytes)} in use: "
                f"host_limit_bytes is {format_bytes(self._limit_bytes)}"
            )
        host = self._mover.host_memory_bytes()
        if host is None:
            return ""
        total_bytes, available_bytes = host
        reserve_bytes = max(MIN_RESERVE_BYTES, total_bytes // RESERVE_DIVISOR)
        if available_bytes - size_bytes < reserve_bytes:
            return (
                f"{format_bytes(size_bytes)} more: {format_bytes(available_bytes)} are available, "
                f"of which {format_bytes(reserve_bytes)} stay in reserve"
            )
        return ""


_closed_pools: weakref.WeakSet[HostPool] = weakref.WeakSet()


def returning_bytes() -> int:
    """Bytes of buffers that go back to the host as soon as the graphs that hold them are gone.

    They are those of all closed pools.
    """
    return sum(pool.held_bytes for pool in _closed_pools)


class CudaMover(Mover):
    """Copies tensors of one GPU to pinned host memory and back, on two streams per direction.

    Parameters
    ----------
    device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = _CopyStreams(device, to_host=True)
        self._in = _CopyStreams(device, to_host=False)
        self._current_stream = CurrentStream(device)
        self._process = os.getpid()

    def is_ready(self) -> bool:
        """Not while a CUDA graph is captured: the copies would become part of it."""
        return not torch.cuda.is_current_stream_capturing()

    def stream(self) -> torch.cuda.Stream:
        """The current stream of the device in this thread."""
        return self._current_stream()

    def is_on_device(self, storage: torch.UntypedStorage) -> bool:
        """Whether the budget has not put it into page-locked host memory."""
        return not is_enabled() or native().memory_type(storage.data_ptr()) != "host"

    def copy_out(
        self, pairs: Sequence[tuple[torch.UntypedStorage, HostBuffer]], stream: torch.cuda.Stream
    ) -> list[torch.cuda.Event]:
        """Start copying storages into buffers, after the work that the stream holds now."""
        ready = self._out.wait_stream(stream)
        copies = [(it.memory.data_ptr(), own.data_ptr(), own.nbytes()) for own, it in pairs]
        return self._out.copy(copies, ready, [buffer for _, buffer in pairs])

    def copy_in(
        self, buffers: Sequence[tuple[HostBuffer, int]], stream: torch.cuda.Stream
    ) -> list[tuple[torch.UntypedStorage, Any]]:
        """Start copying the first bytes of each buffer into new storages of the stream."""

        def allocate() -> list[torch.UntypedStorage]:
            # As tensors, memory would be filled where algorithms are deterministic.
            return [torch.UntypedStorage(it, device=self._device) for _, it in buffers]

        is_current = self._current_stream.handle() == stream.cuda_stream
        storages = allocate() if is_current else run_on(stream, allocate)
        # The allocator may return memory that earlier work of the stream still uses.
        ready = self._in.wait_stream(stream)
        pairs = list(zip(storages, buffers, strict=True))
        copies = [(own.data_ptr(), it.memory.data_ptr(), size) for own, (it, size) in pairs]
        events = self._in.copy(copies, ready, [buffer for buffer, _ in buffers])
        return list(zip(storages, events, strict=True))

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let later work of the stream wait for an event."""
        with program_waits:
            event.wait(stream)

    def record_use(self, storage: torch.UntypedStorage, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that another stream than the storage's own uses it."""
        _as_bytes(storage).record_stream(stream)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Allocate and pin exactly this size; torch's pinned allocator rounds to powers of two."""
        memory = allocate_host_pages(size_bytes)
        register = partial(
            torch.cuda.cudart().cudaHostRegister,
            *(memory.data_ptr(), size_bytes, CUDA_HOST_REGISTER_PORTABLE),
        )
        status = run_on(torch.cuda.current_stream(self._device), register)
        if int(status) != 0:
            # CUDA keeps the error of a refused call, and the next kernel launch would raise it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device)
            raise MemoryError(f"{size_bytes} bytes, which CUDA cannot pin (error {int(status)})")
        self._count_page_locked(size_bytes)
        return memory

    def free_host(self, memory: torch.Tensor) -> None:
        """Unpin the memory; its last reference frees the pages."""
        if not self._is_forked():
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
            self._count_page_locked(-memory.nbytes)

    def _count_page_locked(self, size_bytes: int) -> None:
        """Its page tables take device memory, which the budget counts."""
        if is_enabled():
            runtime().allocator.count_page_locked(self._device.index or 0, size_bytes)

    def finish(self, event: torch.cuda.Event) -> None:
        """Block this thread until an event is over."""
        if not self._is_forked():
            event.synchronize()

    def _is_forked(self) -> bool:
        """Whether this process is a child of the one that made the mover: it cannot use CUDA."""
        return os.getpid() != self._process


class _CopyStreams:
    """Copies in one direction between a GPU and pinned host memory, beside the training's kernels.

    The copy engines copy plain device memory. On one H200 (driver 580.159, CUDA 13.0) a
    ``cudaMemcpyAsync`` between managed and pinned memory kept kernels from running beside it:
    matrix products that took 34 ms alone took 20 ms longer beside 1 GiB, nearly the time of the
    copy. So managed memory goes by way of a few MiB of plain device memory, which a kernel copies
    to or from (benchmarks/results/h200-staged-copies.txt).
    """

    def __init__(self, device: torch.device, *, to_host: bool) -> None:
        self._to_host = to_host
        self._way: Direction = "to_host" if to_host else "to_device"
        # One stream reads and writes managed memory, the other copies over the link.
        direction = "to host" if to_host else "to device"
        self._pages = own_stream(device, f"pages {direction}")
        self._link = own_stream(device, f"link {direction}")
        self._staged: Any = None
        # torch's own allocator gives plain device memory only.
        self._may_be_managed = is_enabled()
        self._queue_copies = native().queue_copies

    def wait_stream(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Let later copies wait for the work that a stream holds now, whose end is returned."""
        event = _recorded(stream)
        event.wait(self._link)
        return event

    def copy(
        self,
        copies: Sequence[_Copy],
        ready: torch.cuda.Event,
        buffers: Sequence[HostBuffer],
    ) -> list[torch.cuda.Event]:
        """Start copies between the device and page-locked memory.

        Parameters
        ----------
        copies
            The addresses to and from which to copy, and the bytes.
        ready
            What :meth:`wait_stream` has returned.
        buffers
            The page-locked memory of each. A copy first waits for the last one from or to it, and
            the end of this one becomes the buffer's.

        Returns
        -------
        list[torch.cuda.Event]
            The end of each copy. Those that leave together have one, for nothing waits for a part
            of them; of those that come, small ones next to each other.
        """
        for after in dict.fromkeys(it.event for it in buffers):
            if after is not None:
                after.wait(self._link)
        plain: list[_Copy] = []
        ends: list[torch.cuda.Event] = []
        for copy, buffer in zip(copies, buffers, strict=True):
            if self._is_staged(*copy[:2]):
                ends += self._start(plain, buffers[len(ends) :])
                plain = []
                ends += self._copy_managed(copy, buffer, ready)
                continue
            plain.append(copy)
            if not self._to_host and sum(it[2] for it in plain) >= _EVENT_BYTES:
                ends += self._start(plain, buffers[len(ends) :])
                plain = []
        return ends + self._start(plain, buffers[len(ends) :])

    def _start(
        self, copies: Sequence[_Copy], buffers: Sequence[HostBuffer]
    ) -> list[torch.cuda.Event]:
        """Start copies of plain device memory, which end together."""
        if not copies:
            return []
        size_bytes = sum(it[2] for it in copies)
        try:
            with copy_counts.counted(self._way, TensorClass.ACTIVATIONS, size_bytes, self._link):
                self._queue_copies(copies, self._link.cuda_stream, self._to_host, 0)
        finally:  # some may have been started before an error
            event = _recorded(self._link)
            for buffer, _ in zip(buffers, copies, strict=False):
                buffer.event = event
        return [event] * len(copies)

    def _copy_managed(
        self, copy: _Copy, buffer: HostBuffer, ready: torch.cuda.Event
    ) -> list[torch.cuda.Event]:
        """Start a copy of managed memory."""
        pages, link = self._pages, self._link

        def start() -> None:
            ready.wait(pages)
            self._staged.copy(*copy, pages.cuda_stream, link.cuda_stream)

        with copy_counts.counted(self._way, TensorClass.ACTIVATIONS, copy[2], link):
            run_on(pages, start)
        buffer.event = _recorded(link if self._to_host else pages)
        return [buffer.event]

    def _is_staged(self, to: int, source: int) -> bool:
        """Whether a copy goes by way of plain device memory."""
        on_device = source if self._to_host else to
        if not self._may_be_managed or native().memory_type(on_device) != "managed":
            return False
        if self._staged is None:
            run_on(self._pages, self._make_staged)
        return self._staged is not None and self._staged.fits(to, source)

    def _make_staged(self) -> None:
        try:
            self._staged = native().StagedCopy(self._pages.device_index, self._to_host)
        except RuntimeError as error:
            self._may_be_managed = False
            _LOG.warning(
                "umem: activations go by cudaMemcpyAsync, which keeps kernels waiting: %s", error
            )


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event of what the stream holds now."""
    event = new_event()
    event.record(stream)
    return event


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def allocate_host_pages(size_bytes: int) -> torch.Tensor:
    """Allocate pages to pin, as a tensor of bytes.

    With pages that a forked child shares, the parent's next write would move the parent to new
    pages, while the GPU kept the old ones. So the child sees zeros there, in pages of its own
    (``MADV_WIPEONFORK``). ``MADV_DONTFORK`` would leave a hole: the child's next memory would lie
    in it, and be unmapped together with the child's copy of this tensor.

    Raises
    ------
    MemoryError
        If there is no memory.
    """
    try:
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size_bytes} bytes: {error}") from error
    try:
        pages.madvise(MADV_WIPEONFORK)
    except OSError:  # a kernel before 4.14: the hole is the lesser evil
        pages.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
    return torch.frombuffer(pages, dtype=torch.uint8)
