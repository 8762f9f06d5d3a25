"""The driver's event queue, its records, and live recording with and without it."""

from __future__ import annotations

import ctypes
import errno
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import records_of

from umem.core.errors import UnsupportedError
from umem.core.report import Source
from umem.cuda import Range
from umem.telemetry import Profile, RecordKind, measured_row, run_of
from umem.telemetry.driver_events import (
    CPU_FAULT,
    ENTRY_BYTES,
    GPU_FAULT,
    GPU_FAULT_REPLAY,
    MIGRATION,
    DriverEvents,
    DriverQueue,
    EventType,
    Kernel,
)
from umem.telemetry.live import LiveCollector
from umem.telemetry.records import MigrationRecords

MIB = 1 << 20
BLOCK = 0x7F0000000000
RECORDED = Path(__file__).parent / "recorded/h200-driver-events.npz"
"""Entries of the queue, and what CUPTI recorded of the same transfers: NVIDIA H200, driver
580.159.04, cupti-python 13.0.1, 2026-11-22. Its times are on CUPTI's clock, with its lead."""


class StandInKernel(Kernel):
    """In place of the driver's kernel module: `enqueue_event` of its ``uvm_tools.c``.

    The memory that it writes to is that of the process, as the real one's.
    """

    SPACE, STRANGE, OTHER = 7, 6, 5
    """Files: the address space, an unused address space, and another file."""

    def __init__(self, release: str | None = "580.159.04", refusal: int = 0) -> None:
        self._release, self._refusal = release, refusal
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.flushes = 0
        self.enabled = 0
        self.late: list[bytes] = []
        """Entries that are written at the next flush."""
        self.error: OSError | None = None

    def release(self) -> str | None:
        return self._release

    def spaces(self) -> list[int]:
        return [self.OTHER, self.STRANGE, self.SPACE]

    def open(self) -> int:
        if self.error:
            raise self.error
        self.opened.append(100 + len(self.opened))
        return self.opened[-1]

    def close(self, file: int) -> None:
        self.closed.append(file)

    def call(self, file: int, request: int, parameters: bytearray) -> None:
        if request == 67:
            assert file in (self.SPACE, self.STRANGE)
            self.flushes += 1
            self.write(*self.late)
            self.late.clear()
        elif request == 58:
            self.enabled, _ = struct.unpack_from("<QI", parameters)
        else:
            assert request == 76
            ring, count, control, _, every, space, _ = struct.unpack_from("<QQQ16sIII", parameters)
            status = 0x16 if space == self.OTHER else self._refusal
            self.space = space
            struct.pack_into("<I", parameters, 48, status)
            if not status:
                assert every == 1
                assert count & (count - 1) == 0
                self.ring, self.count = ring, count
                self.control = (ctypes.c_uint32 * 132).from_address(control)

    def move(self, size_bytes: int) -> Range:
        """Move a block to the device, which the address space reports at the next flush."""
        half = size_bytes // 2
        if self.space == self.SPACE:
            self.late = [migration(at, half, 1, 2) for at in (BLOCK, BLOCK + half)]
        return Range(BLOCK, size_bytes)

    def write(self, *entries: bytes) -> None:
        for entry in entries:
            assert len(entry) == ENTRY_BYTES
            if not self.enabled >> entry[0] & 1:
                continue
            behind, put = self.control[1], self.control[3]
            if (self.count + behind - put) % self.count == 1:
                self.control[4 + 2 * entry[0]] += 1
                continue
            ctypes.memmove(self.ring + put * ENTRY_BYTES, entry, ENTRY_BYTES)
            self.control[2] = self.control[3] = (put + 1) % self.count


def queue_of(kernel: StandInKernel, entry_count: int = 64) -> DriverQueue:
    return DriverQueue(entry_count, kernel, kernel.move)


def entry(layout: np.dtype[np.void], **fields: int) -> bytes:
    row = np.zeros(1, layout)
    for name, value in fields.items():
        row[name] = value
    return row.tobytes()


def migration(
    address: int, size: int, on: int, off: int, source: int = 0, destination: int = 1, **more: int
) -> bytes:
    """A transfer from `on` to `off` by the device, whose clock is 1,000,000 ns ahead."""
    fields = {
        "cause": 1,
        "begin": on - 15,
        "end": off + 5000,
        "begin_on_device": on + 1_000_000,
        "end_on_device": off + 1_000_000,
        **more,
    }
    return entry(
        MIGRATION,
        type=EventType.MIGRATION,
        address=address,
        bytes=size,
        source=source,
        destination=destination,
        **fields,
    )


def gpu_fault(address: int, time_ns: int, batch: int, **more: int) -> bytes:
    fields = {"device": 1, "client": 1, "access": 1, **more}
    return entry(
        GPU_FAULT, type=EventType.GPU_FAULT, address=address, time=time_ns, batch=batch, **fields
    )


