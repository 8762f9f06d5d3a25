"""Managed memory whose transfers are known, to see whether CUPTI records them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from umem.cuda import Location, Range, _bindings, prefetch

__all__ = ["managed_on_host", "moved_block"]


@contextmanager
def managed_on_host(size_bytes: int) -> Iterator[Range]:
    """A block of managed memory of its own, all of whose pages are on the host."""
    import torch

    address = _bindings.allocate_managed(size_bytes)
    try:
        # Only pages that hold something move.
        ctypes.memset(address, 1, size_bytes)
        yield Range(address, size_bytes)
        torch.cuda.synchronize()
    finally:
        _bindings.free(address)


def moved_block(size_bytes: int) -> Range:
    """Prefetch a block to the current device, and give it back; where it was."""
    import torch

    with managed_on_host(size_bytes) as block:
        device = Location.device(torch.cuda.current_device())
        prefetch(block, device, stream=torch.cuda.current_stream())
    return block
