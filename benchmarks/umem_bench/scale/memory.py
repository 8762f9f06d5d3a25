"""Memory in use on the card and on the host, sampled while another process works."""

from __future__ import annotations

import importlib
import threading
from types import TracebackType
from typing import Any, Self

from umem.cuda import bindings
from umem.hardware.host_memory import host_memory_bytes

__all__ = ["MemorySampler", "card_bytes"]

_PERIOD_S = 0.01
_SLOW_EVERY = 10
"""Samples of the card for each one of the host and of NVML's processes."""


def card_bytes(pci_address: str) -> tuple[int, int]:
    """(used, free) bytes of the card as NVML and nvidia-smi show them.

    Raises ``OSError`` where NVML does not report them.
    """
    memory = bindings.nvml_memory_bytes(pci_address)
    if memory is None:
        raise OSError(f"NVML does not report the memory of GPU {pci_address}: see `nvidia-smi`")
    total_bytes, free_bytes = memory
    return total_bytes - free_bytes, free_bytes


class MemorySampler:
    """Peaks within a context, read by a thread every 10 ms; without a GPU only the host's.

    Processes in which CUDA has started cannot disturb it: it asks NVML only.
    """

    def __init__(self, pci_address: str | None) -> None:
        self._pci_address = pci_address
        self._pynvml: Any = None
        self._card_bytes = self._process_bytes = self._host_bytes = 0
        self._host_before_bytes = _host_used_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        if self._pci_address is not None:
            try:
                self._pynvml = importlib.import_module("pynvml")
                self._pynvml.nvmlInit()
            except Exception:  # the card's figures do without it
                self._pynvml = None
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def figures(self, idle_bytes: int) -> dict[str, int]:
        """The peaks by their names in a result; `idle_bytes` are those of the idle card."""
        found = {"host_bytes": self._host_bytes - self._host_before_bytes}
        if self._card_bytes:
            found["peak_bytes"] = self._card_bytes - idle_bytes
        if self._process_bytes:
            found["process_bytes"] = self._process_bytes
        return found

    def _work(self) -> None:
        samples = 0
        while True:
            ended = self._ended.wait(_PERIOD_S)
            if self._pci_address is not None:
                self._card_bytes = max(self._card_bytes, card_bytes(self._pci_address)[0])
            if ended or samples % _SLOW_EVERY == 0:
                self._host_bytes = max(self._host_bytes, _host_used_bytes())
                self._process_bytes = max(self._process_bytes, self._accounted_bytes())
            if ended:
                return
            samples += 1

    def _accounted_bytes(self) -> int:
        """What NVML accounts to processes; 0 where it does not."""
        if self._pynvml is None:
            return 0
        try:
            card = self._pynvml.nvmlDeviceGetHandleByPciBusId(self._pci_address)
            processes = self._pynvml.nvmlDeviceGetComputeRunningProcesses(card)
        except self._pynvml.NVMLError:
            return 0
        return sum(it.usedGpuMemory or 0 for it in processes)


def _host_used_bytes() -> int:
    total_bytes, available_bytes = host_memory_bytes() or (0, 0)
    return total_bytes - available_bytes
