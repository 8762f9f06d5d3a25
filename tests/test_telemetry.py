"""Records of CUPTI, and whose bytes they are of."""

from __future__ import annotations

import ctypes
import enum
import sys
import types
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umem._native import Allocator, ClassSetting, Config
from umem.classes import TensorClass
from umem.errors import UnsupportedError
from umem.inspection import LiveTensor
from umem.telemetry import (
    CuptiCollector,
    RecordKind,
    Snapshot,
    attribute,
    blocks_hit,
    concatenated,
    numbers_of,
    read_activities,
    records_of,
    snapshot_of,
)

MIB = 1 << 20
KIB = 1 << 10


class StandInError(Exception):
    """In place of ``cupti.cuptiError``."""


class StandInCupti(types.SimpleNamespace):
    """In place of the module ``cupti.cupti``, which needs a GPU: its names, its numbers, no more.

    The numbers are those of CUPTI's headers. What was called is kept in order.
    """

    cuptiError = StandInError  # noqa: N815 - the module's own name

    class ActivityKind(enum.IntEnum):
        MEMCPY = 1
        MEMSET = 2
        CONCURRENT_KERNEL = 10
        UNIFIED_MEMORY_COUNTER = 25

    class ActivityUnifiedMemoryCounterKind(enum.IntEnum):
        BYTES_TRANSFER_HTOD = 1
        BYTES_TRANSFER_DTOH = 2
        CPU_PAGE_FAULT_COUNT = 3
        GPU_PAGE_FAULT = 4
        THRASHING = 5

    class ActivityUnifiedMemoryCounterScope(enum.IntEnum):
        PROCESS_SINGLE_DEVICE = 1

    activity_unified_memory_counter_config_dtype = np.dtype(
        [("scope", "<i4"), ("kind", "<i4"), ("device_id", "<u4"), ("enable", "<u4")]
    )

    def __init__(self, refusal: str = "", refused: str = "", lost: int = 0) -> None:
        super().__init__()
        self.refusal, self.refused, self.lost = refusal, refused, lost
        self.calls: list[tuple[Any, ...]] = []
        self.buffers: list[list[Any]] = []

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.refused:
            raise StandInError(self.refusal)

    def activity_register_callbacks(self, wanted: Any, full: Any) -> None:
        self._call("register")
        self.wanted, self.full = wanted, full

    def activity_configure_unified_memory_counter(self, address: int, count: int) -> None:
        dtype = self.activity_unified_memory_counter_config_dtype
        raw = ctypes.string_at(address, count * dtype.itemsize)
        self._call("configure", np.frombuffer(raw, dtype).tolist())

    def activity_enable(self, kind: int) -> None:
        self._call("enable", int(kind))

    def activity_disable(self, kind: int) -> None:
        self._call("disable", int(kind))

    def activity_flush_all(self, flag: int) -> None:
        self._call("flush", flag)
        # The driver is late: each call hands over one more buffer.
        if self.buffers:
            self.full(self.buffers.pop(0))

    def activity_get_num_dropped_records(self, context: int, stream: int, out: int) -> None:
        self._call("dropped", context, stream)
        ctypes.c_size_t.from_address(out).value = self.lost

    def get_timestamp(self) -> int:
        return 1234


@dataclass
class StandInCounter:
    """In place of ``ActivityUnifiedMemoryCounter3``."""

    counter_kind: int
    value: int
    start: int
    end: int
    address: int
    flags_: int
    kind: int = 25


@dataclass
class StandInCopy:
    """In place of ``ActivityMemcpy6``; of ``ActivityMemset4`` with kind 2."""

    bytes: int
    start: int
    end: int
    copy_kind: int = 0
    kind: int = 1


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> StandInCupti:
    module = StandInCupti()
    install(monkeypatch, module)
    # Undone in the end, so that no test leaves a collector to the next.
    monkeypatch.setattr("umem.telemetry._cupti._active", None)
    return module


