"""What this process has in use on the card. Where NVML does not tell processes apart, nothing else
may use the card meanwhile."""

from __future__ import annotations

import os
import threading
from functools import cache

import torch
from torch import nn

from umem.cuda.bindings import device_pci_address, nvml_memory_bytes, nvml_process_bytes

_address = cache(device_pci_address)


def _in_use_bytes() -> int:
    own_bytes = nvml_process_bytes(_address(0)).get(os.getpid())
    if own_bytes is not None:
        return own_bytes
    total, free = nvml_memory_bytes(_address(0)) or (0, 0)
    return total - free


def used_bytes() -> int:
    """What NVML says is in use, behind all work so far."""
    torch.cuda.synchronize()
    in_use_bytes = _in_use_bytes()
    assert in_use_bytes, "this test needs NVML"
    return in_use_bytes


def base_bytes() -> int:
    """In use beside torch's tensors, once the context is made and kernels are loaded."""
    x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    nn.functional.gelu(nn.functional.layer_norm(x @ x, [1024])).square().mean().backward()
    del x
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return used_bytes() - torch.cuda.memory_reserved()


class CardMemory:
    """The most memory in use on the card, as NVML shows it, beyond that of the kernels."""

    def __init__(self) -> None:
        self._base_bytes = base_bytes()
        self.peak_bytes = 0
        self.beside_bytes = 0
        """The most beside what torch has reserved: later kernels need memory of their own."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(0.002):
            before, reserved_bytes = _in_use_bytes(), torch.cuda.memory_reserved()
            after = _in_use_bytes()
            self.peak_bytes = max(self.peak_bytes, before - self._base_bytes)
            beside_bytes = min(before, after) - reserved_bytes - self._base_bytes
            self.beside_bytes = max(self.beside_bytes, beside_bytes)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
