"""Entries of the driver's event queue, read as records.

Layouts are those of ``uvm_types.h`` in NVIDIA's open kernel modules (``UvmEventMigrationInfo_V2``
and so on). Causes and kinds of access have the numbers that CUPTI hands on.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from umem.core.errors import UmemError, UnsupportedError
from umem.cuda import Range
from umem.cuda import bindings as _bindings
from umem.telemetry.known_transfers import KNOWN_BYTES, moved_block, told_bytes
from umem.telemetry.records import (
    CAUSE_OF_NUMBER,
    MigrationRecords,
    RecordKind,
    concatenated,
    records_of,
)

__all__ = [
    "CPU_FAULT",
    "ENTRY_BYTES",
    "GPU_FAULT",
    "GPU_FAULT_REPLAY",
    "MIGRATION",
    "DriverEvents",
    "DriverQueue",
    "Entries",
    "EventType",
    "Kernel",
    "knows_release",
]

ENTRY_BYTES = 72
"""``UvmEventEntry_V2``."""


class EventType(IntEnum):
    """``UvmEventType``: those that are asked for."""

    CPU_FAULT = 1
    MIGRATION = 2
    GPU_FAULT = 3
    GPU_FAULT_REPLAY = 4


Entries = npt.NDArray[np.void]
"""Entries as they are, of :data:`ENTRY_BYTES` each."""

_HOST = 0
"""Index of the host among the processors."""


def _layout(**fields: tuple[str, int]) -> np.dtype[np.void]:
    """A layout of an entry, from the types and offsets of its fields."""
    return np.dtype(
        {
            "names": list(fields),
            "formats": [kind for kind, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": ENTRY_BYTES,
        }
    )


MIGRATION = _layout(
    type=("u1", 0),
    cause=("u1", 1),
    source=("<u2", 4),
    destination=("<u2", 6),
    address=("<u8", 16),
    bytes=("<u8", 24),
    begin=("<i8", 32),
    end=("<i8", 40),
    begin_on_device=("<i8", 56),
    end_on_device=("<i8", 64),
)
"""``UvmEventMigrationInfo_V2``. Times of the host are its raw monotonic clock's."""
CPU_FAULT = _layout(type=("u1", 0), access=("u1", 1), address=("<u8", 8), time=("<i8", 16))
GPU_FAULT = _layout(
    type=("u1", 0),
    device=("<u2", 2),
    address=("<u8", 8),
    time=("<i8", 16),
    batch=("<u4", 32),
    client=("u1", 36),
    access=("u1", 37),
)
GPU_FAULT_REPLAY = _layout(
    type=("u1", 0), client=("u1", 1), device=("<u2", 2), batch=("<u4", 4), time=("<i8", 8)
)

_ACCESS_KINDS = 5

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Faults:
    """GPU faults: enough of each to make one record of those that were served together."""

    batch: npt.NDArray[np.uint64]
    address: _Integers
    time_ns: _Integers
    access: npt.NDArray[np.uint8]