def install(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    package = types.ModuleType("cupti")
    package.cupti = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.cupti", module)


# ------------------------------------------------------------------------------------- records


def test_activities_become_columns() -> None:
    numbers = numbers_of(StandInCupti())
    records = read_activities(
        [
            StandInCounter(1, 2 * MIB, 100, 150, 0x7F0000000000, 2),
            StandInCounter(2, 64 * KIB, 160, 170, 0x7F0000200000, 4),
            StandInCounter(4, 3, 90, 95, 0x7F0000001000, 2),
            StandInCounter(3, 0xDEADBEEF, 80, 0, 0x7F0000002000, 1),
            StandInCounter(5, 4096, 10, 20, 0x7F0000002000, 0),  # thrashing: not asked for
            StandInCopy(4096, 200, 230, copy_kind=8),
            StandInCopy(512, 240, 241, kind=2),
            StandInCopy(1, 0, 0, kind=10),  # a kernel
        ],
        numbers,
    )
    assert records.kind.tolist() == [
        RecordKind.TO_DEVICE,
        RecordKind.TO_HOST,
        RecordKind.GPU_FAULT,
        RecordKind.CPU_FAULT,
        RecordKind.MEMCPY,
        RecordKind.MEMSET,
    ]
    assert records.bytes.tolist() == [2 * MIB, 64 * KIB, 0, 0, 4096, 512]
    # A host fault's value is the program counter of what faulted: it is one fault.
    assert records.faults.tolist() == [0, 0, 3, 1, 0, 0]
    assert (records.end_ns - records.start_ns).tolist() == [50, 10, 5, 0, 30, 1]
    assert records.cause.tolist() == [2, 4, 0, 0, 0, 0]
    assert records.access.tolist() == [0, 0, 2, 1, 0, 0]
    assert records.copy_kind.tolist() == [0, 0, 0, 0, 8, 0]
    assert records.address[0] == 0x7F0000000000
    assert records.is_transfer().tolist() == [True, True, False, False, False, False]


def test_causes_and_times_that_are_not_known() -> None:
    numbers = numbers_of(StandInCupti())
    records = read_activities(
        [StandInCounter(1, 10, 0, 0, 1, 77), StandInCounter(4, 1, 50, 0, 1, 99)], numbers
    )
    assert records.cause.tolist() == [0, 0]
    assert records.access.tolist() == [0, 0]
    assert (records.end_ns >= records.start_ns).all()


def test_chunks_are_put_in_order() -> None:
    late = records_of([(5, 30, 40, 0, 1, 0, 0, 0, 1)])
    early = records_of([(6, 10, 20, 0, 2, 0, 0, 0, 0), (6, 30, 31, 0, 3, 0, 0, 0, 0)])
    records = concatenated([late, early])
    assert records.start_ns.tolist() == [10, 30, 30]
    assert records.bytes.tolist() == [2, 1, 3]
    assert len(concatenated([])) == 0


# ----------------------------------------------------------------------------------- collector


def test_the_collector_asks_for_what_it_reads(cupti: StandInCupti) -> None:
    cupti.buffers = [
        [StandInCopy(8, 50, 60, 1)],
        [StandInCounter(1, MIB, 20, 30, 1 << 40, 1), StandInCopy(4, 70, 71, kind=2)],
    ]
    cupti.lost = 5
    collector = CuptiCollector()
    collector.start()
    assert cupti.wanted() == (8 * MIB, 0)
    assert collector.now_ns() == 1234
    records, dropped = collector.stop()
    assert records.kind.tolist() == [RecordKind.TO_DEVICE, RecordKind.MEMCPY, RecordKind.MEMSET]
    assert dropped == 5
    names = [name for name, _ in groupby(call[0] for call in cupti.calls)]
    assert names == [
        "register",
        "configure",
        "enable",
        "flush",
        "disable",
        "dropped",
    ]
    settings = next(call[1] for call in cupti.calls if call[0] == "configure")
    assert sorted(kind for _, kind, _, _ in settings) == [1, 2, 3, 4]
    assert all(enable == 1 and scope == 1 for scope, _, _, enable in settings)
    enabled = {call[1] for call in cupti.calls if call[0] == "enable"}
    assert enabled == {1, 2, 25} == {call[1] for call in cupti.calls if call[0] == "disable"}


def test_what_is_over_the_limit_counts_as_dropped(cupti: StandInCupti) -> None:
    cupti.buffers = [
        [StandInCopy(1, n, n + 1) for n in range(start, start + 3)] for start in (0, 3)
    ]
    collector = CuptiCollector(limit=4)
    collector.start()
    records, dropped = collector.stop()
    assert records.start_ns.tolist() == [0, 1, 2, 3]
    assert dropped == 2


def test_one_recording_at_a_time(cupti: StandInCupti) -> None:
    first = CuptiCollector()
    first.start()
    with pytest.raises(UnsupportedError, match=r"another umem\.profile\(\) is recording"):
        CuptiCollector().start()
    first.stop()
    second = CuptiCollector()
    second.start()
    second.stop()


@pytest.mark.parametrize(
    ("refused", "said", "remedy"),
    [
        ("register", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)", "another profiler"),
        ("enable", "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)", "NVreg_RestrictProfiling"),
        ("configure", "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED", "umem doctor"),
        ("enable", "CUPTI_ERROR_NOT_COMPATIBLE", r"umem\[telemetry\]"),
    ],
)
def test_refusals_name_the_remedy(
    refused: str, said: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = StandInCupti(refusal=said, refused=refused)
    install(monkeypatch, module)
    with pytest.raises(UnsupportedError, match=remedy) as caught:
        CuptiCollector().start()
    assert said in str(caught.value)
    # The next one may try: nothing is left behind.
    module.refused = ""
    collector = CuptiCollector()
    collector.start()
    collector.stop()


def test_cupti_is_given_back_when_the_end_fails(cupti: StandInCupti) -> None:
    collector = CuptiCollector()
    collector.start()
    cupti.refused, cupti.refusal = "flush", "CUPTI_ERROR_UNKNOWN"
    with pytest.raises(UnsupportedError, match="CUPTI_ERROR_UNKNOWN"):
        collector.stop()
    assert [call for call in cupti.calls if call[0] == "disable"] == [
        ("disable", 2),
        ("disable", 1),
        ("disable", 25),
    ]
    cupti.refused = ""
    CuptiCollector().start()  # and nothing is in its way


def test_torchs_profiler_is_not_robbed(cupti: StandInCupti) -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(UnsupportedError, match=r"torch\.profiler is recording"),
    ):
        CuptiCollector().start()
    assert cupti.calls == []
    CuptiCollector().start()


def test_missing_and_misfit_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'umem\[telemetry\]'"):
        CuptiCollector().start()
    install(monkeypatch, types.SimpleNamespace(cuptiError=StandInError))
    with pytest.raises(UnsupportedError, match="version of cupti-python does not fit"):
        CuptiCollector().start()


def test_records_of_another_shape_fail_at_the_end_and_not_silently(cupti: StandInCupti) -> None:
    cupti.buffers = [[types.SimpleNamespace(kind=25, counter_kind=1)]]
    collector = CuptiCollector()
    collector.start()
    with pytest.raises(UnsupportedError, match=r"does not fit .*address"):
        collector.stop()


# --------------------------------------------------------------------------------- attribution


def test_blocks_of_the_allocator_are_found_by_address() -> None:
    allocator = Allocator.on_host(Config([ClassSetting()] * len(TensorClass)), 0, 1)
    asked = []
    for number, size in enumerate((5 * MIB, 700, 3 * MIB, 100 * KIB, 512, 2 * MIB)):
        token = allocator.enter_class(number % len(TensorClass))
        asked.append((allocator.malloc(size), size))
        allocator.leave_class(token)
    blocks = [
        LiveTensor(address, requested, size, list(TensorClass)[number], device, kind)
        for address, requested, size, number, device, kind in allocator.live_blocks()
    ]
    names = {asked[2][0]: 7}
    snapshot = snapshot_of(blocks[::-1], 10, names)
    for number, (address, size) in enumerate(asked):
        for offset in (0, size - 1):
            hit = blocks_hit(snapshot, np.array([address + offset]), np.array([0]))
            assert snapshot.tensor_class[hit[0]] == number
            assert snapshot.name[hit[0]] == (7 if number == 2 else -1)


def naive_hit(snapshot: Snapshot, address: int, size: int) -> int:
    blocks = list(zip(snapshot.start.tolist(), snapshot.end.tolist(), strict=True))
    for index, (start, end) in enumerate(blocks):
        if start <= address < end:
            return index
    reached = [i for i, (start, _) in enumerate(blocks) if address <= start < address + size]
    return min(reached, default=-1)


@st.composite
def snapshots(draw: st.DrawFn, time_ns: int = 0) -> Snapshot:
    gaps = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=12))
    start, end, at = [], [], 0
    for gap, size in gaps:
        start.append(at + gap)
        at += gap + size
        end.append(at)
    count = len(start)
    classes = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    return Snapshot(
        time_ns,
        np.array(start, np.int64),
        np.array(end, np.int64),
        np.array(classes, np.int8),
        np.arange(count, dtype=np.int32),
    )