def replay(batch: int, time_ns: int, **more: int) -> bytes:
    fields = {"device": 1, "client": 1, **more}
    return entry(
        GPU_FAULT_REPLAY, type=EventType.GPU_FAULT_REPLAY, batch=batch, time=time_ns, **fields
    )


def entries_of(*entries: bytes) -> Any:
    return np.frombuffer(b"".join(entries), np.dtype((np.void, ENTRY_BYTES)))


def records(*entries: bytes) -> MigrationRecords:
    events = DriverEvents()
    for one in entries:
        events.add(entries_of(one))
    assert events.count == len(entries)
    return events.records()


# ----------------------------------------------------------------------------------- the queue


def test_the_queue_returns_entries_and_wraps_around() -> None:
    kernel = StandInKernel()
    queue = queue_of(kernel, 8)
    assert kernel.enabled == 0b11110
    taken = []
    for turn in range(5):
        wrote = [migration(turn * 100 + n, 1, 1, 2) for n in range(5)]
        kernel.write(*wrote)
        taken.append(b"".join(it.tobytes() for it in queue.take()))
        assert taken[-1] == b"".join(wrote)
    assert len(queue.take()) == 0
    assert queue.dropped() == 0
    queue.close()
    assert kernel.closed == kernel.opened  # two of them were not the address space


