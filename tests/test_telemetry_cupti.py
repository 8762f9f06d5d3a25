"""CUPTI: its activities become records, and the collector gets all of them."""

from __future__ import annotations

import ctypes
import enum
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recordings import Row, records_of

from umem.core.errors import UnsupportedError
from umem.cuda import Range
from umem.telemetry import Profile, RecordKind
from umem.telemetry.cupti import BufferCallbacks, CuptiCollector, CuptiTiming
from umem.telemetry.cupti_activities import activity_format, copy_buffer, read_activities
from umem.telemetry.records import MigrationRecords, concatenate

MIB = 1 << 20
KIB = 1 << 10


class StandInError(Exception):
    """In place of ``cupti.cuptiError``."""


class StandInCupti(types.SimpleNamespace):
    """In place of the module ``cupti.cupti``, which needs a GPU: the names and numbers in use.

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
    # The fields that are read, with their offsets in cupti-python 13.0.1.
    activity_unified_memory_counter_dtype = np.dtype("<i4")  # an older one
    activity_unified_memory_counter3_dtype = np.dtype(
        {
            "names": ["kind", "counter_kind", "value", "start", "end", "address", "flags_"],
            "formats": ["<i4", "<i4", "<u8", "<u8", "<u8", "<u8", "<u4"],
            "offsets": [0, 4, 8, 16, 24, 32, 56],
            "itemsize": 104,
        }
    )
    activity_memcpy6_dtype = np.dtype(
        {
            "names": ["kind", "copy_kind", "bytes", "start", "end"],
            "formats": ["<i4", "u1", "<u8", "<u8", "<u8"],
            "offsets": [0, 4, 8, 16, 24],
            "itemsize": 96,
        }
    )
    activity_memset4_dtype = np.dtype(
        {
            "names": ["kind", "bytes", "start", "end"],
            "formats": ["<i4", "<u8", "<u8", "<u8"],
            "offsets": [0, 8, 16, 24],
            "itemsize": 88,
        }
    )

    def __init__(self, refusal: str = "", refused: str = "", lost: int = 0) -> None:
        super().__init__()
        self.refusal, self.refused, self.lost = refusal, refused, lost
        self.calls: list[tuple[Any, ...]] = []
        self.buffers: list[list[bytes]] = []
        self.on_disable: list[list[bytes]] = []

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
        self.buffers += self.on_disable
        self.on_disable = []

    def activity_flush_all(self, flag: int) -> None:
        self._call("flush", flag)
        # The driver is late: each call hands over one more buffer.
        if self.buffers:
            self.wanted()
            self.full(buffer_of(*self.buffers.pop(0)))

    def activity_get_num_dropped_records(self, context: int, stream: int, out: int) -> None:
        self._call("dropped", context, stream)
        ctypes.c_size_t.from_address(out).value = self.lost

    def get_timestamp(self) -> int:
        return 1234


@dataclass
class StandInActivity:
    """In place of cupti-python's records: a place in a buffer, read by attribute."""

    ptr: int
    memory: Any
    layout: np.dtype[Any]

    def __getattr__(self, name: str) -> int:
        if name not in (self.layout.names or ()):
            raise AttributeError(name)
        field: Any = np.frombuffer(ctypes.string_at(self.ptr, self.layout.itemsize), self.layout)
        return int(field[name][0])


LAYOUTS = {
    1: StandInCupti.activity_memcpy6_dtype,
    2: StandInCupti.activity_memset4_dtype,
    25: StandInCupti.activity_unified_memory_counter3_dtype,
}
OTHER = np.dtype({"names": ["kind"], "formats": ["<i4"], "offsets": [0], "itemsize": 224})
"""A kernel's record, of which only the kind is read."""


def activity(kind: int, **values: int) -> bytes:
    record = np.zeros(1, LAYOUTS.get(kind, OTHER))
    for name, value in {"kind": kind, **values}.items():
        record[name] = value
    return record.tobytes()


