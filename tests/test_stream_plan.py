"""Streamed optimizer state: hand-computed steps, properties of every step, and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.hardware import Hardware, load_hardware
from umem.planning.stream_plan import StreamPlan, plan_stream
from umem.planning.stream_timing import StreamUnit, simulate_stream

MIB = 2**20
MS = 1e-3
RATE = 40e3 * MIB
"""Of a copy either way alone: 40 MiB a millisecond."""


@pytest.fixture(scope="module")
def two_way(machine: Hardware) -> Hardware:
    """A link that carries both directions at once at full speed."""
    return replace(machine, copy_link_bytes_per_s=2 * RATE)


def unit(size_mib: float = 40, update_ms: float = 0.5, forward_ms: float = 0.25) -> StreamUnit:
    return StreamUnit("block", int(size_mib * MIB), update_ms * MS, forward_ms * MS, 0.0)


def saving(saved_mib: float, before_mib: float, **changes: Any) -> StreamUnit:
    """A unit without state, whose passes take 1 and 2 ms.

    It saves activations; units before it have saved others.
    """
    peak_bytes = int((before_mib + saved_mib) * MIB)
    plain = StreamUnit(
        "block", 0, 0.0, 1 * MS, 2 * MS, int(saved_mib * MIB), peak_bytes, peak_bytes
    )
    return replace(plain, **changes)


def milliseconds(values: Sequence[float]) -> Any:
    return pytest.approx([value * MS for value in values], rel=1e-12)


# ---------------------------------------------------------------------------------- by hand


def test_resident_state_costs_nothing(machine: Hardware) -> None:
    timing = simulate_stream([unit()] * 3, range(3), 0, hardware=machine, other_s=10 * MS)
    assert [timing.step_s, timing.compute_s] == milliseconds([12.25, 12.25])
    assert (timing.exposed_s, timing.slowed_s) == (0, 0)
    assert (timing.to_device_bytes, timing.to_host_bytes, timing.to_device_busy) == ({}, {}, 0)
    assert list(timing.update_end_s) == milliseconds([0.5, 1, 1.5])


def test_the_third_of_three_units_waits_for_the_first_slot(two_way: Hardware) -> None:
    """In two slots, with copies of 1 ms.

    The third unit's copy waits until the first is written back at 1.5, and ends at 2.5. Its update
    ends at 3. The forward pass is through with the first two units by then, since 1.5.
    """
    timing = simulate_stream([unit()] * 3, (), 2, hardware=two_way, other_s=10 * MS)
    assert list(timing.update_end_s) == milliseconds([0.5, 1, 3])
    assert [timing.step_s, timing.compute_s] == milliseconds([3.25 + 10, 12.25])
    assert [timing.exposed_s, timing.slowed_s] == milliseconds([1, 0])
    assert timing.to_device_bytes == {TensorClass.OPTIMIZER_STATE: 120 * MIB}
    assert timing.to_host_bytes == timing.to_device_bytes
    assert timing.to_device_busy == timing.to_host_busy == pytest.approx(3 / 13.25, rel=1e-12)
    assert timing.home_s == pytest.approx(4 * MS, rel=1e-12)


def test_a_step_that_waits_does_so_for_all_updates(two_way: Hardware) -> None:
    timing = simulate_stream(
        [unit()] * 3, (), 2, hardware=two_way, other_s=10 * MS, is_deferred=False
    )
    assert list(timing.update_end_s) == milliseconds([0.5, 1, 3])
    assert [timing.step_s, timing.exposed_s, timing.home_s] == milliseconds([13.75, 1.5, 4])


def test_an_update_interrupts_the_forward_pass(two_way: Hardware) -> None:
    """The first unit's pass runs from 1 to 2, the second's until the third's update at 2.5."""
    units = [unit(forward_ms=1)] * 3
    timing = simulate_stream(units, (), 2, hardware=two_way, other_s=10 * MS)
    assert list(timing.update_end_s) == milliseconds([0.5, 1, 3])
    assert [timing.step_s, timing.exposed_s] == milliseconds([4.5 + 10, 0])


def test_both_directions_share_the_link(machine: Hardware) -> None:
    """The third unit arrives while the second leaves, each at three quarters of the speed."""
    timing = simulate_stream([unit()] * 3, (), 2, hardware=machine, other_s=10 * MS)
    arrives = 1.5 + 4 / 3
    assert list(timing.update_end_s) == milliseconds([0.5, 1, arrives + 0.5])
    assert [timing.step_s, timing.exposed_s] == milliseconds([arrives + 0.75 + 10, arrives - 1.5])