def test_entries_dropped_by_a_full_queue_are_counted() -> None:
    kernel = StandInKernel()
    queue = queue_of(kernel, 8)
    kernel.write(*(migration(n, 1, 1, 2) for n in range(9)), *(replay(1, 2) for _ in range(3)))
    assert len(queue.take()) == 7
    assert queue.dropped() == 2 + 3
    kernel.late = [migration(77, 1, 1, 2)]
    assert len(queue.take()) == 0
    queue.flush()
    assert [it["address"] for it in queue.take().view(MIGRATION)] == [77]


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (StandInKernel(release=None), "no NVIDIA driver"),
        (StandInKernel(release="570.211.01"), r"driver 570\.211\.01 is unknown.* 580, 590, 595"),
        (StandInKernel(release="5800.1"), "driver 5800.1 is unknown"),
        (StandInKernel(refusal=0x1F), "5: request 76: NV_STATUS 0x16; file 6: .* 0x1f; file 7: "),
    ],
)
def test_unknown_drivers_are_refused(kernel: StandInKernel, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        queue_of(kernel, 8)
    assert kernel.closed == kernel.opened


@pytest.mark.parametrize(
    "reported", [[], [(BLOCK, 2 * MIB)], [(BLOCK, 4 * MIB), (BLOCK + MIB, MIB)]]
)
def test_a_queue_must_report_the_probe_block(reported: list[tuple[int, int]]) -> None:
    """Otherwise its entries may have another layout."""
    kernel = StandInKernel()

    def move(size_bytes: int) -> Range:
        kernel.late = [migration(*it, 1, 2) for it in reported]
        return Range(BLOCK, size_bytes)

    with pytest.raises(UnsupportedError, match="file 7: it did not report a block that was moved"):
        DriverQueue(8, kernel, move)
    assert kernel.closed == kernel.opened


def test_errors_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = StandInKernel()
    kernel.error = PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(UnsupportedError, match=r"uvm-tools does not open \(Permission denied"):
        queue_of(kernel, 8)
    monkeypatch.setattr(kernel, "spaces", list)
    with pytest.raises(UnsupportedError, match="CUDA has not started"):
        queue_of(kernel, 8)


# --------------------------------------------------------------------------------- the records


def test_events_become_records() -> None:
    found = records(
        replay(3, 990, device=2),  # of another device, whose batches have the same numbers
        gpu_fault(0x7F0000201000, 500, 3, access=2),
        gpu_fault(0x7F0000200000, 510, 3),
        gpu_fault(0x7F0000201000, 520, 3),
        migration(0x7F0000200000, MIB, 600, 700, cause=2),
        migration(0x7F0000300000, 4 * MIB, 700, 900, source=1, destination=0, cause=4),
        migration(0x7F0000400000, 4096, 950, 960, source=2, destination=1, cause=77),
        migration(0x7F0000500000, 4096, 970, 980, source=0, destination=0),
        replay(3, 800),
        gpu_fault(0x7F0000600000, 1000, 4),
        entry(CPU_FAULT, type=EventType.CPU_FAULT, address=0x7F0000700000, time=1200, access=2),
        gpu_fault(0x7F0000800000, 1300, 3, client=2),
    )
    kinds = [RecordKind(it).name for it in found.kind]
    assert kinds == [
        "GPU_FAULT", "TO_DEVICE", "TO_HOST", "BETWEEN_DEVICES", "GPU_FAULT", "CPU_FAULT",
        "GPU_FAULT",
    ]  # fmt: skip
    assert found.address.tolist() == [
        0x7F0000201000, 0x7F0000200000, 0x7F0000300000, 0x7F0000400000, 0x7F0000600000,
        0x7F0000700000, 0x7F0000800000,
    ]  # fmt: skip
    assert found.bytes.tolist() == [0, MIB, 4 * MIB, 4096, 0, 0, 0]
    assert found.faults.tolist() == [3, 0, 0, 0, 1, 1, 1]
    assert found.cause.tolist() == [0, 2, 4, 0, 0, 0, 0]
    # Transfers are 15 ns early: the clock assumes that the quickest one began when queued.
    assert found.start_ns.tolist() == [500, 585, 685, 935, 1000, 1200, 1300]
    assert found.end_ns.tolist() == [800, 685, 885, 945, 1000, 1200, 1300]


def test_no_transfer_begins_before_it_was_queued() -> None:
    found = records(
        migration(1, 1, 100, 130, begin=20),
        migration(2, 1, 500, 530, begin=490),
        migration(3, 1, 900, 930, begin=300),
    )
    assert (found.start_ns >= np.array([20, 490, 300])).all()
    assert np.diff(found.start_ns).tolist() == [400, 400]
    assert set((found.end_ns - found.start_ns).tolist()) == {30}


def test_transfers_without_device_times_have_host_times() -> None:
    found = records(migration(1, 1, 100, 130, begin_on_device=0, begin=90, end=140))
    assert (found.start_ns.tolist(), found.end_ns.tolist()) == ([90], [140])


def test_no_events_give_no_records() -> None:
    assert len(records()) == 0
    assert len(records(replay(1, 2))) == 0


@pytest.mark.parametrize("work", ["back", "cpu", "scattered"])
def test_driver_events_equal_cuptis_records(work: str) -> None:
    """Transfers on a real GPU: prefetched both ways, accessed by the host, accessed by a kernel."""
    with np.load(RECORDED, allow_pickle=False) as recorded:
        entries = recorded[f"{work}_entries"]
        expected = records_of(recorded[f"{work}_cupti"][:, :7])
        ahead_ns = int(recorded[f"{work}_cupti_ahead_ns"])
    events = DriverEvents()
    for part in np.array_split(entries, 7):  # wherever the queue was emptied
        events.add(np.ascontiguousarray(part).view(np.dtype((np.void, ENTRY_BYTES))).ravel())
    found = events.records()
    expected = expected.select(expected.kind <= RecordKind.CPU_FAULT)  # without CUPTI's memory sets

    assert len(found) == len(expected)
    for kind in RecordKind:
        ours, theirs = (it.select(it.kind == kind) for it in (found, expected))
        assert len(ours) == len(theirs)
        for name in ("address", "bytes", "cause"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
        late_ns = ours.start_ns - (theirs.start_ns - ahead_ns)
        if kind == RecordKind.GPU_FAULT:
            # CUPTI counts from the fault, umem from when the driver serves it.
            assert (late_ns > 0).all()
            assert (ours.end_ns <= theirs.end_ns - ahead_ns).all()
            assert (ours.faults >= theirs.faults).all()
        elif kind in (RecordKind.TO_DEVICE, RecordKind.TO_HOST):
            assert (np.abs(late_ns) < 25_000).all()
            lengths = (ours.end_ns - ours.start_ns) - (theirs.end_ns - theirs.start_ns)
            assert (np.abs(lengths) <= 1).all()


# ------------------------------------------------------------------------------ live recording


class Copies:
    """In place of CUPTI's collector: it may refuse, and records copies."""

    source: Source = "cupti"
    clock_ahead_ns = 10**15

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.made: list[bool] = []

    def __call__(self, limit: int, *, unified_memory: bool = True) -> Copies:
        self.made.append(unified_memory)
        return self

    def start(self) -> None:
        if self.fails == "start":
            raise UnsupportedError("CUPTI is taken")

    def now_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) + self.clock_ahead_ns

    def stop(self) -> tuple[MigrationRecords, int]:
        if self.fails == "stop":
            raise UnsupportedError("CUPTI broke")
        start_ns = self.now_ns() - 20_000_000
        row = (int(RecordKind.MEMCPY), start_ns, start_ns + 100, 0, 64, 0, 0)
        return records_of([row]), 2

    def late(self) -> int:
        return 0

    def notes(self) -> tuple[str, ...]:
        return ()


@pytest.fixture
def kernel() -> Iterator[StandInKernel]:
    made = StandInKernel()
    yield made
    assert made.closed == made.opened


def live(kernel: StandInKernel, copies: Copies, **limits: int) -> LiveCollector:
    return LiveCollector(lambda: queue_of(kernel), copies, **limits)  # type: ignore[arg-type]


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)