def counter(kind: int, value: int, start: int, end: int, address: int, flags: int) -> bytes:
    return activity(
        25, counter_kind=kind, value=value, start=start, end=end, address=address, flags_=flags
    )


def copy(size: int, start: int, end: int, copy_kind: int = 0) -> bytes:
    return activity(1, bytes=size, start=start, end=end, copy_kind=copy_kind)


def memory_set(size: int, start: int, end: int) -> bytes:
    return activity(2, bytes=size, start=start, end=end)


def buffer_of(*records: bytes, gap: int = 0) -> list[StandInActivity]:
    """Records in one buffer, packed as by CUPTI, or with gaps between them."""
    data = b"".join(record + bytes(gap) for record in records)
    memory = ctypes.create_string_buffer(data, max(len(data), 1))
    at = ctypes.addressof(memory)
    found = []
    for record in records:
        kind = int.from_bytes(record[:4], "little")
        found.append(StandInActivity(at, memory, LAYOUTS.get(kind, OTHER)))
        at += len(record) + gap
    return found


def read(*records: bytes, gap: int = 0) -> MigrationRecords:
    form = activity_format(StandInCupti())
    return read_activities([copy_buffer(buffer_of(*records, gap=gap), form)], form)


QUICK = CuptiTiming(first_s=0.01, answer_s=0.05, flush_every_s=1000.0, quiet_s=0.3)
"""Short waits: nothing is late in these tests but what they delay themselves."""


def no_gpu(_: int) -> Range:
    raise UnsupportedError("there is no GPU")


@pytest.fixture
def callbacks() -> BufferCallbacks:
    """Callbacks of a process in which CUPTI has recorded before."""
    made = BufferCallbacks()
    made.is_primed = True
    return made


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> StandInCupti:
    module = StandInCupti()
    install(monkeypatch, module)
    return module


@pytest.fixture
def make(callbacks: BufferCallbacks) -> Callable[..., CuptiCollector]:
    """Makes a collector, by default one that cannot move a probe block."""

    def collector(
        limit: int = 2**21, move: Callable[[int], Range] = no_gpu, **timing: float
    ) -> CuptiCollector:
        times = replace(QUICK, **timing)
        return CuptiCollector(limit, timing=times, move=move, callbacks=callbacks)

    return collector


Make = Callable[..., CuptiCollector]