def test_copies_slow_the_computation_beside_them(two_way: Hardware) -> None:
    """The unit leaves from 1 to 2 and comes back until 3; meanwhile 4/5 of 2 ms is computed."""
    slower = replace(two_way, copy_slowdown_s_per_byte=0.25 * MS / (40 * MIB))
    units = [unit(update_ms=1, forward_ms=1)]
    timing = simulate_stream(units, (), 1, hardware=slower, other_s=10 * MS)
    assert [timing.step_s, timing.slowed_s, timing.exposed_s] == milliseconds([12.4, 0.4, 0])


def test_a_step_of_copies_takes_as_long_as_the_link(two_way: Hardware) -> None:
    units = [unit(update_ms=0, forward_ms=0)] * 4
    timing = simulate_stream(units, (), 2, hardware=two_way, other_s=0.0)
    assert [timing.step_s, timing.exposed_s, timing.home_s] == milliseconds([4, 4, 5])
    assert [timing.to_device_busy, timing.to_host_busy] == pytest.approx([1, 1], rel=1e-12)


def test_nothing_is_fetched_before_its_home_is_written(two_way: Hardware) -> None:
    """One unit leaves for 1 ms and comes back for 1 ms, however many slots are free."""
    units = [unit(update_ms=0, forward_ms=0)]
    for slots in (1, 2, 8):
        timing = simulate_stream(units, (), slots, hardware=two_way, other_s=0.0)
        assert timing.step_s == pytest.approx(2 * MS, rel=1e-12)


def test_the_first_slot_is_free_when_its_last_unit_is_home(two_way: Hardware) -> None:
    """Three units in two slots and nothing but copies: a step begins when the third has arrived.

    The third is in the slot of the first and leaves until 1. Then the first one comes until 2, the
    second until 3, beside which the first leaves, and the third until 4.
    """
    units = [unit(update_ms=0, forward_ms=0)] * 3
    timing = simulate_stream(units, (), 2, hardware=two_way, other_s=0.0)
    assert list(timing.update_end_s) == milliseconds([2, 3, 4])
    assert [timing.step_s, timing.home_s] == milliseconds([4, 5])


def test_streamed_units_need_a_slot(machine: Hardware) -> None:
    with pytest.raises(PlanError, match="0 slots for 2 streamed units"):
        simulate_stream([unit()] * 3, [1], 0, hardware=machine, other_s=0.0)


# ---------------------------------------------------------------------------------- properties

CLOSE = 1e-6
"""Steps repeat to the byte, and the smallest unit has millions of them."""
MACHINES = st.tuples(st.sampled_from([1.0, 1.5, 2.0]), st.sampled_from([0.0, 0.05, 0.3]))
"""The link's share of both directions' speed, and what a millisecond of a copy adds."""
TIMES = st.integers(0, 40).map(lambda number: number / 16)
UNITS = st.lists(
    st.builds(unit, st.sampled_from([0, 5, 20, 40, 80]), TIMES, TIMES), min_size=1, max_size=8
)
BACKWARD = st.sampled_from([0.0, 1 * MS, 5 * MS, 30 * MS])


def machine_of(machine: Hardware, figures: tuple[float, float]) -> Hardware:
    link, slowdown = figures
    return replace(
        machine, copy_link_bytes_per_s=link * RATE, copy_slowdown_s_per_byte=slowdown / RATE
    )


@given(UNITS, st.sets(st.integers(0, 7)), st.integers(1, 5), MACHINES, BACKWARD, st.booleans())
def test_every_step(
    machine: Hardware,
    units: list[StreamUnit],
    resident: set[int],
    slots: int,
    figures: tuple[float, float],
    backward_s: float,
    is_deferred: bool,
) -> None:
    hardware = machine_of(machine, figures)
    timing = simulate_stream(
        units, resident, slots, hardware=hardware, other_s=backward_s, is_deferred=is_deferred
    )
    sizes = {number: it.state_bytes for number, it in enumerate(units) if number not in resident}
    streamed = [number for number, size in sizes.items() if size]
    copied_bytes = sum(sizes.values())

    # No bytes are lost, and no time.
    assert timing.to_device_bytes == timing.to_host_bytes
    assert sum(timing.to_host_bytes.values()) == copied_bytes
    whole_s = timing.compute_s + timing.slowed_s + timing.exposed_s
    assert timing.step_s == pytest.approx(whole_s, rel=1e-9)
    for busy in (timing.to_device_busy, timing.to_host_busy):
        busy_s = busy * timing.step_s
        assert busy_s >= copied_bytes / RATE * (1 - CLOSE)
        if figures[0] == 2:
            assert busy_s == pytest.approx(copied_bytes / RATE, rel=CLOSE)

    # Nothing is faster than the computation, and than the link.
    bound_s = max(timing.compute_s, copied_bytes / RATE, 2 * copied_bytes / (figures[0] * RATE))
    assert timing.step_s >= bound_s * (1 - CLOSE)

    # Updates run one after the other, and none before its data arrived.
    assert np.all(
        np.diff(timing.update_end_s, prepend=0)
        >= np.array([it.update_s for it in units]) * (1 - CLOSE)
    )
    behind_bytes = 0
    for number in streamed[slots:]:
        behind_bytes += sizes[number]
        arrival_s = behind_bytes / RATE
        assert timing.update_end_s[number] >= (arrival_s + units[number].update_s) * (1 - CLOSE)
    # The state is at home a copy after the last streamed update, or later.
    if streamed:
        last = streamed[-1]
        home_s = timing.update_end_s[last] + sizes[last] / RATE
        assert timing.home_s >= home_s * (1 - CLOSE)