def recorded(kernel: StandInKernel, copies: Copies) -> Profile:
    """A profile of a step in which two blocks moved, with copies that CUPTI reports."""
    with Profile(live(kernel, copies), steps=1) as profile:
        begin_ns = now_ns()
        kernel.write(migration(4096, MIB, begin_ns + 15, begin_ns + 1015))
        time.sleep(0.05)
        kernel.late = [migration(8192, MIB, begin_ns + 2015, begin_ns + 4015)]
        profile.step()
    return profile


def test_migrations_come_from_the_driver_and_copies_from_cupti(kernel: StandInKernel) -> None:
    copies = Copies()
    profile = recorded(kernel, copies)
    assert copies.made == [False]
    report = profile.report()
    assert (report.source, report.collected, report.has_copies) == ("driver", True, True)
    assert report.moved_bytes("to_device", "hint") == 2 * MIB
    assert (report.memory_ops_count, report.memory_ops_bytes) == (1, 64)
    assert report.um_bytes_share == pytest.approx(1, abs=1e-3)
    assert profile.recording.dropped == 2
    assert sum(it.seconds for it in report.traffic) == pytest.approx(3e-6)


@pytest.mark.parametrize("fails", ["start", "stop"])
def test_the_driver_alone_records_migrations_not_copies(fails: str, kernel: StandInKernel) -> None:
    profile = recorded(kernel, Copies(fails))
    report = profile.report()
    assert (report.source, report.collected, report.has_copies) == ("driver_only", True, False)
    assert report.moved_bytes("to_device", "hint") == 2 * MIB
    words = {"start": "were not recorded: CUPTI is taken", "stop": "were lost: CUPTI broke"}[fails]
    assert any(f"copies and memory sets {words}" in note for note in report.notes)
    assert np.isnan([report.um_time_share, report.um_ops_share, report.um_bytes_share]).all()
    row = measured_row(run_of(profile.recording))
    assert row["um_time_share"] is row["um_bytes_share"] is row["memory_ops"] is None
    assert row["moved_bytes"]["to_device"] == 2 * MIB


def test_cupti_records_everything_where_the_driver_is_unknown() -> None:
    copies = Copies()
    with Profile(live(StandInKernel("999.1"), copies), steps=1) as profile:
        time.sleep(0.05)
        profile.step()
    assert copies.made == [True]
    report = profile.report()
    assert report.source == "cupti"
    assert report.memory_ops_bytes == 64
    assert any("CUPTI alone" in it and "driver 999.1" in it for it in report.notes)


def test_without_driver_and_cupti_both_reasons_are_given() -> None:
    collector = live(StandInKernel("999.1"), Copies("start"))
    with pytest.raises(UnsupportedError, match=r"CUPTI is taken.*driver 999\.1"):
        collector.start()
    with Profile(collector, required=False) as profile:
        pass
    assert profile.report().source == "none"


def test_one_recording_at_a_time(kernel: StandInKernel) -> None:
    first, second = live(kernel, Copies()), live(kernel, Copies())
    first.start()
    with pytest.raises(UnsupportedError, match=r"another umem\.profile\(\) is recording"):
        second.start()
    first.stop()
    second.start()
    second.stop()


def test_records_over_the_limit_count_as_dropped(kernel: StandInKernel) -> None:
    collector = live(kernel, Copies("start"), limit=3)
    collector.start()
    kernel.write(*(migration(n, 1, 100 * n, 100 * n + 1) for n in range(1, 6)))
    found, dropped = collector.stop()
    assert (found.address.tolist(), dropped) == ([1, 2, 3], 2)


def test_events_over_the_limit_count_as_dropped(kernel: StandInKernel) -> None:
    collector = live(kernel, Copies("start"), event_limit=3)
    collector.start()
    for turn in range(4):
        kernel.write(*(migration(10 * turn + n, 1, 100 * n, 100 * n + 1) for n in (1, 2)))
        time.sleep(0.03)
    found, dropped = collector.stop()
    assert (sorted(found.address.tolist()), dropped) == ([1, 2, 11], 5)


def test_a_driver_that_fails_at_the_end_does_not_end_the_training(
    kernel: StandInKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Profile(live(kernel, Copies()))
    with profile:
        monkeypatch.setattr(kernel, "call", _refuse)
    assert profile.report().source == "none"
    assert any("lost: request 67: gone" in note for note in profile.report().notes)


def _refuse(*_: object) -> None:
    raise OSError(errno.ENODEV, "gone")