class DriverEvents:
    """Events as they come, kept small until they are asked for as records."""

    def __init__(self) -> None:
        self._migrations: list[npt.NDArray[np.void]] = []
        self._faults: list[_Faults] = []
        self._replays: list[tuple[npt.NDArray[np.uint64], _Integers]] = []
        self._cpu_faults: list[npt.NDArray[np.void]] = []
        self.count = 0

    def add(self, entries: Entries) -> None:
        """Keep entries, in the order of the queue."""
        kinds = entries.view(np.uint8).reshape(-1, ENTRY_BYTES)[:, 0]
        self.count += len(entries)
        if (of_kind := entries[kinds == EventType.MIGRATION]).size:
            self._migrations.append(of_kind.view(MIGRATION))
        if (of_kind := entries[kinds == EventType.CPU_FAULT]).size:
            self._cpu_faults.append(of_kind.view(CPU_FAULT))
        if (of_kind := entries[kinds == EventType.GPU_FAULT]).size:
            self._faults.append(_faults(of_kind.view(GPU_FAULT)))
        if (of_kind := entries[kinds == EventType.GPU_FAULT_REPLAY]).size:
            replays = of_kind.view(GPU_FAULT_REPLAY)
            self._replays.append((_batches(replays), replays["time"].copy()))

    def records(self) -> MigrationRecords:
        """All of them by start, on the host's raw monotonic clock.

        A record of GPU faults is of those that the driver served in one batch: it has the address
        of the first, and lasts until the driver told the device to go on. CUPTI makes its records
        so too, but lets them begin at the fault.
        """
        return concatenated((self._moved(), self._faulted(), self._faulted_on_host()))

    def _moved(self) -> MigrationRecords:
        moves = np.concatenate([np.empty(0, MIGRATION), *self._migrations])
        from_host, to_host = moves["source"] == _HOST, moves["destination"] == _HOST
        start_ns, end_ns = _on_host(moves)
        table = np.zeros((len(moves), 9), np.int64)
        table[:, 0] = np.where(
            to_host,
            RecordKind.TO_HOST,
            np.where(from_host, RecordKind.TO_DEVICE, RecordKind.BETWEEN_DEVICES),
        )
        table[:, 1], table[:, 2] = start_ns, end_ns
        table[:, 3] = moves["address"].astype(np.int64)
        table[:, 4] = moves["bytes"].astype(np.int64)
        table[:, 6] = np.where(moves["cause"] < len(CAUSE_OF_NUMBER), moves["cause"], 0)
        # Between the host's own nodes nothing crosses the link.
        return records_of(table[~(from_host & to_host)])

    def _faulted(self) -> MigrationRecords:
        if not self._faults:
            return records_of([])
        batch = np.concatenate([it.batch for it in self._faults])
        _, first, faults = np.unique(batch, return_index=True, return_counts=True)
        batches = batch[first]
        table = np.zeros((len(first), 9), np.int64)
        table[:, 0] = RecordKind.GPU_FAULT
        table[:, 1] = np.concatenate([it.time_ns for it in self._faults])[first]
        table[:, 2] = np.maximum(table[:, 1], self._replayed_ns(batches))
        table[:, 3] = np.concatenate([it.address for it in self._faults])[first]
        table[:, 5] = faults
        table[:, 7] = np.concatenate([it.access for it in self._faults])[first]
        return records_of(table)

    def _replayed_ns(self, batches: npt.NDArray[np.uint64]) -> _Integers:
        """When each batch was done; 0 where that is not known."""
        if not self._replays:
            return np.zeros(len(batches), np.int64)
        replayed = np.concatenate([batch for batch, _ in self._replays])
        time_ns = np.concatenate([time_ns for _, time_ns in self._replays])
        # Batches of other processes are told too.
        order = np.argsort(replayed, kind="stable")
        at = np.minimum(np.searchsorted(replayed, batches, sorter=order), len(order) - 1)
        found = order[at]
        return np.where(replayed[found] == batches, time_ns[found], 0)

    def _faulted_on_host(self) -> MigrationRecords:
        faults = np.concatenate([np.empty(0, CPU_FAULT), *self._cpu_faults])
        table = np.zeros((len(faults), 9), np.int64)
        table[:, 0] = RecordKind.CPU_FAULT
        table[:, 1] = table[:, 2] = faults["time"]
        table[:, 3] = faults["address"].astype(np.int64)
        table[:, 5] = 1
        table[:, 7] = _known_access(faults["access"])
        return records_of(table)


def _faults(entries: npt.NDArray[np.void]) -> _Faults:
    return _Faults(
        batch=_batches(entries),
        address=entries["address"].astype(np.int64),
        time_ns=entries["time"].copy(),
        access=_known_access(entries["access"]),
    )


def _batches(entries: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """One number for a batch: devices and kinds of client count theirs for themselves."""
    device, client = entries["device"].astype(np.uint64), entries["client"].astype(np.uint64)
    return (device << np.uint64(40)) | (client << np.uint64(32)) | entries["batch"]


def _known_access(access: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.where(access < _ACCESS_KINDS, access, 0).astype(np.uint8)


def _on_host(moves: npt.NDArray[np.void]) -> tuple[_Integers, _Integers]:
    """When transfers began and ended, by the host's clock.

    The device's clock says it to the nanosecond, the host's only between which moments: it takes
    the time when it queues a transfer, and when it learns that it is done. So the device's clock is
    set by the transfer that began soonest after it was queued, as if that had taken no time: what
    took some 15 us there, every time is too early by, and none is before the call that asked.
    """
    start_ns, end_ns = moves["begin"].copy(), moves["end"].copy()
    device = np.where(moves["source"] == _HOST, moves["destination"], moves["source"])
    timed = (moves["begin_on_device"] > 0) & (moves["end_on_device"] >= moves["begin_on_device"])
    for number in np.unique(device[timed]):
        which = timed & (device == number)
        ahead_ns = int((moves["begin_on_device"][which] - moves["begin"][which]).min())
        start_ns[which] = moves["begin_on_device"][which] - ahead_ns
        end_ns[which] = moves["end_on_device"][which] - ahead_ns
    return start_ns, np.maximum(start_ns, end_ns)


# The driver's queue of unified-memory events of this process.
#
# The kernel module writes every migration and every fault of an address space into a ring in the
# memory of whoever asks for one at ``/dev/nvidia-uvm-tools``, as CUPTI does. Numbers and layouts
# are those of NVIDIA's open kernel modules, ``kernel-open/nvidia-uvm``: ``uvm_ioctl.h``,
# ``uvm_types.h`` and ``uvm_tools.c``, where `create_event_tracker` and `enqueue_event` are
# this file's other side.

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
