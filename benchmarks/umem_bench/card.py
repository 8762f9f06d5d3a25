"""The card that is trained on, and the memory in use on it and on the host."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from umem.core.units import format_bytes
from umem.cuda import bindings
from umem.hardware.host_memory import host_memory_bytes
from umem_bench.results import Record

__all__ = ["Card", "MemorySampler"]

_PERIOD_S = 0.01
_IDLE_MARGIN_BYTES = 256 << 20
_IDLE_PATIENCE_S = 10.0
"""An ended process's memory may leave the card later than the process."""

_REST_S = 0.5
"""What does not change for so long does not change soon."""

_SLOW_EVERY = 10
"""Samples of the card for each one of the host and of NVML's processes."""


class Card(Record):
    """A GPU, by its address; bytes are NVML's, which nvidia-smi shows, for the whole card."""

    pci_address: str
    idle_bytes: int
    """In use before the first process."""
    free_bytes: int
    """Not in use then."""

    @classmethod
    def find(cls, device: int = 0) -> Card:
        """A GPU by CUDA's number, idle. Raises ``OSError`` where NVML reports no memory of it."""
        address = bindings.device_pci_address(device)
        memory = bindings.nvml_memory_bytes(address)
        if memory is None:
            raise OSError(f"NVML does not report the memory of GPU {address}: see `nvidia-smi`")
        total_bytes, free_bytes = memory
        return cls(pci_address=address, idle_bytes=total_bytes - free_bytes, free_bytes=free_bytes)

    def used_bytes(self) -> int:
        """In use now, less the idle card's."""
        total_bytes, free_bytes = bindings.nvml_memory_bytes(self.pci_address) or (0, 0)
        return total_bytes - free_bytes - self.idle_bytes

    def between_processes(self) -> Self:
        """The card as it is now: its driver may keep some memory of a process that has ended."""
        end_s = time.monotonic() + _IDLE_PATIENCE_S
        before_bytes, used_bytes = None, self.used_bytes()
        while before_bytes != used_bytes and time.monotonic() < end_s:
            time.sleep(_REST_S)
            before_bytes, used_bytes = used_bytes, self.used_bytes()
        return self.model_copy(update={"idle_bytes": self.idle_bytes + used_bytes})

    def why_not_idle(self, patience_s: float = _IDLE_PATIENCE_S) -> str:
        """Why nothing can be measured now; empty where the card is idle or becomes so in time."""
        end_s = time.monotonic() + patience_s
        while (more_bytes := self.used_bytes()) >= _IDLE_MARGIN_BYTES:
            if time.monotonic() > end_s:
                return f"the card has {format_bytes(more_bytes)} more in use than at the beginning"
            time.sleep(_IDLE_PATIENCE_S / 100)
        return ""


class MemorySampler:
    """Peaks within a context, read by a thread every 10 ms; without a GPU only the host's.

    Processes in which CUDA has started cannot disturb it: it asks NVML only.
    """

    def __init__(self, card: Card | None) -> None:
        self._card = card
        self._card_bytes = self._process_bytes = self._host_bytes = 0
        self._host_before_bytes = _host_used_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
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

    def figures(self) -> dict[str, int]:
        """The peaks so far, by their names in a result."""
        found = {"host_bytes": self._host_bytes - self._host_before_bytes}
        if self._card is not None:
            found["card_peak_bytes"] = self._card_bytes
        if self._process_bytes:
            found["process_bytes"] = self._process_bytes
        return found

    def _work(self) -> None:
        samples = 0
        while True:
            ended = self._ended.wait(_PERIOD_S)
            if self._card is not None:
                self._card_bytes = max(self._card_bytes, self._card.used_bytes())
            if ended or samples % _SLOW_EVERY == 0:
                self._host_bytes = max(self._host_bytes, _host_used_bytes())
                if self._card is not None:
                    own = bindings.nvml_process_bytes(self._card.pci_address)
                    self._process_bytes = max(self._process_bytes, sum(own.values()))
            if ended:
                return
            samples += 1


def _host_used_bytes() -> int:
    total_bytes, available_bytes = host_memory_bytes() or (0, 0)
    return total_bytes - available_bytes
