"""Managed memory whose transfers are known, to see whether they are recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from umem.cuda import Location, Range, prefetch
from umem.cuda import bindings as _bindings
from umem.telemetry.records import MigrationRecords, RecordKind

__all__ = ["KNOWN_BYTES", "managed_on_host", "moved_block", "told_bytes"]

KNOWN_BYTES = 4 << 20
"""Enough to move, to see whether somebody tells of it."""


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


def told_bytes(records: MigrationRecords, block: Range) -> int:
    """Bytes that came from the host to a block, by some records."""
    offset = records.address - block.address
    inside = (offset >= 0) & (offset < block.size_bytes)
    return int(records.bytes[inside & (records.kind == RecordKind.TO_DEVICE)].sum())
