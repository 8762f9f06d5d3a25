"""The driver's queue of unified-memory events of this process.

The kernel module writes every migration and every fault of an address space into a ring in the
memory of whoever asks for one at ``/dev/nvidia-uvm-tools``, as CUPTI does. Numbers and layouts are
those of NVIDIA's open kernel modules, ``kernel-open/nvidia-uvm``: ``uvm_ioctl.h``, ``uvm_types.h``
and ``uvm_tools.c``, where `create_event_tracker` and `enqueue_event` are this file's other side.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from umem.cuda import Range, _bindings
from umem.errors import UmemError, UnsupportedError
from umem.telemetry._driver_events import ENTRY_BYTES, DriverEvents, Entries, EventType
from umem.telemetry._known import KNOWN_BYTES, moved_block, told_bytes

__all__ = ["DriverQueue", "Kernel", "knows_release"]

_KNOWN_RELEASES = (580, 590, 595)
"""Whose headers are known to have these numbers and layouts, by the first part of the release. In
another one the kernel might write entries of another length."""

_TOOLS_PATH = "/dev/nvidia-uvm-tools"
_SPACE_PATH = "/dev/nvidia-uvm"

_INIT_EVENT_TRACKER_V2 = 76
_ENABLE_EVENTS = 58
_FLUSH_EVENTS = 67
_TRACKER = struct.Struct("<QQQ16sIII4x")
"""queueBuffer, queueBufferSize (in entries), controlBuffer, processor, allProcessors, uvmFd,
rmStatus."""
_TRACKER_STATUS = 48
_EVENTS = struct.Struct("<QI4x")
"""eventTypeFlags, rmStatus."""
_EVENTS_STATUS = 8
_FLUSH = struct.Struct("<I")
"""rmStatus."""
_SPARE_BYTES = 64
"""Behind the parameters, so that no release reads what is not ours."""

_CONTROL_BYTES = 4096
_GET_AHEAD, _GET_BEHIND, _PUT_BEHIND = 0, 1, 3
"""Of the 32-bit fields of ``UvmToolsEventControlData``."""
_DROPPED_AT = 16
_EVENT_TYPES = 64


def knows_release(release: str) -> bool:
    """Whether the layout of a driver's events is known, such as of release "580.159.04"."""
    return release.partition(".")[0] in map(str, _KNOWN_RELEASES)


class Kernel(Protocol):
    """What is asked of the driver's kernel module."""

    def release(self) -> str | None:
        """The driver's release; None where there is no driver."""

    def spaces(self) -> list[int]:
        """Open files of this process that may be its address space on the device."""

    def open(self) -> int:
        """Open the tools' file."""

    def call(self, file: int, request: int, parameters: bytearray) -> None:
        """Make a request of a file; the answer is written into the parameters."""

    def close(self, file: int) -> None:
        """Close a file that was opened here."""


class _LinuxKernel:
    def release(self) -> str | None:
        return _bindings.driver_release()

    def spaces(self) -> list[int]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{name}") == _SPACE_PATH:
                    found.append(int(name))
            except OSError:  # closed meanwhile
                continue
        return sorted(found)

    def open(self) -> int:
        return os.open(_TOOLS_PATH, os.O_RDWR | os.O_CLOEXEC)

    def call(self, file: int, request: int, parameters: bytearray) -> None:
        fcntl.ioctl(file, request, parameters, True)

    def close(self, file: int) -> None:
        os.close(file)


