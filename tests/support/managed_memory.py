"""A block of managed memory whose transfers are known, to see which of them are recorded."""

from __future__ import annotations

import torch

from umem.cuda import Location, Range, prefetch
from umem.telemetry.driver_events import managed_on_host

PART_BYTES = 64 << 20
"""So much is prefetched to the device, and as much faults in there."""


class ManagedBytes:
    """Managed memory as an array that torch wraps without a copy."""

    def __init__(self, range_: Range) -> None:
        self.__cuda_array_interface__ = {
            "shape": (range_.size_bytes,),
            "strides": None,
            "typestr": "|u1",
            "data": (range_.address, False),
            "version": 3,
        }


def move_known() -> None:
    """Move memory of its own to the device, half of it by faults, and give it back."""
    with managed_on_host(2 * PART_BYTES) as block:
        _move(block)


def _move(block: Range) -> None:
    """Prefetch the first part to the device, and touch every page of the second one there."""
    device = torch.cuda.current_device()
    hinted = Range(block.address, PART_BYTES)
    faulted = Range(block.address + PART_BYTES, PART_BYTES)
    prefetch(hinted, Location.device(device), stream=torch.cuda.current_stream())
    torch.as_tensor(ManagedBytes(faulted), device=torch.device("cuda", device)).add_(1)