def install(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    package = types.ModuleType("cupti")
    package.cupti = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.cupti", module)


# ------------------------------------------------------------------------------------- records


def test_activities_become_records() -> None:
    records = read(
        counter(3, 0xDEADBEEF, 80, 0, 0x7F0000002000, 1),
        counter(4, 3, 90, 95, 0x7F0000001000, 2),
        counter(1, 2 * MIB, 100, 150, 0x7F0000000000, 2),
        counter(2, 64 * KIB, 160, 170, 0x7F0000200000, 4),
        counter(5, 4096, 10, 20, 0x7F0000002000, 0),  # thrashing: not asked for
        copy(4096, 200, 230, copy_kind=8),
        memory_set(512, 240, 241),
        activity(10),  # a kernel
    )
    assert records.kind.tolist() == [
        *(RecordKind.CPU_FAULT, RecordKind.GPU_FAULT, RecordKind.TO_DEVICE, RecordKind.TO_HOST),
        *(RecordKind.MEMCPY, RecordKind.MEMSET),
    ]
    assert records.bytes.tolist() == [0, 0, 2 * MIB, 64 * KIB, 4096, 512]
    # A host fault's value is the program counter of what faulted: it is one fault.
    assert records.faults.tolist() == [1, 3, 0, 0, 0, 0]
    assert (records.end_ns - records.start_ns).tolist() == [0, 5, 50, 10, 30, 1]
    assert records.cause.tolist() == [0, 0, 2, 4, 0, 0]
    assert records.address[2] == 0x7F0000000000
    assert records.is_transfer().tolist() == [False, False, True, True, False, False]


ACTIVITIES = st.one_of(
    st.builds(
        counter,
        st.integers(1, 7),
        st.integers(0, 2**60),
        st.integers(1, 2**62),
        st.integers(0, 2**62),
        st.integers(0, 2**62),
        st.integers(0, 9),
    ),
    st.builds(
        copy,
        st.integers(0, 2**60),
        st.integers(1, 2**62),
        st.integers(0, 2**62),
        st.integers(0, 255),
    ),
    st.builds(memory_set, st.integers(0, 2**60), st.integers(1, 2**62), st.integers(0, 2**62)),
    st.just(activity(10)),
)


def by_attribute(found: StandInActivity) -> Row | None:
    """One record, read by its attributes."""
    if found.kind == 10:
        return None
    start, end = found.start, max(found.start, found.end)
    if found.kind == 1:
        return (RecordKind.MEMCPY, start, end, 0, found.bytes, 0, 0)
    if found.kind == 2:
        return (RecordKind.MEMSET, start, end, 0, found.bytes, 0, 0)
    if found.counter_kind > 4:
        return None
    if found.counter_kind == 3:
        return (RecordKind.CPU_FAULT, start, start, found.address, 0, 1, 0)
    if found.counter_kind == 4:
        return (RecordKind.GPU_FAULT, start, end, found.address, 0, found.value, 0)
    way = RecordKind.TO_DEVICE if found.counter_kind == 1 else RecordKind.TO_HOST
    cause = found.flags_ if found.flags_ < 6 else 0
    return (way, start, end, found.address, found.value, 0, cause)


@pytest.mark.slow
@given(st.lists(ACTIVITIES), st.sampled_from((0, 8)))
def test_copied_bytes_read_as_the_records_attributes(records: list[bytes], gap: int) -> None:
    rows = [by_attribute(it) for it in buffer_of(*records, gap=gap)]
    expected = concatenate([records_of([row for row in rows if row is not None])])
    found = read(*records, gap=gap)
    for column in fields(MigrationRecords):
        assert getattr(found, column.name).tolist() == getattr(expected, column.name).tolist()


def test_a_callback_reads_attributes_of_two_records_only() -> None:
    asked = []

    class Asked:
        def __init__(self, found: StandInActivity) -> None:
            self._found = found

        @property
        def ptr(self) -> int:
            asked.append(self)
            return self._found.ptr

    raw = copy_buffer(
        [Asked(it) for it in buffer_of(*[counter(1, 1, 5, 6, 0, 0), copy(2, 7, 8)] * 500)],
        activity_format(StandInCupti()),
    )
    assert (len(raw), len(asked)) == (1000, 2)


def test_unknown_causes() -> None:
    records = read(counter(1, 10, 40, 50, 1, 77), counter(4, 1, 50, 0, 1, 99))
    assert records.cause.tolist() == [0, 0]
    assert records.end_ns.tolist() == [50, 50]


@pytest.mark.parametrize("never", [0, 2**64 - 5, 2**63])
def test_records_with_impossible_times_keep_their_bytes(never: int) -> None:
    records = read(
        counter(1, 1, never, 70, 1, 2),  # before any time is known
        counter(1, 2, 50, 60, 1, 2),
        counter(1, 3, never, 90, 1, 2),
        counter(1, 4, 80, never, 1, 2),
    )
    assert records.bytes.tolist() == [1, 2, 3, 4]
    assert records.start_ns.tolist() == [50, 50, 50, 80]
    assert (records.end_ns - records.start_ns).tolist() == [0, 10, 0, 0]
    assert read(counter(1, 1, never, never, 1, 2)).end_ns.tolist() == [0]


def test_concatenated_records_are_ordered_by_start() -> None:
    late = records_of([(5, 30, 40, 0, 1, 0, 0)])
    early = records_of([(6, 10, 20, 0, 2, 0, 0), (6, 30, 31, 0, 3, 0, 0)])
    records = concatenate([late, early])
    assert records.start_ns.tolist() == [10, 30, 30]
    assert records.bytes.tolist() == [2, 1, 3]
    assert len(concatenate([])) == 0


# ----------------------------------------------------------------------------------- collector


@pytest.mark.slow
def test_the_collector_enables_the_activities_it_reads(cupti: StandInCupti, make: Make) -> None:
    cupti.buffers = [
        [copy(8, 50, 60, 1)],
        [counter(1, MIB, 20, 30, 1 << 40, 1), memory_set(4, 70, 71)],
    ]
    cupti.lost = 5
    buffers, cupti.buffers = cupti.buffers, []
    collector = make()
    collector.start()
    cupti.buffers = buffers
    assert cupti.wanted() == (MIB, 0)
    assert collector.now_ns() == 1234
    records, dropped = collector.stop()
    assert records.kind.tolist() == [RecordKind.TO_DEVICE, RecordKind.MEMCPY, RecordKind.MEMSET]
    assert dropped == 5
    names = [name for name, _ in groupby(call[0] for call in cupti.calls)]
    assert names == [
        *("register", "flush", "configure", "enable", "flush", "disable", "flush", "dropped"),
    ]
    settings = next(call[1] for call in cupti.calls if call[0] == "configure")
    assert sorted(kind for _, kind, _, _ in settings) == [1, 2, 3, 4]
    assert all(enable == 1 and scope == 1 for scope, _, _, enable in settings)
    enabled = {call[1] for call in cupti.calls if call[0] == "enable"}
    assert enabled == {1, 2, 25} == {call[1] for call in cupti.calls if call[0] == "disable"}


@pytest.mark.slow
def test_records_over_the_limit_count_as_dropped(cupti: StandInCupti, make: Make) -> None:
    collector = make(limit=4)
    collector.start()
    cupti.buffers = [[copy(1, n, n + 1) for n in range(start, start + 3)] for start in (1, 4)]
    records, dropped = collector.stop()
    assert records.start_ns.tolist() == [1, 2, 3, 4]
    assert dropped == 2


@pytest.mark.slow
def test_one_recording_at_a_time(cupti: StandInCupti, make: Make) -> None:
    first = make()
    first.start()
    with pytest.raises(UnsupportedError, match="another collector has CUPTI"):
        make().start()
    first.stop()
    second = make()
    second.start()
    second.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refused", "said", "remedy"),
    [
        ("register", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)", "another profiler"),
        ("enable", "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)", "NVreg_RestrictProfiling"),
        ("configure", "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED", "umem doctor"),
        ("enable", "CUPTI_ERROR_NOT_COMPATIBLE", r"\[telemetry\]"),
    ],
)
def test_refusals_name_the_remedy(
    refused: str, said: str, remedy: str, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    module = StandInCupti(refusal=said, refused=refused)
    install(monkeypatch, module)
    with pytest.raises(UnsupportedError, match=remedy) as caught:
        make().start()
    assert said in str(caught.value)
    # Nothing is left enabled: the next one may start.
    module.refused = ""
    collector = make()
    collector.start()
    collector.stop()


def test_cupti_is_given_back_when_the_end_fails(cupti: StandInCupti, make: Make) -> None:
    collector = make()
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
    make().start()  # and nothing is in its way


def test_cupti_is_left_to_torchs_profiler(cupti: StandInCupti, make: Make) -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(UnsupportedError, match=r"torch\.profiler is recording"),
    ):
        make().start()
    assert cupti.calls == []
    make().start()