@given(snapshots(), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 20)), min_size=1))
def test_ranges_hit_what_a_plain_search_finds(
    snapshot: Snapshot, ranges: list[tuple[int, int]]
) -> None:
    address, size = np.array(ranges, np.int64).T
    hit = blocks_hit(snapshot, address, size)
    assert hit.tolist() == [naive_hit(snapshot, *it) for it in ranges]


@given(
    st.lists(snapshots(), max_size=3),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 80)), min_size=1),
)
def test_the_last_snapshot_before_wins_then_the_next_after(
    drawn: list[Snapshot], touched: list[tuple[int, int]]
) -> None:
    looks = [
        Snapshot(10 * (index + 1), it.start, it.end, it.tensor_class, it.name)
        for index, it in enumerate(drawn)
    ]
    records = records_of([(3, time, time, at, 0, 1, 0, 1, 0) for time, at in touched])
    tensor_class, name = attribute(records, looks)
    for row, (time, at) in enumerate(touched):
        before = [it for it in looks if it.time_ns <= time][-1:]
        after = [it for it in looks if it.time_ns > time][:1]
        expected = (-1, -1)
        for look in [*after, *before]:
            if (index := naive_hit(look, at, 0)) >= 0:
                expected = (int(look.tensor_class[index]), int(look.name[index]))
        assert (tensor_class[row], name[row]) == expected


@pytest.mark.parametrize(("later_class", "expected"), [(3, 7), (4, -1)])
def test_a_name_that_is_known_later_is_taken(later_class: int, expected: int) -> None:
    def look(time_ns: int, tensor_class: int, name: int) -> Snapshot:
        return Snapshot(
            time_ns,
            np.array([0]),
            np.array([100]),
            np.array([tensor_class], np.int8),
            np.array([name], np.int32),
        )

    records = records_of([(0, 5, 6, 0, 8, 0, 1, 0, 0)])
    tensor_class, name = attribute(records, [look(0, 3, -1), look(10, later_class, 7)])
    assert (tensor_class.tolist(), name.tolist()) == ([3], [expected])


def test_copies_are_of_nobody() -> None:
    look = Snapshot(
        0,
        np.array([0]),
        np.array([100]),
        np.array([1], np.int8),
        np.array([0], np.int32),
    )
    records = records_of([(5, 1, 2, 0, 8, 0, 0, 0, 1), (0, 1, 2, 0, 8, 0, 1, 0, 0)])
    tensor_class, name = attribute(records, [look])
    assert tensor_class.tolist() == [-1, 1]
    assert name.tolist() == [-1, 0]
    assert attribute(records, [])[0].tolist() == [-1, -1]
