"""The driver's queue of unified-memory events of this process, and the records in it.

The kernel module writes every migration and every fault of an address space into a ring buffer in
the memory of a process that asks for one at ``/dev/nvidia-uvm-tools``, as CUPTI does. Request
numbers and layouts are those of NVIDIA's open kernel modules, ``kernel-open/nvidia-uvm``:
``uvm_ioctl.h``, ``uvm_types.h`` (``UvmEventMigrationInfo_V2`` and so on) and ``uvm_tools.c``, whose
`create_event_tracker` and `enqueue_event` are the counterpart of this module. Causes and kinds of
access have the same numbers as in CUPTI.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from umem.core.errors import UmemError, UnsupportedError
from umem.cuda import Location, Range, prefetch
from umem.cuda import bindings as _bindings
from umem.telemetry.records import (
    CAUSE_OF_NUMBER,
    Integers,
    MigrationRecords,
    RecordKind,
    concatenate,
    make_records,
)

__all__ = [
    "CPU_FAULT",
    "ENTRY_BYTES",
    "GPU_FAULT",
    "GPU_FAULT_REPLAY",
    "MIGRATION",
    "PROBE_BYTES",
    "DriverEvents",
    "DriverQueue",
    "EventType",
    "Kernel",
    "knows_release",
    "managed_on_host",
    "prefetch_probe",
    "recorded_bytes",
]

PROBE_BYTES = 4 << 20
"""Size of the probe block, which is moved to check that a recorder records it."""


@contextmanager
def managed_on_host(size_bytes: int) -> Iterator[Range]:
    """Allocate a block of managed memory with all its pages on the host, for a ``with`` block."""
    import torch

    address = _bindings.allocate_managed(size_bytes)
    try:
        # Only pages that were written are migrated.
        ctypes.memset(address, 1, size_bytes)
        yield Range(address, size_bytes)
        torch.cuda.synchronize()
    finally:
        _bindings.free(address)


def prefetch_probe(size_bytes: int) -> Range:
    """Prefetch a new block to the current device and free it; returns its former place.

    Raises UnsupportedError if there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("there is no GPU")
    with managed_on_host(size_bytes) as block:
        device = Location.device(torch.cuda.current_device())
        prefetch(block, device, stream=torch.cuda.current_stream())
    return block


def recorded_bytes(records: MigrationRecords, block: Range) -> int:
    """Bytes that records say came from the host to a block."""
    offset = records.address - block.address
    inside = (offset >= 0) & (offset < block.size_bytes)
    return int(records.bytes[inside & (records.kind == RecordKind.TO_DEVICE)].sum())


# ----------------------------------------------------------------------- entries of the queue

ENTRY_BYTES = 72
"""``UvmEventEntry_V2``."""


class EventType(IntEnum):
    """``UvmEventType``: the requested types."""

    CPU_FAULT = 1
    MIGRATION = 2
    GPU_FAULT = 3
    GPU_FAULT_REPLAY = 4


Entries = npt.NDArray[np.void]
"""Raw entries of :data:`ENTRY_BYTES` each."""

_HOST = 0
"""Processor number of the host."""


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
"""``UvmEventMigrationInfo_V2``. Host times are those of the raw monotonic clock."""
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


