"""Memory that is page-locked beside the program, before homes of tensors ask for it.

A thread of the allocator's locks one segment after the other, which then serve requests (Note
[Locking ahead] in ``allocators/core/device_allocator_ahead.cpp``). This module chooses segments.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from umem.core.block_sizes import block_bytes
from umem.core.classes import TensorClass
from umem.runtime.cuda_streams import CurrentStream

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["end_locking_ahead", "lock_ahead"]

_SEGMENT_BYTES = 256 << 20
"""The least size of a segment. Each call has a cost, and tensors of several sizes share segments
better the larger these are. But a request waits for the segment that serves it, and so does the end
of the process."""

_begun: list[tuple[Allocator, int]] = []
"""By device, until it has ended."""


def lock_ahead(allocator: Allocator, device: int, sizes: Iterable[int], have_bytes: int) -> None:
    """Lock memory for tensors whose home is on the host, and which will come on this stream.

    Parameters
    ----------
    allocator, device
        Serves torch's allocations on a GPU, and its number.
    sizes
        Bytes of the tensors, in the order in which they will come.
    have_bytes
        What there is for the first of them.
    """
    segments = list(_segments(sizes, have_bytes))
    if not segments:
        return
    # Without CUDA, in tests, there is the default stream alone.
    has_streams = torch.cuda.is_initialized()
    stream = CurrentStream(torch.device("cuda", device)).handle() if has_streams else 0
    if (allocator, device) not in _begun:
        _begun.append((allocator, device))
    allocator.lock_ahead(device, segments, stream, TensorClass.OPTIMIZER_STATE.number)


def end_locking_ahead(allocator: Allocator, device: int) -> None:
    """Lock no more, and give back what nobody has asked for; neither is waited for."""
    if (allocator, device) in _begun:
        _begun.remove((allocator, device))
        allocator.end_locking_ahead(device, gives_back=True)


def _segments(sizes: Iterable[int], have_bytes: int) -> Iterator[int]:
    """Segments of whole tensors."""
    segment_bytes = 0
    for size_bytes in sizes:
        if size_bytes <= have_bytes:
            have_bytes -= size_bytes
            continue
        have_bytes = 0  # later requests do not pass this one
        segment_bytes += int(block_bytes(size_bytes))
        if segment_bytes >= _SEGMENT_BYTES:
            yield segment_bytes
            segment_bytes = 0
    if segment_bytes:
        yield segment_bytes


@atexit.register
def _end() -> None:
    """CUDA may be gone soon after."""
    for allocator, device in _begun:
        allocator.end_locking_ahead(device, gives_back=False)
