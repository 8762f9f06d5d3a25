"""Which weights stay on the device: properties of every plan, and plans by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from umem.streaming.plan import WeightPlan, WeightUnit, plan_weights, staged_bytes

KIB = 1024

SIZES = st.one_of(st.integers(1, 3000), st.integers(1, 40).map(lambda number: number * 512))
"""Of a part, in bytes. Most are no multiple of what a staging buffer aligns."""


@st.composite
def weight_units(draw: st.DrawFn) -> list[WeightUnit]:
    units = []
    for _ in range(draw(st.integers(0, 6))):
        sizes = tuple(draw(st.lists(SIZES, min_size=1, max_size=12)))
        numbers = st.sets(st.integers(0, len(sizes) - 1))
        gathered = frozenset(draw(numbers)) if draw(st.integers(0, 3)) == 0 else frozenset()
        units.append(WeightUnit(sizes, gathered, frozenset(draw(numbers))))
    return units


def all_bytes(units: Sequence[WeightUnit]) -> int:
    return sum(sum(unit.part_bytes) for unit in units)


def bytes_of(units: Sequence[WeightUnit], parts: Sequence[frozenset[int]]) -> int:
    return sum(
        unit.part_bytes[part] for unit, some in zip(units, parts, strict=True) for part in some
    )


def room_of(units: Sequence[WeightUnit], share: float) -> int:
    """Between the least that a plan needs and all weights."""
    least_bytes = plan_weights(units, 0, 2).device_bytes
    return least_bytes + int(share * (all_bytes(units) - least_bytes))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(weight_units(), st.floats(0.0, 1.1), st.integers(2, 4))
@example([WeightUnit((1, 1, 1)), WeightUnit((600,))], 0.0, 2)
def test_every_plan(units: list[WeightUnit], share: float, slots: int) -> None:
    room_bytes = int(share * all_bytes(units))
    plan = plan_weights(units, room_bytes, slots)

    # Each part is in one place, and counted there.
    for unit, streamed, in_place in zip(units, plan.streamed, plan.in_place, strict=True):
        assert not streamed & in_place
        assert streamed | in_place <= set(range(len(unit.part_bytes)))
        assert in_place <= unit.gathered
        assert not streamed & unit.gathered
        assert staged_bytes([unit.part_bytes[part] for part in streamed]) <= plan.slot_bytes
    assert bytes_of(units, plan.streamed) == plan.streamed_bytes
    assert bytes_of(units, plan.in_place) == plan.in_place_bytes
    homes_bytes = plan.streamed_bytes + plan.in_place_bytes
    assert plan.resident_bytes == all_bytes(units) - homes_bytes
    assert plan.slots == (slots if plan.streamed_bytes else 0)
    assert plan.device_bytes == plan.resident_bytes + plan.slots * plan.slot_bytes

    # It fits if any plan does, and needs no more than to leave all where they are.
    least_bytes = plan_weights(units, 0, slots).device_bytes
    assert least_bytes <= all_bytes(units)
    assert plan.device_bytes <= max(room_bytes, least_bytes)
    if room_bytes >= all_bytes(units):
        assert homes_bytes == 0
    # Nothing is streamed before all tables are read in place.
    if plan.streamed_bytes:
        assert list(plan.in_place) == [unit.gathered for unit in units]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(weight_units(), st.floats(0.0, 1.0), st.booleans())
def test_a_part_of_the_weights_may_be_resident(
    units: list[WeightUnit], share: float, experts_first: bool
) -> None:
    """Whatever room there is, if buffers have some; and all of them only if all may."""
    most_bytes = int(share * all_bytes(units))
    buffers_bytes = 2 * max((staged_bytes(unit.part_bytes) for unit in units), default=0)
    for room_bytes in (most_bytes + buffers_bytes, 2**30):
        plan = plan_weights(
            units, room_bytes, 2, experts_first=experts_first, most_resident_bytes=most_bytes
        )
        assert plan.resident_bytes <= most_bytes
        assert plan.device_bytes <= room_bytes
    if most_bytes == all_bytes(units):
        assert plan.resident_bytes == most_bytes


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(weight_units(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_room_streams_at_most_a_part_more(
    units: list[WeightUnit], share: float, other_share: float
) -> None:
    """What has to leave is less, and so is a slot; whole parts leave, and shares are rounded up."""
    low, high = sorted([share, other_share])
    less, more = (plan_weights(units, room_of(units, it), 2) for it in (low, high))
    largest_bytes = max((max(unit.part_bytes) for unit in units), default=0)
    assert more.slot_bytes <= less.slot_bytes
    assert more.in_place_bytes <= less.in_place_bytes
    assert more.streamed_bytes <= less.streamed_bytes + largest_bytes + len(units)


def layers(count: int, *parts: int) -> list[WeightUnit]:
    return [WeightUnit(parts)] * count


def streamed_sizes(units: Sequence[WeightUnit], plan: WeightPlan) -> list[int]:
    return [
        sum(unit.part_bytes[part] for part in some)
        for unit, some in zip(units, plan.streamed, strict=True)
    ]


def test_units_stream_equal_shares() -> None:
    """16 of 64 KiB have no room, and two slots take 8: 24 have to leave, 3 of each unit."""
    units = layers(8, 4 * KIB, 2 * KIB, 2 * KIB)
    plan = plan_weights(units, 48 * KIB, 2)
    assert (plan.slots, plan.slot_bytes) == (2, 4 * KIB)
    assert plan.device_bytes == 48 * KIB
    sizes = streamed_sizes(units, plan)
    assert sum(sizes) == 24 * KIB
    assert set(sizes) == {2 * KIB, 4 * KIB}


def test_a_part_larger_than_a_share_stays() -> None:
    units = [*layers(6, 4 * KIB), WeightUnit((40 * KIB,))]
    plan = plan_weights(units, 60 * KIB, 2)
    # Evenly over the others: 12 of their 24 KiB.
    assert streamed_sizes(units, plan) == [*[4 * KIB, 0] * 3, 0]
    # Two slots of its size would take more than it leaves.
    least = plan_weights(units, 0, 2)
    assert (least.slot_bytes, least.device_bytes) == (4 * KIB, 48 * KIB)
    # With more of them, slots grow.
    assert plan_weights([*units, *units[-1:] * 2], 90 * KIB, 2).slot_bytes == 40 * KIB


def test_tables_leave_first_and_the_largest_before_the_others() -> None:
    units = [
        WeightUnit((8 * KIB, 2 * KIB), gathered=frozenset([0])),
        *layers(4, 4 * KIB),
        WeightUnit((16 * KIB,), gathered=frozenset([0])),
    ]
    plan = plan_weights(units, 40 * KIB, 2)
    assert not plan.in_place[0]
    assert plan.in_place[-1] == {0}
    assert (plan.in_place_bytes, plan.streamed_bytes, plan.slots) == (16 * KIB, 0, 0)
    plan = plan_weights(units, 17 * KIB, 2)
    assert (plan.in_place_bytes, plan.streamed_bytes) == (24 * KIB, 10 * KIB)
    assert plan.device_bytes == (18 - 10 + 2 * 4) * KIB


def test_tables_of_experts_leave_first_if_asked() -> None:
    parts = tuple(it * KIB for it in (4, 4, 8, 8))
    units = [WeightUnit(parts, experts=frozenset([2, 3]))] * 4
    plan = plan_weights(units, 76 * KIB, 2)
    assert any(some & {0, 1} for some in plan.streamed)
    plan = plan_weights(units, 76 * KIB, 2, experts_first=True)
    assert plan.device_bytes <= 76 * KIB
    assert not any(some & {0, 1} for some in plan.streamed)
    # Where that is not enough, all can leave.
    assert plan_weights(units, 0, 2, experts_first=True) == plan_weights(units, 0, 2)


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_units_than_slots_stream_nothing(count: int) -> None:
    """Their buffers would take as much memory as the weights."""
    plan = plan_weights(layers(count, 4 * KIB), 0, 2)
    assert (plan.streamed_bytes, plan.device_bytes) == (0, count * 4 * KIB)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40), st.integers(0, 40)), max_size=6),
    st.floats(0.0, 1.2),
    st.floats(0.0, 1.0),
)
def test_a_cache_of_experts_takes_what_is_left(
    sizes: list[tuple[int, int, int]], room: float, most: float
) -> None:
    units = [
        WeightUnit(
            (dense * KIB, *(it * KIB for it in tables if it)), frozenset(), frozenset(), some
        )
        for dense, *tables in sizes
        for some in [frozenset(range(1, 1 + sum(map(bool, tables))))]
    ]
    room_bytes, most_bytes = (int(share * all_bytes(units)) for share in (room, most))
    plan, without = (
        plan_weights(
            units,
            room_bytes,
            2,
            experts_first=True,
            caches_experts=caches,
            most_resident_bytes=most_bytes,
        )
        for caches in (True, False)
    )
    assert without.cache_bytes == 0
    assert plan.cached_share <= 1 / 2
    if not plan.cache_bytes:
        return
    assert plan.device_bytes <= room_bytes
    assert plan.resident_bytes + plan.cache_bytes <= most_bytes
    tables = all(some <= unit.experts for some, unit in zip(plan.streamed, units, strict=True))
    assert tables, "where other weights are streamed, no room is left"
    # Whole tables have no room while more than half of the others' experts would lack it.
    free_bytes = min(room_bytes, most_bytes + 2 * plan.slot_bytes) - plan.device_bytes
    assert not free_bytes or 2 * plan.cache_bytes >= plan.streamed_bytes - 1


def test_a_cache_takes_the_place_of_whole_tables() -> None:
    """Of four tables of 16 KiB, one and two buffers have room, but less than half of all."""
    units = [WeightUnit((KIB, 16 * KIB), experts=frozenset([1]))] * 4
    room_bytes = (4 + 2 * 16 + 16) * KIB
    plan = plan_weights(units, room_bytes, 2, experts_first=True)
    assert (plan.streamed_bytes, plan.resident_bytes) == (48 * KIB, 20 * KIB)
    plan = plan_weights(units, room_bytes, 2, experts_first=True, caches_experts=True)
    assert (plan.streamed_bytes, plan.cache_bytes) == (64 * KIB, 16 * KIB)
    assert plan.cached_share == 1 / 4
    assert plan.device_bytes == room_bytes
