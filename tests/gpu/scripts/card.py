"""What is in use on the card."""

from __future__ import annotations

import torch

from umem.cuda.bindings import device_pci_address, nvml_memory_bytes

__all__ = ["used_bytes"]


def used_bytes() -> int:
    """What NVML says is in use on the card; nothing else may use it meanwhile."""
    torch.cuda.synchronize()
    memory = nvml_memory_bytes(device_pci_address(0))
    assert memory is not None, "this test needs NVML"
    total, free = memory
    return total - free