class DriverEvents:
    """Collects events until they are read as records."""

    def __init__(self) -> None:
        self._entries: list[Entries] = [np.empty(0, np.dtype((np.void, ENTRY_BYTES)))]
        self.count = 0

    def add(self, entries: Entries) -> None:
        """Add entries, in the order of the queue."""
        self._entries.append(entries)
        self.count += len(entries)

    def _of(self, kind: EventType, layout: np.dtype[np.void]) -> npt.NDArray[np.void]:
        chosen = [
            it[it.view(np.uint8).reshape(-1, ENTRY_BYTES)[:, 0] == kind] for it in self._entries
        ]
        return np.concatenate(chosen).view(layout)

    def records(self) -> MigrationRecords:
        """All records by start, on the host's raw monotonic clock.

        A record of GPU faults stands for one batch of the driver's: it has the address of the
        first, and lasts until the device may continue. CUPTI's are the same, but begin when the
        fault happened.
        """
        return concatenate((self._transfers(), self._gpu_faults(), self._host_faults()))

    def _transfers(self) -> MigrationRecords:
        moves = self._of(EventType.MIGRATION, MIGRATION)
        from_host, to_host = moves["source"] == _HOST, moves["destination"] == _HOST
        start_ns, end_ns = _on_host_clock(moves)
        records = make_records(
            len(moves),
            kind=np.where(
                to_host,
                RecordKind.TO_HOST,
                np.where(from_host, RecordKind.TO_DEVICE, RecordKind.BETWEEN_DEVICES),
            ),
            start_ns=start_ns,
            end_ns=end_ns,
            address=moves["address"],
            bytes=moves["bytes"],
            cause=np.where(moves["cause"] < len(CAUSE_OF_NUMBER), moves["cause"], 0),
        )
        # Moves between the host's NUMA nodes do not cross the link.
        return records.select(~(from_host & to_host))

    def _gpu_faults(self) -> MigrationRecords:
        faults = self._of(EventType.GPU_FAULT, GPU_FAULT)
        batches, first, counts = np.unique(
            _batch_numbers(faults), return_index=True, return_counts=True
        )
        faults = faults[first]
        return make_records(
            len(faults),
            kind=RecordKind.GPU_FAULT,
            start_ns=faults["time"],
            end_ns=np.maximum(faults["time"], self._replayed_ns(batches)),
            address=faults["address"],
            faults=counts,
        )

    def _replayed_ns(self, batches: npt.NDArray[np.uint64]) -> Integers:
        """When each batch was done; 0 where that is unknown."""
        replays = self._of(EventType.GPU_FAULT_REPLAY, GPU_FAULT_REPLAY)
        if not len(replays):
            return np.zeros(len(batches), np.int64)
        # The queue has batches of other processes too.
        replayed = _batch_numbers(replays)
        order = np.argsort(replayed, kind="stable")
        at = np.minimum(np.searchsorted(replayed, batches, sorter=order), len(order) - 1)
        found = order[at]
        return np.where(replayed[found] == batches, replays["time"][found], 0)

    def _host_faults(self) -> MigrationRecords:
        faults = self._of(EventType.CPU_FAULT, CPU_FAULT)
        return make_records(
            len(faults),
            kind=RecordKind.CPU_FAULT,
            start_ns=faults["time"],
            end_ns=faults["time"],
            address=faults["address"],
            faults=1,
        )