@given(UNITS, st.sets(st.integers(0, 7)), st.integers(1, 5), MACHINES, BACKWARD)
def test_a_deferred_step_is_never_slower(
    machine: Hardware,
    units: list[StreamUnit],
    resident: set[int],
    slots: int,
    figures: tuple[float, float],
    backward_s: float,
) -> None:
    hardware = machine_of(machine, figures)
    deferred, waiting = (
        simulate_stream(
            units,
            resident,
            slots,
            hardware=hardware,
            other_s=backward_s,
            is_deferred=is_deferred,
        ).step_s
        for is_deferred in (True, False)
    )
    # A link that both directions share may serve the less urgent one first.
    copy_s = 0.0 if figures[0] == 2 else 2 * 80 * MIB / (figures[0] * RATE)
    assert deferred <= waiting * (1 + CLOSE) + copy_s


# ---------------------------------------------------------------------------------- plans


def planned(
    machine: Hardware, units: Sequence[StreamUnit], spare_mib: float, **kwargs: Any
) -> StreamPlan:
    settings: dict[str, Any] = {"other_s": 10 * MS} | kwargs
    return plan_stream(units, budget_bytes=int(spare_mib * MIB), hardware=machine, **settings)


def test_what_fits_is_resident(machine: Hardware) -> None:
    plan = planned(machine, [unit(40)] * 4, 160)
    assert plan.resident == {0, 1, 2, 3}
    assert (plan.slots, plan.slot_bytes) == (0, 0)
    assert plan.predicted.exposed_s == 0
    assert planned(machine, [], 0).resident == frozenset()


def test_units_without_state_need_no_memory(machine: Hardware) -> None:
    plan = planned(machine, [unit(0), unit(40), unit(40), unit(40), unit(0)], 80)
    assert plan.resident == {0, 4}
    assert (plan.slots, plan.slot_bytes) == (2, 40 * MIB)


@pytest.mark.parametrize("spare_mib", [90, 130, 170, 250, 330])
def test_resident_state_and_slots_fit_the_memory(machine: Hardware, spare_mib: int) -> None:
    units = [unit(30), *[unit(40)] * 6, unit(44), unit(40), unit(40)]
    plan = planned(machine, units, spare_mib)
    streamed = [units[it].state_bytes for it in range(len(units)) if it not in plan.resident]
    resident_bytes = sum(units[it].state_bytes for it in plan.resident)
    assert plan.slots >= 2
    assert plan.slot_bytes == max(streamed)
    assert resident_bytes + plan.slots * plan.slot_bytes <= spare_mib * MIB
    assert plan.predicted == simulate_stream(
        units, plan.resident, plan.slots, hardware=machine, other_s=10 * MS
    )


def test_no_other_number_of_resident_units_and_slots_is_faster(two_way: Hardware) -> None:
    units = [unit(40, update_ms=0.1, forward_ms=0.2)] * 12
    plan = planned(two_way, units, 8 * 40)
    for slots in range(2, 9):
        for first in range(len(units) - (8 - slots) + 1):
            resident = range(first, first + 8 - slots)
            other = simulate_stream(units, resident, slots, hardware=two_way, other_s=10 * MS)
            assert plan.predicted.step_s <= other.step_s * (1 + 1e-9), (slots, first)


def test_the_first_units_are_streamed_so_that_the_link_starts_at_once(two_way: Hardware) -> None:
    """Else the updates of all resident units would come before a slot is free."""
    units = [unit(40, update_ms=0.25, forward_ms=0.1)] * 20
    plan = planned(two_way, units, 8 * 40)
    assert plan.resident == set(range(2, 2 + 8 - plan.slots))
    prefix = simulate_stream(
        units, range(8 - plan.slots), plan.slots, hardware=two_way, other_s=10 * MS
    )
    assert prefix.exposed_s > plan.predicted.exposed_s


@pytest.mark.parametrize("large_mib", [52, 160])
def test_a_large_unit_stays_where_smaller_slots_pay_for_it(
    machine: Hardware, large_mib: int
) -> None:
    units = [unit(large_mib), *[unit(40)] * 12]
    plan = planned(machine, units, 320)
    assert 0 in plan.resident
    assert plan.slot_bytes == 40 * MIB


