"""Copies between managed memory and pinned host memory by a few multiprocessors.

On one H200, driver 580.159, CUDA 13.0, 2026-11-21, a ``cudaMemcpyAsync`` of 1 GiB between managed
memory and pinned memory kept kernels from running beside it: 24 and 32 large matrix products took
15 to 20 ms longer, nearly the time of the copy. This kernel cost them 0 to 3 ms, at 52 GB/s out
with 2 blocks and 50 GB/s in with 4; a day later 3 and 5 ms, and 2 to 8 ms with other numbers
of blocks and threads (benchmarks/results/h200-step-beside.txt). Plain device memory goes by the
copy engines, at no such cost.
"""

from __future__ import annotations

from typing import Any

import torch

from umem._library import native
from umem.cuda import _bindings

__all__ = ["BLOCKS_IN", "BLOCKS_OUT", "CopyKernel", "is_managed"]

BLOCKS_OUT = 2
BLOCKS_IN = 4


class CopyKernel:
    """The kernel on one device.

    Parameters
    ----------
    device
        A GPU whose primary context exists.

    Raises
    ------
    NativeLibraryError
        Without umem's native library or cuda-python.
    CudaError
        If the driver refuses the kernel.
    """

    def __init__(self, device: torch.device) -> None:
        library = native()
        with torch.cuda.device(device):
            self._function: Any = _bindings.load_function(library.COPY_KERNEL, "umem_copy")
        self._threads = library.COPY_THREADS
        self._alignment = library.COPY_ALIGNMENT

    def fits(self, *addresses: int) -> bool:
        """Whether it can copy between these addresses."""
        return all(address % self._alignment == 0 for address in addresses)

    def copy(
        self, to: int, source: int, size_bytes: int, blocks: int, stream: torch.cuda.Stream
    ) -> None:
        """Copy on a stream; nobody waits."""
        numbers = to, source, size_bytes
        _bindings.launch(self._function, blocks, self._threads, stream.cuda_stream, numbers)


def is_managed(address: int) -> bool:
    """Whether an address is in managed memory."""
    return _bindings.memory_type(address) == "cudaMemoryTypeManaged"
