"""Attribution: from the addresses of records to tensor classes and names."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import records_of

from umem.core.classes import TensorClass
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.inspection import LiveTensor
from umem.telemetry import RecordKind
from umem.telemetry.attribution import Snapshot, attribute, blocks_hit, snapshot_of
from umem.telemetry.records import MigrationRecords, make_records

MIB = 1 << 20
KIB = 1 << 10


def test_allocator_blocks_are_found_by_address() -> None:
    allocator = Allocator.on_host(Config([ClassSetting()] * len(TensorClass)), 0, 1)
    asked = []
    for number, size in enumerate((5 * MIB, 700, 3 * MIB, 100 * KIB, 512, 2 * MIB)):
        with allocator.class_override(number % len(TensorClass)):
            asked.append((allocator.malloc(size), size))
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


@pytest.mark.slow
@given(snapshots(), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 20)), min_size=1))
def test_ranges_hit_the_blocks_of_a_linear_search(
    snapshot: Snapshot, ranges: list[tuple[int, int]]
) -> None:
    address, size = np.array(ranges, np.int64).T
    hit = blocks_hit(snapshot, address, size)
    assert hit.tolist() == [naive_hit(snapshot, *it) for it in ranges]


@pytest.mark.slow
@given(
    st.lists(snapshots(), max_size=3),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 80)), min_size=1),
)
def test_the_snapshot_before_a_record_decides_then_the_one_after(
    drawn: list[Snapshot], touched: list[tuple[int, int]]
) -> None:
    taken = [
        Snapshot(10 * (index + 1), it.start, it.end, it.tensor_class, it.name)
        for index, it in enumerate(drawn)
    ]
    touched.sort()  # as records are, by time
    records = records_of([(3, when, when, at, 0, 1, 0) for when, at in touched])
    found = attribute(records, taken)
    for row, (time_ns, at) in enumerate(touched):
        before = [it for it in taken if it.time_ns <= time_ns][-1:]
        after = [it for it in taken if it.time_ns > time_ns][:1]
        expected = (-1, -1)
        for snapshot in [*after, *before]:
            if (index := naive_hit(snapshot, at, 0)) >= 0:
                expected = (int(snapshot.tensor_class[index]), int(snapshot.name[index]))
        assert (found.tensor_class[row], found.tensor[row]) == expected


def snapshot_at(*blocks: tuple[int, int, int], time_ns: int = 0) -> Snapshot:
    """Blocks of (start, end, class), in KiB, each with its number for a name."""
    start, end, tensor_class = np.array(blocks, np.int64).reshape(-1, 3).T
    names = np.arange(len(blocks), dtype=np.int32)
    return Snapshot(time_ns, start * KIB, end * KIB, tensor_class.astype(np.int8), names)


Owned = tuple[int, int]


def owners(records: MigrationRecords) -> list[tuple[Owned, int]]:
    """Class and name of what each record touched, and KiB."""
    columns = records.tensor_class, records.tensor, records.bytes // KIB
    rows = zip(*(it.tolist() for it in columns), strict=True)
    return [((tensor_class, name), size) for tensor_class, name, size in rows]


@pytest.mark.parametrize(
    ("begin", "length", "own", "shares"),
    [
        (0, 2048, (0, 0), []),
        (2048, 2048, (0, 0), [((1, 1), 960)]),  # over two, of different classes
        (3136, 2048, (1, 1), []),  # from edge to edge
        (3136, 2112, (1, 1), [((1, 2), 64)]),  # of one class, and another name
        (3072, 2304, (0, 0), [((1, 1), 2048), ((1, 2), 192)]),  # over three
        (7168, 1024, (1, 2), [((-1, -1), 512), ((4, 3), 384)]),  # over a gap
        (7360, 512, (4, 3), [((-1, -1), 448)]),  # from a gap
        (10048, 512, (4, 3), [((-1, -1), 320)]),  # into one
        (7296, 256, (-1, -1), []),
        (12288, 256, (0, 4), []),  # small blocks share their pages
        (12272, 64, (0, 4), []),
        (12292, 1024, (0, 5), []),
        (3136, 0, (1, 1), []),
    ],
)
@pytest.mark.parametrize("kind", [RecordKind.TO_HOST, RecordKind.GPU_FAULT])
def test_transfers_are_split_at_the_ends_of_large_blocks(
    kind: RecordKind, begin: int, length: int, own: Owned, shares: list[tuple[Owned, int]]
) -> None:
    snapshot = snapshot_at(
        *((0, 3136, 0), (3136, 5184, 1), (5184, 7296, 1), (7808, 10240, 4)),
        *((12288, 12290, 0), (12296, 12300, 0)),
    )
    is_fault = kind == RecordKind.GPU_FAULT
    size = 0 if is_fault else length * KIB
    records = records_of([(5, 1, 2, 0, 8, 0, 0), (kind, 1, 2, begin * KIB, size, 0, 1)])
    found = attribute(records, [snapshot])
    if is_fault:
        assert len(found) == 2
        return
    assert found.kind.tolist() == [5, kind] + [kind] * len(shares)
    assert found.is_part.tolist() == [False, False] + [True] * len(shares)
    assert owners(found)[1] == (own, length - sum(size for _, size in shares))
    assert sorted(owners(found)[2:]) == sorted(shares)


def test_the_next_snapshot_splits_what_the_last_one_lacks() -> None:
    before = snapshot_at((0, 3136, 0))
    after = snapshot_at((0, 3136, 0), (3136, 6272, 2), (6272, 9408, 3), time_ns=10)
    records = records_of(
        [
            (1, 5, 6, 2048 * KIB, 2048 * KIB, 0, 1),
            (1, 15, 16, 6144 * KIB, 2048 * KIB, 0, 1),
            (1, 5, 6, 6144 * KIB, 2048 * KIB, 0, 1),
        ]
    )
    found = attribute(records, [before, after])
    first, last = [((0, 0), 1088), ((2, 1), 960)], [((2, 1), 128), ((3, 2), 1920)]
    assert owners(found) == [*first, *last, *last]
    assert found.is_part.tolist() == [False, True] * 3
    assert found.start_ns.tolist() == [5, 5, 5, 5, 15, 15]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12), st.integers(0, 5)), max_size=6),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 40)), min_size=1, max_size=8),
)
def test_every_page_of_a_transfer_counts_for_its_block(
    drawn: list[tuple[int, int, int]], moved: list[tuple[int, int]]
) -> None:
    page, blocks, at = 64, [], 0  # in KiB
    for gap, more, member in drawn:
        size = 2048 + more * page
        blocks.append((at + gap * page, at + gap * page + size, member))
        at = blocks[-1][1]
    snapshot = snapshot_at(*blocks)
    for start, count in moved:
        row = (0, 1, 1001, start * page * KIB, count * page * KIB, 0, 1)
        parts = attribute(records_of([row]), [snapshot])
        assert parts.is_part.tolist() == [False] + [True] * (len(parts) - 1)
        assert int((parts.end_ns - parts.start_ns).sum()) == 1000
        expected: Counter[Owned] = Counter()
        for number in range(start, start + count):
            address = np.array([number * page * KIB])
            hit = int(blocks_hit(snapshot, address, np.array([0]))[0])
            owner = (int(snapshot.tensor_class[hit]), hit) if hit >= 0 else (-1, -1)
            expected[owner] += page
        assert +Counter(dict(owners(parts))) == +expected


@pytest.mark.parametrize(("later_class", "expected"), [(3, 7), (4, -1)])
def test_a_name_from_the_next_snapshot_is_used(later_class: int, expected: int) -> None:
    def one_block(time_ns: int, tensor_class: int, name: int) -> Snapshot:
        return Snapshot(
            time_ns,
            np.array([0]),
            np.array([100]),
            np.array([tensor_class], np.int8),
            np.array([name], np.int32),
        )

    records = records_of([(0, 5, 6, 0, 8, 0, 1)])
    found = attribute(records, [one_block(0, 3, -1), one_block(10, later_class, 7)])
    assert (found.tensor_class.tolist(), found.tensor.tolist()) == ([3], [expected])


def test_each_record_is_searched_in_the_snapshot_before_it() -> None:
    count, snapshots = 4_000, 200
    records = make_records(count, kind=RecordKind.GPU_FAULT, start_ns=np.arange(count), address=50)
    start, end = np.array([0]), np.array([100])
    each = [
        Snapshot(
            number * count // snapshots,
            start,
            end,
            np.array([number % 6], np.int8),
            np.array([number], np.int32),
        )
        for number in range(snapshots)
    ]
    name = attribute(records, each).tensor
    assert (name == np.arange(count) * snapshots // count).all()


def test_copies_belong_to_no_tensor() -> None:
    snapshot = Snapshot(
        0, np.array([0]), np.array([100]), np.array([1], np.int8), np.array([0], np.int32)
    )
    records = records_of([(5, 1, 2, 0, 8, 0, 0), (0, 1, 2, 0, 8, 0, 1)])
    found = attribute(records, [snapshot])
    assert found.tensor_class.tolist() == [-1, 1]
    assert found.tensor.tolist() == [-1, 0]
    assert attribute(records, []).tensor_class.tolist() == [-1, -1]
