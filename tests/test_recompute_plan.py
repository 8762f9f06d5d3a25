"""Plans in which blocks run forward again in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from umem.core.errors import PlanError
from umem.hardware import Hardware, load_hardware
from umem.streaming.plan import (
    NoShorterStepError,
    StreamUnit,
    TrainingPlan,
    plan_training,
    plan_with_recomputation,
    with_recomputed,
    without_checkpoints,
)

MIB = 2**20
MS = 1e-3
COUNT, SAVED, WEIGHTS = 16, 200 * MIB, 100 * MIB


def blocks(**changes: Any) -> list[StreamUnit]:
    """Blocks of a training, which takes 48 ms. Each saves what takes 5 ms to copy one way."""
    found = []
    for number in range(COUNT):
        peak_bytes = WEIGHTS + (number + 1) * SAVED
        figures: dict[str, Any] = {
            "state_bytes": 20 * MIB,
            "update_s": 0.05 * MS,
            "forward_s": 1 * MS,
            "backward_s": 2 * MS,
            "saved_bytes": SAVED,
            "forward_peak_bytes": peak_bytes,
            "backward_peak_bytes": peak_bytes + 10 * MIB,
        } | changes
        found.append(StreamUnit(f"block {number}", **figures))
    return found


def freed(units: Sequence[StreamUnit], share: float = 0.9) -> dict[str, int]:
    return {unit.name: int(share * SAVED) for unit in units}


def planned(units: Sequence[StreamUnit], budget_mib: int, hardware: Hardware) -> TrainingPlan:
    plan = partial(plan_training, weights=None, budget_bytes=budget_mib * MIB, hardware=hardware)
    return plan_with_recomputation(units, freed(units), hardware, plan)


def test_peaks_and_times_of_a_block_that_runs_again() -> None:
    units = blocks()
    changed = with_recomputed(units, freed(units), {"block 3", "block 5"})
    own = int(0.9 * SAVED)
    for number, (before, after) in enumerate(zip(units, changed, strict=True)):
        is_chosen = number in (3, 5)
        gone = own * ((number > 3) + (number > 5))
        assert after.forward_peak_bytes == before.forward_peak_bytes - gone
        assert after.backward_peak_bytes == before.backward_peak_bytes - gone
        assert after.backward_s == pytest.approx(before.backward_s + is_chosen * before.forward_s)
        assert after.saved_bytes == SAVED - is_chosen * own


def test_nothing_runs_again_where_all_fits(machine: Hardware) -> None:
    assert planned(blocks(), 8_000, machine).recomputed == frozenset()


def test_blocks_run_again_where_copies_would_take_longer(machine: Hardware) -> None:
    units = blocks()
    budget_mib = 1_600
    plain = plan_training(units, None, budget_bytes=budget_mib * MIB, hardware=machine)
    best = planned(units, budget_mib, machine)
    assert best.recomputed
    assert best.device_bytes <= budget_mib * MIB
    assert best.stream.predicted.step_s < 0.9 * plain.stream.predicted.step_s


def test_an_eighth_runs_again_where_that_is_best() -> None:
    """A quarter would take a block's forward pass longer for each block too many."""
    units, hardware = blocks(), load_hardware("h200")
    plan = partial(plan_training, weights=None, budget_bytes=2_540 * MIB, hardware=hardware)
    best = plan_with_recomputation(units, freed(units), hardware, plan)
    assert len(best.recomputed) == COUNT // 8
    quarter = with_recomputed(units, freed(units), {it.name for it in units[: COUNT // 4]})
    assert best.step_s < 0.99 * plan(quarter).step_s
    assert best.step_s < 0.97 * plan(units).step_s


def test_copies_that_hide_are_not_replaced(machine: Hardware) -> None:
    best = planned(blocks(forward_s=20 * MS, backward_s=40 * MS), 1_600, machine)
    assert best.recomputed == frozenset()
    assert best.stream.copied


def test_copies_that_seem_to_hide_beside_slowed_passes_are_replaced(machine: Hardware) -> None:
    """All of them, but where that would take far longer, or nothing is copied."""

    def recomputed(budget_mib: int, more_mib: int = 0, **changes: Any) -> int:
        units = blocks(**changes)
        options: dict[str, Any] = {"budget_bytes": budget_mib * MIB, "hardware": machine}
        plan = partial(plan_training, weights=None, **options)
        more_bytes = {it.name: more_mib * MIB for it in units}
        found = plan_with_recomputation(
            units, freed(units), machine, plan, more_bytes=more_bytes, are_slowed=True
        )
        assert found.device_bytes <= budget_mib * MIB
        return len(found.recomputed)

    slowed: Any = {"forward_s": 20 * MS, "backward_s": 40 * MS}
    assert recomputed(1_600, **slowed) == COUNT - 1
    assert recomputed(1_600, more_mib=2_000, **slowed) == 0  # second passes have no room
    assert recomputed(8_000, **slowed) == 0
    assert recomputed(1_600, forward_s=40 * MS, backward_s=40 * MS) == COUNT - 1
    assert recomputed(1_600, forward_s=80 * MS, backward_s=40 * MS) == 0


def test_blocks_run_again_where_no_other_plan_fits(machine: Hardware) -> None:
    units = blocks(saved_bytes=0)
    with pytest.raises(PlanError):
        plan_training(units, None, budget_bytes=1_600 * MIB, hardware=machine)
    assert planned(units, 1_600, machine).recomputed


def test_the_error_is_that_of_a_plan_without(machine: Hardware) -> None:
    with pytest.raises(PlanError, match="takes at least"):
        planned(blocks(), 100, machine)


def test_a_block_that_frees_little_for_its_time_is_not_tried(machine: Hardware) -> None:
    units, tried = blocks(), []

    def plan(
        some: Sequence[StreamUnit], *, is_trial: bool = False, longest_s: float = math.inf
    ) -> TrainingPlan:
        tried.append(is_trial)
        return plan_training(some, None, budget_bytes=1_600 * MIB, hardware=machine)

    # 10 MiB four times over the link take 0.7 ms, and a forward pass takes 1 ms.
    little = dict.fromkeys(freed(units), 10 * MIB)
    assert not plan_with_recomputation(units, little, machine, plan).recomputed
    assert tried == [False]
    assert plan_with_recomputation(units, freed(units), machine, plan).recomputed
    assert tried[1:] == [False, *[True] * 9, False]


def test_the_most_memory_for_the_least_time_runs_again_first(machine: Hardware) -> None:
    units = blocks()
    slow = [
        StreamUnit(**{**vars(unit), "forward_s": 3 * MS}) if number % 2 else unit
        for number, unit in enumerate(units)
    ]
    best = planned(slow, 1_800, machine)
    assert best.recomputed
    assert all(int(name.split()[1]) % 2 == 0 for name in best.recomputed)


@pytest.mark.parametrize("may_overflow", [False, True])
def test_a_trial_ends_where_no_step_is_short_enough(machine: Hardware, may_overflow: bool) -> None:
    options: dict[str, Any] = {"budget_bytes": 1_600 * MIB, "hardware": machine}
    options["may_overflow"] = may_overflow
    plan = plan_training(blocks(), None, **options)
    longest_s = plan.step_s * (1 + 1e-9)
    assert plan_training(blocks(), None, longest_s=longest_s, **options) == plan
    with pytest.raises(NoShorterStepError):
        plan_training(blocks(), None, longest_s=plan.stream.predicted.compute_s / 2, **options)
    # No bound says it, and all choices are simulated.
    with pytest.raises(NoShorterStepError):
        plan_training(blocks(), None, longest_s=plan.step_s * (1 - 1e-9), **options)


def in_checkpoints() -> list[StreamUnit]:
    """Blocks as of :func:`blocks`, each in a checkpoint of the program, which keeps its input."""
    most_bytes = WEIGHTS + SAVED
    return blocks(
        backward_s=3 * MS,
        saved_bytes=10 * MIB,
        forward_peak_bytes=most_bytes,
        backward_peak_bytes=most_bytes,
    )


def planned_without(budget_mib: int, hardware: Hardware) -> TrainingPlan:
    units = in_checkpoints()
    plan = partial(plan_training, weights=None, budget_bytes=budget_mib * MIB, hardware=hardware)
    return plan_with_recomputation(units, {}, hardware, plan, freed(units))


def test_peaks_and_times_of_a_block_without_its_checkpoint() -> None:
    units = in_checkpoints()
    changed = without_checkpoints(units, freed(units), {"block 3", "block 15"})
    own = int(0.9 * SAVED)
    for number, (before, after) in enumerate(zip(units, changed, strict=True)):
        is_chosen = number in (3, 15)
        kept, mine = own * (number > 3), own * is_chosen
        at_loss = own * (number == 15)
        assert after.forward_peak_bytes == before.forward_peak_bytes + kept + mine
        assert after.backward_peak_bytes == before.backward_peak_bytes + kept + at_loss
        assert after.backward_s == pytest.approx(before.backward_s - is_chosen * before.forward_s)
        assert after.saved_bytes == before.saved_bytes + mine


def test_all_checkpoints_are_left_out_where_there_is_room(machine: Hardware) -> None:
    best = planned_without(8_000, machine)
    assert best.left_out == {unit.name for unit in in_checkpoints()}
    assert best.step_s == pytest.approx(48 * MS, rel=0.05)


def test_some_are_left_out_where_there_is_less(machine: Hardware) -> None:
    best, every = planned_without(2_400, machine), planned_without(8_000, machine)
    assert 0 < len(best.left_out) < len(every.left_out)
    assert every.step_s < best.step_s < COUNT * 4 * MS
    assert best.device_bytes <= 2_400 * MIB


def test_none_is_left_out_without_room(machine: Hardware) -> None:
    assert not planned_without(500, machine).left_out


def test_early_blocks_run_again_where_second_passes_of_late_ones_have_no_room(
    machine: Hardware,
) -> None:
    units = blocks()
    late = {unit.name for unit in units[11:]}
    free = {name: size // (1 + (name not in late)) for name, size in freed(units).items()}
    more = dict.fromkeys(late, 4_000 * MIB)
    changed = with_recomputed(units, free, late, more)
    before = sum(free[unit.name] for unit in units[11:13])
    assert changed[13].backward_peak_bytes == units[13].backward_peak_bytes - before + 4_000 * MIB
    assert changed[13].forward_peak_bytes == units[13].forward_peak_bytes - before
    plan = partial(plan_training, weights=None, budget_bytes=1_600 * MIB, hardware=machine)
    best = plan_with_recomputation(units, free, machine, plan, more_bytes=more)
    assert best.recomputed
    assert not best.recomputed & late
