"""The memory on a card of each process, by NVML, which counts what the process's CUDA has, too."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MOST_PROCESSES = 256
_UNKNOWN_BYTES = 1 << 60
"""NVML's word for memory that it does not know is a larger number."""

_PERIOD_S = 0.01


class _Process(ctypes.Structure):
    _fields_ = [
        ("number", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def _reader(pci_address: str) -> Callable[[], dict[int, int]]:
    """A function that returns bytes by process, empty where NVML does not tell them."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return dict
    handle = ctypes.c_void_p()
    address = pci_address.encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(
        address, ctypes.byref(handle)
    ):
        return dict

    def read() -> dict[int, int]:
        count, found = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found):
            return {}
        return {
            each.number: each.used_bytes
            for each in found[: count.value]
            if each.used_bytes < _UNKNOWN_BYTES
        }

    return read


@contextmanager
def find_own_number(pci_address: str, lock: Path) -> Iterator[list[int]]:
    """Find this process's number in NVML's list, while CUDA starts in the block.

    In a container NVML's numbers are the host's: the only process that comes in the block is this
    one, as all processes with the same lock wait for each other. The list is filled at the end.
    """
    read = _reader(pci_address)
    found: list[int] = []
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = read()
        yield found
        after = read()
    new = [number for number in after if number not in before]
    found += [os.getpid()] if os.getpid() in after else new if len(new) == 1 else []


class Peaks:
    """The most memory of each process on a card, by NVML's number, in samples of a thread."""

    def __init__(self, pci_address: str) -> None:
        self._read = _reader(pci_address)
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
            for number, used_bytes in self._read().items():
                self._bytes[number] = max(used_bytes, self._bytes.get(number, 0))