class DriverQueue:
    """A ring that the driver fills until it is closed.

    A process has several files of the driver's that look like its address space. So a block is
    moved, and the ring is of that one which tells of it: which also shows that its entries are
    where they are looked for.

    Parameters
    ----------
    entry_count
        Of the ring, a power of two. What comes to a full ring is dropped, and counted.
    kernel
        Linux's, unless a test has one of its own.
    move
        Moves a block of so many bytes to the device, and says where it was.

    Raises
    ------
    UnsupportedError
        If the driver is of an unknown release, refuses, or does not tell of the block.
    """

    def __init__(
        self,
        entry_count: int = 2**18,
        kernel: Kernel | None = None,
        move: Callable[[int], Range] = moved_block,
    ) -> None:
        self._kernel = kernel or _LinuxKernel()
        self._entry_count = entry_count
        self._fence = threading.Lock()
        self._require_known_release()
        # Shared, so that the kernel and this process keep the same pages when the process forks.
        self._ring_memory = mmap.mmap(-1, entry_count * ENTRY_BYTES)
        self._control_memory = mmap.mmap(-1, _CONTROL_BYTES)
        self._ring = np.frombuffer(self._ring_memory, np.dtype((np.void, ENTRY_BYTES)))
        self._control = np.frombuffer(self._control_memory, np.uint32)
        self._dropped = np.frombuffer(
            self._control_memory, np.uint64, _EVENT_TYPES, offset=_DROPPED_AT
        )
        self._file, self._space = self._attached(move)

    def take(self) -> Entries:
        """The entries since the last call, which leave the ring."""
        begin = int(self._control[_GET_BEHIND])
        end = int(self._control[_PUT_BEHIND])
        with self._fence:  # entries must not be read before the mark that says they are written
            count = (end - begin) % self._entry_count
            places = (begin + np.arange(count)) % self._entry_count
            taken: Entries = self._ring[places]
        self._control[_GET_AHEAD] = self._control[_GET_BEHIND] = end
        return taken

    def dropped(self) -> int:
        """How many entries the driver has dropped because the ring was full."""
        return int(self._dropped.sum())

    def flush(self) -> None:
        """Have the driver write what has happened: a migration is written some time after it ended.

        Raises
        ------
        UnsupportedError
            If the driver refuses.
        """
        self._call(self._space, _FLUSH_EVENTS, _FLUSH.pack(0), 0)

    def close(self) -> None:
        """End; the driver lets go of the ring."""
        self._kernel.close(self._file)

    def _require_known_release(self) -> None:
        release = self._kernel.release()
        if release is None:
            raise UnsupportedError("there is no NVIDIA driver here")
        if not knows_release(release):
            known = ", ".join(map(str, _KNOWN_RELEASES))
            raise UnsupportedError(
                f"driver {release} may lay out its events otherwise than {known}, which are known"
            )

    def _attached(self, move: Callable[[int], Range]) -> tuple[int, int]:
        """The tools' file, with events enabled, and the file of the address space."""
        refusals = []
        for space in self._kernel.spaces():
            try:
                file = self._kernel.open()
            except OSError as error:
                raise UnsupportedError(f"{_TOOLS_PATH} does not open ({error.strerror})") from error
            self._file, self._space = file, space
            try:
                self._attach()
                self._require_told(move)
            except UmemError as error:
                refusals.append(f"file {space}: {error}")
                self.close()
                self._control[:] = 0
            except BaseException:
                self.close()
                raise
            else:
                return file, space
        why = "; ".join(refusals) or f"{_SPACE_PATH} is not open: CUDA has not started"
        raise UnsupportedError(f"the driver's event queue cannot be had ({why})")

    def _attach(self) -> None:
        tracker = _TRACKER.pack(
            self._ring.ctypes.data,
            self._entry_count,
            self._control.ctypes.data,
            b"",
            1,
            self._space,
            0,
        )
        self._call(self._file, _INIT_EVENT_TRACKER_V2, tracker, _TRACKER_STATUS)
        flags = sum(1 << kind for kind in EventType)
        self._call(self._file, _ENABLE_EVENTS, _EVENTS.pack(flags, 0), _EVENTS_STATUS)

    def _require_told(self, move: Callable[[int], Range]) -> None:
        block = move(KNOWN_BYTES)
        self.flush()
        events = DriverEvents()
        events.add(self.take())
        if told_bytes(events.records(), block) != block.size_bytes:
            raise UnsupportedError("it does not tell of a block that was moved")

    def _call(self, file: int, request: int, parameters: bytes, status_at: int) -> None:
        answer = bytearray(parameters + bytes(_SPARE_BYTES))
        try:
            self._kernel.call(file, request, answer)
        except OSError as error:
            raise UnsupportedError(f"request {request}: {error.strerror}") from error
        (status,) = struct.unpack_from("<I", answer, status_at)
        if status:
            raise UnsupportedError(f"request {request}: NV_STATUS {status:#x}")