def test_missing_and_misfit_bindings(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(UnsupportedError, match=r"pip install .*\[telemetry\]'"):
        make().start()
    install(monkeypatch, types.SimpleNamespace(cuptiError=StandInError))
    with pytest.raises(UnsupportedError, match="version of cupti-python does not fit"):
        make().start()


@pytest.mark.slow
def test_records_of_another_shape_fail_at_the_end(cupti: StandInCupti, make: Make) -> None:
    collector = make()
    collector.start()
    cupti.full([types.SimpleNamespace(kind=25, counter_kind=1)])
    with pytest.raises(UnsupportedError, match=r"does not fit .*ptr"):
        collector.stop()


def test_layouts_of_another_version_are_refused(cupti: StandInCupti, make: Make) -> None:
    with pytest.raises(AttributeError, match="no layout of memcpy records"):
        activity_format(
            types.SimpleNamespace(
                ActivityKind=cupti.ActivityKind,
                ActivityUnifiedMemoryCounterKind=cupti.ActivityUnifiedMemoryCounterKind,
                activity_unified_memory_counter4_dtype=np.dtype("<i4"),
            )
        )


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_a_missing_driver_is_explained(
    cupti: StandInCupti, error: type[Exception], monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    """cupti-python loads the driver at the first call, and raises subclasses of RuntimeError."""

    class NotSupportedError(error):  # type: ignore[misc, valid-type]
        pass

    def refuse(*_: Any) -> None:
        raise NotSupportedError("libcuda.so.1 is missing")

    monkeypatch.setattr(cupti, "activity_register_callbacks", refuse)
    with pytest.raises(UnsupportedError, match=r"driver .* libcupti") as caught:
        make().start()
    assert "NotSupportedError: libcuda.so.1 is missing" in str(caught.value)
    with Profile(make(), required=False) as profile:
        profile.step()
    assert profile.report().source == "none"


# ------------------------------------------------------------------------------- start and end


def later(delay_s: float, call: Callable[[], object]) -> threading.Thread:
    def wait() -> None:
        time.sleep(delay_s)
        call()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


class SlowActivities(list[Any]):
    """A buffer whose callback takes longer than the collector waits for the next buffer."""

    def __bool__(self) -> bool:
        time.sleep(0.8)
        return True


@pytest.mark.slow
def test_stop_waits_for_callbacks_that_other_threads_run(cupti: StandInCupti, make: Make) -> None:
    collector = make()
    collector.start()
    buffers = [SlowActivities(buffer_of(*[counter(1, 1, 5, 6, 0, 0)] * 10_000)) for _ in range(2)]
    threads = [later(0.02, partial(cupti.full, found)) for found in buffers]
    records, dropped = collector.stop()
    for thread in threads:
        thread.join()
    assert (len(records), dropped, collector.late()) == (20_000, 0, 0)
    assert collector.notes() == ()


@pytest.mark.slow
def test_a_process_begins_with_an_empty_recording(
    cupti: StandInCupti, make: Make, callbacks: BufferCallbacks, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks.is_primed = False
    cupti.on_disable = [[copy(7, 5, 6)]]
    first, second = make(), make()
    with caplog.at_level("WARNING", logger="umem"):
        first.start()
    assert "for the first time" in caplog.text
    kinds = [("enable", 25), ("enable", 1), ("enable", 2)]
    changes = [it for it in cupti.calls if it[0] in ("enable", "disable")]
    assert changes == [*kinds, ("disable", 2), ("disable", 1), ("disable", 25), *kinds]
    # The record of the empty recording is dropped.
    assert (len(first.stop()[0]), first.late()) == (0, 0)
    cupti.calls.clear()
    second.start()
    assert [it for it in cupti.calls if it[0] == "disable"] == []
    second.stop()


def test_a_refusal_of_the_first_recording_leaves_nothing_on(
    cupti: StandInCupti, make: Make, callbacks: BufferCallbacks
) -> None:
    callbacks.is_primed = False
    cupti.refusal, cupti.refused = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES", "enable"
    with pytest.raises(UnsupportedError, match="NVreg_RestrictProfilingToAdminUsers"):
        make().start()
    assert [it for it in cupti.calls if it[0] == "disable"] == []
    assert not callbacks.is_primed


@pytest.mark.slow
@pytest.mark.parametrize("tries", [1, 3, 9])
def test_cupti_is_restarted_until_it_reports_the_probe_block(
    cupti: StandInCupti, make: Make, tries: int
) -> None:
    moved: list[int] = []

    def move(size_bytes: int) -> Range:
        moved.append(size_bytes)
        late = len(moved) < tries  # one of an earlier block in the same place
        start_ns = cupti.get_timestamp() - late
        cupti.buffers.append([counter(1, size_bytes, start_ns, start_ns + 1, 4096, 1)])
        return Range(4096, size_bytes)

    collector = make(move=move)
    collector.start()
    assert len(moved) == min(tries, 4)
    assert cupti.calls.count(("disable", 25)) == len(moved) - 1
    cupti.buffers.append([counter(1, 8, 7, 8, 0, 1)])
    records, dropped = collector.stop()
    # The probe block is not in the recording.
    assert (records.bytes.tolist(), dropped) == ([8], 0)
    assert any("not reliable" in note for note in collector.notes()) == (tries > 4)


@pytest.mark.slow
def test_without_a_probe_block_cupti_is_trusted(cupti: StandInCupti, make: Make) -> None:
    collector = make()
    collector.start()
    collector.stop()
    assert collector.notes() == ()


@pytest.mark.slow
def test_cupti_is_flushed_while_it_records(cupti: StandInCupti, make: Make) -> None:
    collector = make(flush_every_s=0.001)
    flushed = threading.Event()
    flush = cupti.activity_flush_all

    def count(flag: int) -> None:
        flush(flag)
        if cupti.calls.count(("flush", 0)) > 3:
            flushed.set()

    cupti.activity_flush_all = count  # type: ignore[method-assign]
    collector.start()
    assert flushed.wait(20)
    collector.stop()
    after = cupti.calls.count(("flush", 0))
    time.sleep(0.05)
    assert cupti.calls.count(("flush", 0)) == after


@pytest.mark.slow
def test_records_may_take_a_while(cupti: StandInCupti, make: Make) -> None:
    collector = make(quiet_s=1.5)
    collector.start()
    thread = later(1.0, lambda: cupti.full(buffer_of(copy(1, 5, 6))))
    records, _ = collector.stop()
    thread.join()
    assert len(records) == 1


@pytest.mark.slow
def test_records_completed_on_disabling_count(cupti: StandInCupti, make: Make) -> None:
    cupti.on_disable = [[copy(7, 5, 6)], [copy(8, 6, 7)]]
    collector = make()
    collector.start()
    records, dropped = collector.stop()
    assert (records.bytes.tolist(), dropped) == ([7, 8], 0)


@pytest.mark.slow
def test_records_that_do_not_end_are_reported_as_incomplete(
    cupti: StandInCupti,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def flush(_: int) -> None:
        cupti.full(buffer_of(copy(1, 5, 6)))

    profile = Profile(make(longest_drain_s=0.5, notice_s=0.2))
    with profile, caplog.at_level("WARNING", logger="umem"):
        monkeypatch.setattr(cupti, "activity_flush_all", flush)
        profile.step()
    assert any("incomplete" in note for note in profile.report().notes)
    assert "still handing over records: at most 0 s more" in caplog.text


@pytest.mark.slow
def test_late_records_are_lost_and_are_not_the_next_runs(cupti: StandInCupti, make: Make) -> None:
    with Profile(make()) as first:
        first.step()
    assert first.recording.dropped == 0
    cupti.full(buffer_of(copy(1, 5, 6), copy(1, 6, 7)))
    assert first.recording.dropped == 2
    assert any("2 records came after the end" in note for note in first.report().notes)
    # A late buffer, which the next recording flushes at its start.
    cupti.buffers = [[counter(1, 1, 5, 6, 0, 0)]]
    with Profile(make()) as second:
        second.step()
    assert first.recording.dropped == 3
    assert (len(second.recording.records), second.recording.dropped) == (0, 0)


@pytest.mark.slow
def test_torchs_profiler_inside_of_a_recording_is_noted(cupti: StandInCupti, make: Make) -> None:
    torch_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with Profile(make()) as profile:
        profile.step()
        torch_profiler.start()
        profile.step()
        torch_profiler.stop()
        profile.step()
    (note,) = [note for note in profile.report().notes if "torch.profiler" in note]
    assert note.startswith("the figures are incomplete")
    assert "from step 1 on" in note
    with Profile(make()) as profile:
        torch_profiler.start()
    torch_profiler.stop()
    assert any("torch.profiler" in note for note in profile.report().notes)