def _batch_numbers(entries: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """A unique number for each batch: every device and kind of client counts from 0."""
    device, client = entries["device"].astype(np.uint64), entries["client"].astype(np.uint64)
    return (device << np.uint64(40)) | (client << np.uint64(32)) | entries["batch"]


def _on_host_clock(moves: npt.NDArray[np.void]) -> tuple[Integers, Integers]:
    """When transfers began and ended, on the host's clock.

    The device's clock has exact times. The host's clock has only bounds: the times when the host
    queued a transfer, and when it noticed the end. The device's clock is therefore set by the
    transfer that began soonest after it was queued, as if that had taken no time. It took some
    15 us, so every time is too early by that much, and none is before the call that asked for it.
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


# --------------------------------------------------------------------------------- the queue

_KNOWN_RELEASES = (580, 590, 595)
"""Major driver releases whose headers are known to have these numbers and layouts. Another release
might write entries of another length."""

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
"""Behind the parameters, so that no release reads memory beyond them."""

_CONTROL_BYTES = 4096
_GET_AHEAD, _GET_BEHIND, _PUT_BEHIND = 0, 1, 3
"""Of the 32-bit fields of ``UvmToolsEventControlData``."""
_DROPPED_AT = 16
_EVENT_TYPES = 64


def knows_release(release: str) -> bool:
    """Whether the event layout of a driver release, such as "580.159.04", is known."""
    return release.partition(".")[0] in map(str, _KNOWN_RELEASES)


class Kernel:
    """The requests to the driver's kernel module, on Linux."""

    def release(self) -> str | None:
        """The driver's release; None where there is no driver."""
        return _bindings.driver_release()

    def spaces(self) -> list[int]:
        """Open files of this process that may be its address space on the device."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{name}") == _SPACE_PATH:
                    found.append(int(name))
            except OSError:  # closed meanwhile
                continue
        return sorted(found)

    def open(self) -> int:
        """Open the tools' file."""
        return os.open(_TOOLS_PATH, os.O_RDWR | os.O_CLOEXEC)

    def call(self, file: int, request: int, parameters: bytearray) -> None:
        """Make a request of a file; the answer is written into the parameters."""
        fcntl.ioctl(file, request, parameters, True)

    def close(self, file: int) -> None:
        """Close a file that :meth:`open` opened."""
        os.close(file)


class DriverQueue:
    """A ring buffer that the driver fills until it is closed.

    A process has several driver files that look like its address space. Each is tried with a probe
    block: the file whose ring reports the block's migration is the right one, and the report also
    shows that the entries have the expected layout.

    `entry_count` is the size of the ring, a power of two; the driver drops and counts what comes to
    a full ring. `move` moves a block of the given size to the device, and returns its former place.

    Raises UnsupportedError if the driver's release is unknown, or it refuses, or does not report
    the probe block.
    """

    def __init__(
        self,
        entry_count: int = 2**18,
        kernel: Kernel | None = None,
        move: Callable[[int], Range] = prefetch_probe,
    ) -> None:
        self._kernel = kernel or Kernel()
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
        self._file, self._space = self._attach_to_space(move)

    def take(self) -> Entries:
        """Remove and return the entries since the last call."""
        begin = int(self._control[_GET_BEHIND])
        end = int(self._control[_PUT_BEHIND])
        with self._fence:  # a memory barrier: read the entries after the mark, never before it
            count = (end - begin) % self._entry_count
            places = (begin + np.arange(count)) % self._entry_count
            taken: Entries = self._ring[places]
        self._control[_GET_AHEAD] = self._control[_GET_BEHIND] = end
        return taken

    def dropped(self) -> int:
        """How many entries the driver has dropped because the ring was full."""
        return int(self._dropped.sum())

    def flush(self) -> None:
        """Let the driver write pending events; it reports a migration some time after its end.

        Raises UnsupportedError if the driver refuses.
        """
        self._call(self._space, _FLUSH_EVENTS, _FLUSH.pack(0), 0)

    def close(self) -> None:
        """End; the driver releases the ring."""
        self._kernel.close(self._file)

    def _require_known_release(self) -> None:
        release = self._kernel.release()
        if release is None:
            raise UnsupportedError("there is no NVIDIA driver here")
        if not knows_release(release):
            known = ", ".join(map(str, _KNOWN_RELEASES))
            raise UnsupportedError(
                f"the event layout of driver {release} is unknown; known are releases {known}"
            )

    def _attach_to_space(self, move: Callable[[int], Range]) -> tuple[int, int]:
        """The tools' file, with events enabled, and the file of the address space."""
        refusals = []
        for space in self._kernel.spaces():
            try:
                file = self._kernel.open()
            except OSError as error:
                raise UnsupportedError(f"{_TOOLS_PATH} does not open ({error.strerror})") from error
            self._file, self._space = file, space
            try:
                self._enable_events()
                self._require_probe_reported(move)
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
        raise UnsupportedError(f"the driver's event queue is not available ({why})")

    def _enable_events(self) -> None:
        ring, control = self._ring.ctypes.data, self._control.ctypes.data
        tracker = _TRACKER.pack(ring, self._entry_count, control, b"", 1, self._space, 0)
        self._call(self._file, _INIT_EVENT_TRACKER_V2, tracker, _TRACKER_STATUS)
        flags = sum(1 << kind for kind in EventType)
        self._call(self._file, _ENABLE_EVENTS, _EVENTS.pack(flags, 0), _EVENTS_STATUS)

    def _require_probe_reported(self, move: Callable[[int], Range]) -> None:
        block = move(PROBE_BYTES)
        self.flush()
        events = DriverEvents()
        events.add(self.take())
        if recorded_bytes(events.records(), block) != block.size_bytes:
            raise UnsupportedError("it did not report a block that was moved")

    def _call(self, file: int, request: int, parameters: bytes, status_at: int) -> None:
        answer = bytearray(parameters + bytes(_SPARE_BYTES))
        try:
            self._kernel.call(file, request, answer)
        except OSError as error:
            raise UnsupportedError(f"request {request}: {error.strerror}") from error
        (status,) = struct.unpack_from("<I", answer, status_at)
        if status:
            raise UnsupportedError(f"request {request}: NV_STATUS {status:#x}")
