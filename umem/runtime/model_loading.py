"""Loading a model's weights from files to homes and to the device.

CUDA copies the memory of a mapped file through buffers of its own, by one thread at a time, even to
a home in page-locked host memory. umem has its threads copy: to homes straight from the file, and
for weights on the device to page-locked buffers, which the GPU reads while the next ones are
filled. The loaders that it does so for have adapters (``adapters/``).
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from umem.core.classes import TensorClass
from umem.runtime.model_parts import lies_in_memory
from umem.runtime.native_library import native
from umem.runtime.refused_memory import unless_refused
from umem.runtime.state import runtime
from umem.runtime.unfilled_memory import unfilled, unfilled_bytes
from umem.torch_compat import DisableTorchFunctionSubclass

__all__ = ["CudaLoadingMemory", "LoadingMemory", "load_weight"]

_BUFFER_BYTES = 16 << 20
"""Two of these for each thread of the loader, of which there are four."""

_PIECE_BYTES = 4 << 20
"""What a thread copies at a time."""

_MOST_THREADS = 16


class LoadingMemory(Protocol):
    """Where weights are loaded to."""

    device_type: str
    """Of the devices whose weights it has."""

    def new_weight(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for a weight: on the device, or beyond its budget in host memory."""

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in page-locked host memory, by its own address."""

    def finish(self, device: torch.device) -> None:
        """Return when nothing of the calling thread works on memory that it had before."""

    def buffers(self, device: torch.device, size_bytes: int) -> list[torch.Tensor]:
        """Two tensors of bytes in page-locked memory, the calling thread's; none if refused."""

    def send(self, to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Copy from a buffer to the device; the result returns when that has been done."""


class CudaLoadingMemory(LoadingMemory):
    """Memory of umem's allocator."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._of_thread = threading.local()
        # An override of one thread is for all that have none: no weight is born meanwhile.
        self._lock = threading.Lock()

    def new_weight(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """As ``Tensor.to`` would have it."""
        with self._lock:
            return unfilled(size, dtype, device)

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether CUDA knows its memory as the host's."""
        return bool(native().memory_type(tensor.data_ptr()) == "host")

    def finish(self, device: torch.device) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(device).synchronize()

    def buffers(self, device: torch.device, size_bytes: int) -> list[torch.Tensor]:
        """Memory of the class that policies with streamed weights page-lock; kept by the thread."""
        known: dict[str, list[torch.Tensor]] = self._of_thread.__dict__
        if str(device) not in known:
            with self._lock:
                made = unless_refused(
                    runtime().allocator,
                    TensorClass.OPTIMIZER_STATE,
                    lambda: [unfilled_bytes(size_bytes, device) for _ in range(2)],
                )
            known[str(device)] = made if made and all(map(self.is_home, made)) else []
            self.finish(device)  # with this memory, too, which the host is about to write
        return known[str(device)]

    def send(self, to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Copy on the current stream."""
        with torch.cuda.device(to.device):  # whose default stream has no handle of its own
            stream = torch.cuda.current_stream()
            copy = to.data_ptr(), source.data_ptr(), to.nbytes
            native().queue_copies([copy], stream.cuda_stream, False, 0)
            wait: Callable[[], None] = stream.record_event().synchronize
        return wait


def load_weight(
    source: torch.Tensor, device: torch.device, dtype: torch.dtype, memory: LoadingMemory
) -> torch.Tensor | None:
    """A weight on a device with the contents of a tensor on the CPU, as ``Tensor.to`` makes it.

    None for what only torch can copy, and where there is no memory for buffers.
    """
    if not _is_plain(source) or not _can_convert(source.dtype, dtype):
        return None
    with DisableTorchFunctionSubclass(), torch.no_grad():
        weight = memory.new_weight(source.size(), dtype, device)
        flat = source.view(-1)
        if memory.is_home(weight):
            memory.finish(device)
            _fill(weight.data_ptr(), flat, dtype)
            return weight
        buffers = memory.buffers(device, _BUFFER_BYTES)
        if not buffers:
            return None
        target = weight.view(-1)
        count = _BUFFER_BYTES // dtype.itemsize
        waits: list[Callable[[], None]] = []
        try:
            for number, begin in enumerate(range(0, flat.numel(), count)):
                if number >= len(buffers):
                    waits[number - len(buffers)]()
                buffer, part = buffers[number % len(buffers)], flat[begin : begin + count]
                _fill(buffer.data_ptr(), part, dtype)
                sent = buffer[: part.numel() * dtype.itemsize].view(dtype)
                waits.append(memory.send(target[begin : begin + count], sent))
        finally:
            for wait in waits[-len(buffers) :]:
                wait()
    return weight


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and lies_in_memory(tensor)
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )


def _can_convert(source: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the CPU makes one type of another, as it does for torch's own copy to a GPU."""
    known = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return source is dtype or (source in known and dtype in known)


def _fill(address: int, source: torch.Tensor, dtype: torch.dtype) -> None:
    """Write numbers to host memory."""
    if source.dtype is not dtype:
        size_bytes = source.numel() * dtype.itemsize
        memory = (ctypes.c_ubyte * size_bytes).from_address(address)
        torch.frombuffer(memory, dtype=dtype).copy_(source)
        return
    begin, size_bytes = source.data_ptr(), source.nbytes

    def copy(offset: int) -> None:
        # Without the interpreter's lock.
        ctypes.memmove(address + offset, begin + offset, min(_PIECE_BYTES, size_bytes - offset))

    deque(_threads().map(copy, range(0, size_bytes, _PIECE_BYTES)), maxlen=0)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    count = min(_MOST_THREADS, os.cpu_count() or 1)
    return ThreadPoolExecutor(count, thread_name_prefix="umem-loading")
