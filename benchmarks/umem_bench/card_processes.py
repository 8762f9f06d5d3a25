"""The memory on a card of each process, by NVML, which counts what the process's CUDA has, too."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from umem.cuda.bindings import nvml_process_bytes

_PERIOD_S = 0.01


@contextmanager
def find_own_number(pci_address: str, lock: Path) -> Iterator[list[int]]:
    """Find this process's number in NVML's list, while CUDA starts in the block.

    In a container NVML's numbers are the host's: the only process that comes in the block is this
    one, as all processes with the same lock wait for each other. The list is filled at the end.
    """
    found: list[int] = []
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = nvml_process_bytes(pci_address)
        yield found
        after = nvml_process_bytes(pci_address)
    new = [number for number in after if number not in before]
    found += [os.getpid()] if os.getpid() in after else new if len(new) == 1 else []


class Peaks:
    """The most memory of each process on a card, by NVML's number, in samples of a thread."""

    def __init__(self, pci_address: str) -> None:
        self._pci_address = pci_address
        self._bytes: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def take(self, number: int) -> int | None:
        """The peak of a process that has ended; its number may be another one's next."""
        return self._bytes.pop(number, None)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            for number, used_bytes in nvml_process_bytes(self._pci_address).items():
                self._bytes[number] = max(used_bytes, self._bytes.get(number, 0))
