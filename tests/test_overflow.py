"""Budgets in which nothing has room with the usual number of copies under way."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.core.errors import PlanError
from umem.hardware import Hardware, load_hardware
from umem.streaming.plan import (
    StreamUnit,
    TrainingPlan,
    WeightUnit,
    plan_training,
    plan_with_recomputation,
)
from umem.streaming.plan.overflow import in_place_s

MIB = 2**20
MS = 1e-3


def least_bytes(units: Sequence[StreamUnit], **options: Any) -> int:
    """The least budget of a usual plan, as its error names it."""
    with pytest.raises(PlanError) as error:
        plan_training(units, None, budget_bytes=0, **options)
    (found,) = re.findall(r"\((\d+) bytes\)", str(error.value))
    return int(found)


def chain(
    layers: int, *, saved: int, state: int, transient: int = 0, head: int = 0, rest: int = 0
) -> list[StreamUnit]:
    """Units in MiB, as of a language model, of which the last is the head."""
    units = []
    for number in range(layers + 1):
        is_head = number == layers
        own = head if is_head else saved
        live = rest + saved * min(number + 1, layers) + (2 * head if is_head else transient)
        unit = StreamUnit(
            f"layers.{number}",
            state * MIB,
            0.1 * MS,
            2 * MS,
            4 * MS,
            saved_bytes=own * MIB,
            forward_peak_bytes=live * MIB,
            backward_peak_bytes=(live + transient // 2) * MIB,
            piece_bytes=(state * MIB // 4,) * 4,
            gradient_bytes=state * MIB // 2,
        )
        units.append(unit)
    return units


TRAININGS = {
    "as a GPT": chain(16, saved=100, state=120, transient=60, head=200, rest=900),
    "blocks need most": chain(16, saved=60, state=120, transient=150, rest=900),
    "the loss needs most": chain(8, saved=100, state=120, transient=60, head=500, rest=700),
    "two large blocks": chain(1, saved=600, state=1200, head=400, rest=1800),
    "as a GCN": chain(3, saved=250, state=4, transient=200, head=50, rest=50),
}


def options_of(units: Sequence[StreamUnit], *, waits: bool) -> dict[str, Any]:
    """Of a step that waits for its updates, or does not, on an H200."""
    return {
        "hardware": load_hardware("h200"),
        "is_deferred": not waits,
        "step_peak_bytes": units[0].forward_peak_bytes,
        "other_s": 1 * MS,
    }


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", TRAININGS)
def test_ten_percent_below_the_least_memory_take_at_most_twice_the_time(
    name: str, waits: bool
) -> None:
    units = TRAININGS[name]
    options = options_of(units, waits=waits)
    least = least_bytes(units, **options)
    at_least = plan_training(units, None, budget_bytes=least, **options)
    assert at_least == plan_training(units, None, budget_bytes=least, may_overflow=True, **options)
    for percent in (1, 2, 5, 10):
        budget_bytes = least * (100 - percent) // 100
        with pytest.raises(PlanError, match="raise device_budget"):
            plan_training(units, None, budget_bytes=budget_bytes, **options)
        plan = plan_training(units, None, budget_bytes=budget_bytes, may_overflow=True, **options)
        assert plan.step_s <= 2 * at_least.step_s
        assert plan.overflow_bytes <= least - budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", TRAININGS)
def test_more_memory_is_never_slower_by_more_than_predictions_are_exact_to(
    name: str, waits: bool, recomputes: bool
) -> None:
    units = TRAININGS[name]
    options = options_of(units, waits=waits)
    freed = {unit.name: int(0.9 * unit.saved_bytes) for unit in units if recomputes}
    least = least_bytes(units, **options)
    most = max(unit.backward_peak_bytes for unit in units) + sum(it.state_bytes for it in units)
    shortest_s = math.inf
    for number in range(9):
        budget_bytes = least + number * (most - least) // 8
        plan = partial(plan_training, weights=None, budget_bytes=budget_bytes, **options)
        step_s = plan_with_recomputation(units, freed, options["hardware"], plan).step_s
        assert step_s <= 1.03 * shortest_s
        shortest_s = min(shortest_s, step_s)


def used_bytes(units: Sequence[StreamUnit], plan: TrainingPlan) -> int:
    """The most of a plan without copied gradients and temporary slots, moment by moment."""
    stream, count = plan.stream, len(units)
    saved = {number: units[number].saved_bytes for number in stream.left_before}
    moments = [0]
    for number in range(count):
        away = sum(it for n, it in saved.items() if stream.left_before[n] <= number)
        moments.append(units[number].forward_peak_bytes - away)
        away = sum(it for n, it in saved.items() if n < number - stream.fetch_ahead)
        moments.append(units[number].backward_peak_bytes - away)
    state_bytes = sum(units[number].state_bytes for number in stream.resident)
    return max(moments) + state_bytes + stream.slots * stream.slot_bytes


UNITS = st.lists(
    st.builds(
        lambda state, saved, forward, backward: StreamUnit(
            "",
            state * MIB,
            0.0,
            1 * MS,
            2 * MS,
            saved * MIB,
            (forward + saved) * MIB,
            (backward + saved) * MIB,
        ),
        *[st.integers(0, 40)] * 4,
    ),
    min_size=1,
    max_size=7,
)


@given(UNITS, st.integers(0, 99))
@settings(deadline=None)
def test_a_plan_uses_the_budget_and_what_it_lacks(units: list[StreamUnit], percent: int) -> None:
    """Each unit saves its own, and what those before it have saved is there too."""
    before = 0
    for number, unit in enumerate(units):
        peaks = unit.forward_peak_bytes + before, unit.backward_peak_bytes + before
        units[number] = replace(unit, forward_peak_bytes=peaks[0], backward_peak_bytes=peaks[1])
        before += unit.saved_bytes
    hardware = load_hardware("h200")
    options: dict[str, Any] = {"hardware": hardware, "may_have_temporary": False}
    if not any(unit.state_bytes + unit.backward_peak_bytes for unit in units):
        return
    least = least_bytes(units, **options)
    budget_bytes = least * percent // 100
    plan = plan_training(units, None, budget_bytes=budget_bytes, may_overflow=True, **options)
    used = used_bytes(units, plan)
    assert used <= budget_bytes + plan.overflow_bytes
    assert used == budget_bytes + plan.overflow_bytes or not plan.overflow_bytes


def test_what_has_no_room_takes_its_time(machine: Hardware) -> None:
    """Of two units that save 40 MiB each, the second needs 100 with what the first has saved."""
    first = StreamUnit("a", 0, 0.0, 1 * MS, 2 * MS, 40 * MIB, 40 * MIB, 40 * MIB)
    second = StreamUnit("b", 0, 0.0, 1 * MS, 2 * MS, 40 * MIB, 100 * MIB, 90 * MIB)
    copies_s = 40 * MIB / machine.copy_to_host_bytes_per_s
    copies_s += 40 * MIB / machine.copy_to_device_bytes_per_s
    for budget, forward, backward in [(60, 0, 0), (50, 10, 0), (40, 20, 10)]:
        plan = plan_training(
            [first, second], None, budget_bytes=budget * MIB, hardware=machine, may_overflow=True
        )
        assert plan.overflow_bytes == max(forward, backward) * MIB
        assert plan.stream.left_before == {0: 1}
        expected_s = 6 * MS + copies_s + in_place_s((forward + backward) * MIB, machine)
        assert plan.step_s == pytest.approx(expected_s)


def test_all_weights_leave_before_anything_is_used_in_host_memory(machine: Hardware) -> None:
    weights = {str(n): WeightUnit((20 * MIB, 20 * MIB)) for n in range(6)}
    units = [StreamUnit(name, 0, 0.0, 1 * MS, 2 * MS, 0, 50 * MIB, 50 * MIB) for name in weights]
    plan = plan_training(
        units, weights, budget_bytes=100 * MIB, hardware=machine, may_overflow=True
    )
    assert plan.weights is not None
    assert plan.weights.resident_bytes == 0
    assert plan.overflow_bytes == 50 * MIB + plan.weights.device_bytes - 100 * MIB
    with pytest.raises(PlanError, match="as few as possible"):
        plan_training(units, weights, budget_bytes=100 * MIB, hardware=machine)


def test_blocks_run_twice_where_that_leaves_less_in_host_memory(machine: Hardware) -> None:
    """The copies of the first block are waited for, and both saved tensors do not fit."""
    units = [
        StreamUnit(str(n), 0, 0.0, 1 * MS, 2 * MS, 0, (n + 1) * 40 * MIB, (n + 1) * 40 * MIB)
        for n in range(3)
    ]
    plan = partial(
        plan_training, weights=None, budget_bytes=60 * MIB, hardware=machine, may_overflow=True
    )
    freed = {unit.name: 40 * MIB for unit in units}
    found = plan_with_recomputation(units, freed, machine, plan)
    assert found.recomputed
    assert found.overflow_bytes < plan(units).overflow_bytes