def test_memory_that_gains_nothing_is_left_free(two_way: Hardware) -> None:
    """Behind a long forward pass everything hides: two slots are enough."""
    units = [unit(40, update_ms=0, forward_ms=10)] * 10
    plan = planned(two_way, units, 9 * 40, other_s=100 * MS)
    assert (plan.resident, plan.slots) == (frozenset(), 2)
    assert plan.predicted.exposed_s == 0


def test_too_little_memory_is_an_error_with_the_bytes_and_the_remedy(machine: Hardware) -> None:
    units = [*[unit(40)] * 4, replace(unit(160), name="head")]
    with pytest.raises(PlanError, match=rf"{240 * MIB} bytes.*'head'") as error:
        planned(machine, units, 239)
    assert "device_budget by 1 MiB" in str(error.value)
    assert planned(machine, units, 240).resident == {4}
    with pytest.raises(PlanError, match="device_budget by 81 MiB"):
        planned(machine, [unit(40)] * 3, -1)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(TIMES, TIMES), min_size=3, max_size=16), MACHINES, BACKWARD, st.booleans()
)
def test_more_memory_is_never_slower(
    machine: Hardware,
    times: list[tuple[float, float]],
    figures: tuple[float, float],
    backward_s: float,
    is_deferred: bool,
) -> None:
    hardware = machine_of(machine, figures)
    units = [unit(40, *each) for each in times]
    steps_s = [
        planned(
            hardware, units, spare * 40, other_s=backward_s, is_deferred=is_deferred
        ).predicted.step_s
        for spare in range(2, len(units) + 1)
    ]
    assert np.all(np.diff(steps_s) <= 1e-9 * steps_s[0])
    assert steps_s[-1] == pytest.approx(sum(sum(each) for each in times) * MS + backward_s)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(unit, st.sampled_from([20, 28, 40, 80]), TIMES, TIMES), min_size=3, max_size=12
    ),
    MACHINES,
    BACKWARD,
)
def test_more_memory_with_units_of_all_sizes_costs_at_most_one_copy(
    machine: Hardware, units: list[StreamUnit], figures: tuple[float, float], backward_s: float
) -> None:
    """It may hold a large unit in the place of small ones, and the rest of it nothing."""
    hardware = machine_of(machine, figures)
    copy_s = 2 * 80 * MIB / (figures[0] * RATE)
    fastest_s = float("inf")
    for spare in range(160, sum(it.state_bytes // MIB for it in units) + 1, 20):
        step_s = planned(hardware, units, spare, other_s=backward_s).predicted.step_s
        assert step_s <= fastest_s + copy_s
        fastest_s = min(fastest_s, step_s)


# ---------------------------------------------------------------------------------- measured


def llama_2_7b(hardware: Hardware) -> list[StreamUnit]:
    """In fp32 on one H100, 4 x 2,048 tokens with checkpointing: 34 units with 54 GB of state.

    The passes are measured, and divided by arithmetic. The update is a measured one (fused AdamW on
    64 M parameters: 0.58 ms on an H200), at this card's bandwidth of device memory.
    """
    width, inner, vocabulary = 4096, 11008, 32000
    layer = 4 * width**2 + 3 * width * inner + 2 * width
    parameters = [vocabulary * width, *[layer] * 32, vocabulary * width + width]
    update_s = 0.58e-3 / 64e6 * load_hardware("h200-pcie").memory_bytes_per_s
    forward_work = sum(parameters[1:])
    return [
        StreamUnit(
            name=f"unit {number}",
            state_bytes=8 * count,
            update_s=update_s * count / hardware.memory_bytes_per_s,
            # The embedding is a look-up.
            forward_s=0.27 * count / forward_work if number else 0.0,
            backward_s=0.80 * count / forward_work if number else 0.0,
        )
        for number, count in enumerate(parameters)
    ]


def test_measured_steps_are_predicted_within_a_twentieth() -> None:
    """A prototype with 9 resident units and 6 slots, and umem itself with 16 GiB for both.

    Clipping, which was part of the measured steps, reads the gradients twice and writes them once.
    """
    hardware = load_hardware("h100-pcie")
    units = llama_2_7b(hardware)
    clipping_s = 12 / 8 * sum(it.state_bytes for it in units) / hardware.memory_bytes_per_s
    timing = simulate_stream(units, range(9), 6, hardware=hardware, other_s=clipping_s)
    assert timing.step_s == pytest.approx(1.545, rel=0.05)
    # Measured with a step that returned when all state was home.
    assert timing.home_s + 1.07 + clipping_s == pytest.approx(1.893, rel=0.05)
    plan = plan_stream(units, budget_bytes=16 * 2**30, hardware=hardware, other_s=clipping_s)
    assert plan.predicted.step_s == pytest.approx(1.61, rel=0.05)
