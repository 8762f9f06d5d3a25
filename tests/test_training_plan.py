"""Streamed weights in a training: hand-computed steps, and plans of weights with all else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.hardware import Hardware
from umem.streaming.plan import (
    StreamPlan,
    StreamProblem,
    StreamUnit,
    TrainingPlan,
    WeightUnit,
    plan_stream,
    plan_training,
    plan_weights,
    simulate_stream,
    with_weights,
)

MIB = 2**20
MS = 1e-3
RATE = 40e3 * MIB
"""Of a copy either way alone: 40 MiB a millisecond."""
CLOSE = 1e-6


def fastest(units: Sequence[StreamUnit], **settings: Any) -> StreamPlan:
    return plan_stream(StreamProblem(units, **settings))


@pytest.fixture(scope="module")
def two_way(machine: Hardware) -> Hardware:
    """A link that carries both directions at once at full speed."""
    return replace(machine, copy_link_bytes_per_s=2 * RATE, mapped_bytes_per_s=2 * RATE)


def block(weight_mib: int, **changes: Any) -> StreamUnit:
    """A unit with weights at home, whose passes take 1 and 2 ms."""
    plain = StreamUnit("block", 0, 0.0, 1 * MS, 2 * MS, weight_bytes=weight_mib * MIB)
    return replace(plain, **changes)


def milliseconds(values: Sequence[float]) -> Any:
    return pytest.approx([value * MS for value in values], rel=1e-12)


# ---------------------------------------------------------------------------------- steps by hand


def test_one_buffer_is_filled_while_nothing_computes(two_way: Hardware) -> None:
    """Of three units, whose weights take 1 ms.

    The first forward pass finds its weights there, as the backward pass has left them. The others
    end at 3 and 5. Backward passes end at 7, 10 and 13.
    """
    timing = simulate_stream([block(40)] * 3, (), 0, hardware=two_way, weight_slots=1)
    assert [timing.step_s, timing.exposed_s] == milliseconds([13, 4])
    assert timing.to_device_bytes == {TensorClass.WEIGHTS: 4 * 40 * MIB}
    assert timing.to_host_bytes == {}


def test_two_buffers_are_filled_by_turns(two_way: Hardware) -> None:
    """Of four units, whose weights take 2 ms.

    Two are there when the forward pass begins. The others come from 1 to 3 and from 3 to 5, so that
    the forward pass ends at 6, and that of the third unit at 4. The last two are there for the
    backward pass, and the first two come from 8 to 10, and from 10 to 12.
    """
    units = [block(80)] * 4
    timing = simulate_stream(units, (), 0, hardware=two_way, weight_slots=2)
    assert [timing.step_s, timing.exposed_s] == milliseconds([14, 2])
    assert timing.to_device_bytes == {TensorClass.WEIGHTS: 4 * 80 * MIB}
    # With one more buffer in the forward pass, only the last unit's weights come there, until 3.
    timing = simulate_stream(units, (), 0, hardware=two_way, weight_slots=2, weights_ahead=1)
    assert [timing.step_s, timing.exposed_s] == milliseconds([12, 0])
    assert timing.to_device_bytes == {TensorClass.WEIGHTS: 3 * 80 * MIB}
    # With as many buffers as units, nothing comes any more.
    timing = simulate_stream(units, (), 0, hardware=two_way, weight_slots=4)
    assert [timing.step_s, timing.exposed_s] == milliseconds([12, 0])
    assert timing.to_device_bytes == {}


def test_frozen_weights_are_there_at_the_turns_of_every_batch(two_way: Hardware) -> None:
    """Two of four at each of the four turns of two batches; the others come for each pass."""
    timing = simulate_stream([block(40)] * 4, (), 0, hardware=two_way, weight_slots=2, batches=2)
    assert [timing.step_s, timing.exposed_s] == milliseconds([24, 0])
    assert timing.to_device_bytes == {TensorClass.WEIGHTS: 4 * 2 * 40 * MIB}


def test_trained_weights_come_behind_their_update(two_way: Hardware) -> None:
    """Two units' weights come for their updates, each in 1 ms, and go home with their state, in 2.

    The updates are at 1 and 2, and both are home at 3 and 5. For the forward pass weights come from
    3 to 4 and from 5 to 6. The passes are from 4 to 5 and from 6 to 11: the backward pass finds
    both there.
    """
    state: dict[str, Any] = {"state_bytes": 40 * MIB}
    trained = [block(40, trained_weight_bytes=40 * MIB, **state)] * 2
    timing = simulate_stream(trained, (), 2, hardware=two_way, weight_slots=2)
    assert timing.step_s == pytest.approx(11 * MS)
    assert list(timing.update_end_s) == milliseconds([1, 2])
    assert timing.to_device_bytes[TensorClass.WEIGHTS] == 2 * 2 * 40 * MIB
    assert timing.to_host_bytes[TensorClass.WEIGHTS] == 2 * 40 * MIB
    # Of twice the size, they come at 2 and 4, are home at 5 and 8, and for the passes at 7 and 10.
    large = [block(80, trained_weight_bytes=80 * MIB, **state)] * 2
    timing = simulate_stream(large, (), 2, hardware=two_way, weight_slots=2)
    assert [timing.step_s, timing.exposed_s] == milliseconds([15, 9])
    assert list(timing.update_end_s) == milliseconds([2, 4])
    # In place, updates take 1 ms of the device besides.
    slower = replace(two_way, mapped_bytes_per_s=4 * RATE)
    timing = simulate_stream(large, (), 2, hardware=slower, weight_slots=2, stages_operands=False)
    assert timing.step_s == pytest.approx(16 * MS)
    assert list(timing.update_end_s) == milliseconds([3, 5])
    assert timing.to_device_bytes[TensorClass.WEIGHTS] == 2 * 80 * MIB
    # Frozen ones are there at both turns.
    frozen = [block(80, **state)] * 2
    timing = simulate_stream(frozen, (), 2, hardware=slower, weight_slots=2)
    assert timing.step_s == pytest.approx(6 * MS)
    assert TensorClass.WEIGHTS not in timing.to_device_bytes


def test_weights_that_are_not_staged_are_updated_in_place(two_way: Hardware) -> None:
    units = [block(0, trained_weight_bytes=40 * MIB), block(0)]
    timing = simulate_stream(units, (), 0, hardware=two_way)
    assert [timing.step_s, timing.exposed_s] == milliseconds([6 + 1, 0])
    assert timing.to_device_bytes == {}


def test_staged_weights_need_a_buffer(two_way: Hardware) -> None:
    with pytest.raises(PlanError, match="weights of 3 units"):
        simulate_stream([block(40)] * 3, (), 0, hardware=two_way)


# ---------------------------------------------------------------------------------- plans


def training(
    weights: Sequence[tuple[Sequence[int], bool]], state_mib: int = 0, saved_mib: int = 0
) -> tuple[list[StreamUnit], dict[str, WeightUnit]]:
    """Units over weights, MiB of each part; those that are not frozen have gradients, and state."""
    units, parts = [], {}
    trained = [sum(sizes) if is_trained else 0 for sizes, is_trained in weights]
    for number, (sizes, is_trained) in enumerate(weights):
        gradients = sum(trained[number:]) * MIB
        saved = (number + 1) * saved_mib * MIB
        units.append(
            StreamUnit(
                f"layers.{number}",
                state_mib * MIB if is_trained else 0,
                0.2 * MS if is_trained else 0.0,
                1 * MS,
                2 * MS,
                saved_mib * MIB,
                gradients + saved,
                gradients + saved,
                gradient_bytes=trained[number] * MIB,
            )
        )
        every = frozenset(range(len(sizes)))
        parts[f"layers.{number}"] = WeightUnit(
            tuple(size * MIB for size in sizes), trained=every if is_trained else frozenset()
        )
    return units, parts


def options_of(units: Sequence[StreamUnit], **changes: Any) -> dict[str, Any]:
    gradients = sum(unit.gradient_bytes for unit in units)
    options = {"other_s": 1 * MS, "step_peak_bytes": gradients, "holds_gradients": True}
    return options | changes


def bytes_of(weights: Mapping[str, WeightUnit]) -> int:
    return sum(sum(unit.part_bytes) for unit in weights.values())


WEIGHTS = st.lists(
    st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.booleans()),
    min_size=4,
    max_size=8,
)
TRAININGS = st.builds(training, WEIGHTS, st.sampled_from([0, 20, 60]), st.sampled_from([0, 10]))


@settings(max_examples=25, deadline=None)
@given(TRAININGS, st.integers(1, 3))
def test_what_fits_is_planned_as_without_weights(
    machine: Hardware, made: tuple[list[StreamUnit], dict[str, WeightUnit]], batches: int
) -> None:
    units, weights = made
    options = options_of(units, batches=batches, hardware=machine)
    all_bytes, ample_bytes = bytes_of(weights), 2**31
    plan = plan_training(
        units, weights, budget_bytes=ample_bytes + all_bytes + 7, fixed_bytes=7, **options
    )
    expected = fastest(units, budget_bytes=ample_bytes, **options)
    assert plan.stream == expected
    assert plan.weights == plan_weights(list(weights.values()), all_bytes, 2)
    assert plan.weights.resident_bytes == all_bytes
    assert (plan.units, plan.extra) == (tuple(units), {})
    assert plan.device_bytes == expected.peak_bytes + all_bytes + 7
    # With weights that nobody may move it is the same.
    left = plan_training(units, None, budget_bytes=ample_bytes, **options)
    assert (left.stream, left.weights) == (expected, None)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_shares_of_weights_and_state_may_be_resident(machine: Hardware, share: float) -> None:
    units, weights = training([([20, 12], True)] * 8, 60, 10)
    options = options_of(units, hardware=machine)
    all_bytes, budget_bytes = bytes_of(weights), 2**31
    plan = plan_training(
        units,
        weights,
        budget_bytes=budget_bytes,
        fixed_bytes=7 * MIB,
        weight_share=share,
        state_share=share,
        **options,
    )
    check_plan(plan, weights, budget_bytes - 7 * MIB)
    assert plan.weights is not None
    # Weights that always stay count, and may be more than the share.
    resident_bytes = plan.weights.resident_bytes + 7 * MIB
    assert resident_bytes <= max(share * (all_bytes + 7 * MIB), 7 * MIB)
    assert plan.weights.streamed_bytes == all_bytes - plan.weights.resident_bytes
    assert len(plan.stream.resident) <= share * 8


@pytest.mark.parametrize("most_mib", [200, 400, 600])
def test_weights_and_state_take_no_more_than_they_may(machine: Hardware, most_mib: int) -> None:
    units, weights = training([([20, 12], True)] * 8, 60, 10)
    plan = plan_training(
        units,
        weights,
        budget_bytes=2**31,
        fixed_bytes=7 * MIB,
        most_placed_bytes=most_mib * MIB,
        **options_of(units, hardware=machine),
    )
    placed, stream = plan.weights, plan.stream
    assert placed is not None
    state_bytes = sum(plan.units[it].state_bytes for it in stream.resident)
    state_bytes += stream.slots * stream.slot_bytes
    # No further buffers either: they would be there while others need the memory.
    assert not plan.extra
    assert 7 * MIB + placed.device_bytes + state_bytes <= most_mib * MIB
    assert placed.device_bytes + state_bytes > (most_mib - 7 - 60) * MIB


def check_plan(plan: TrainingPlan, weights: Mapping[str, WeightUnit], budget_bytes: int) -> None:
    """What holds for every plan."""
    placed, stream = plan.weights, plan.stream
    assert placed is not None
    assert stream.peak_bytes + placed.device_bytes <= plan.device_bytes <= budget_bytes
    bare = [replace(unit, weight_bytes=0, trained_weight_bytes=0) for unit in plan.units]
    assert plan.units == with_weights(bare, weights, placed)
    assert sum(unit.weight_bytes for unit in plan.units) == placed.streamed_bytes
    # Further buffers have room at each unit's fullest moment.
    state_bytes = sum(plan.units[number].state_bytes for number in stream.resident)
    placed_bytes = placed.device_bytes + state_bytes + stream.slots * stream.slot_bytes
    for unit in plan.units:
        forward, backward = plan.extra.get(unit.name, (0, 0))
        for count, peak_bytes in (
            (forward, unit.forward_peak_bytes),
            (backward, unit.backward_peak_bytes),
        ):
            if count:
                assert placed_bytes + peak_bytes + count * placed.slot_bytes <= plan.device_bytes
    if plan.extra:
        staged = [unit for unit in plan.units if unit.weight_bytes]
        assert list(plan.extra) == [unit.name for unit in staged]
        assert not any(unit.trained_weight_bytes for unit in staged)
        assert plan.extra[staged[-1].name][0] == 0


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(TRAININGS, st.sampled_from([0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]))
def test_every_plan(
    machine: Hardware, made: tuple[list[StreamUnit], dict[str, WeightUnit]], share: float
) -> None:
    units, weights = made
    options = options_of(units, hardware=machine)
    all_bytes = bytes_of(weights)
    fewest = plan_weights(list(weights.values()), 0, 2)
    others_bytes = sum(it.state_bytes + it.saved_bytes + it.gradient_bytes for it in units)
    budget_bytes = int(fewest.device_bytes + share * (all_bytes + others_bytes))

    def with_fewest() -> None:
        plan_stream(
            StreamProblem(
                with_weights(units, weights, fewest),
                budget_bytes=budget_bytes - fewest.device_bytes,
                weight_slots=fewest.slots,
                **options,
            )
        )

    try:
        plan = plan_training(units, weights, budget_bytes=budget_bytes, **options)
    except PlanError:
        event("no plan")
        with pytest.raises(PlanError):
            with_fewest()
        return
    with_fewest()
    check_plan(plan, weights, budget_bytes)
    timing = plan.stream.predicted
    copied_bytes = sum(timing.to_device_bytes.values())
    bound_s = max(timing.compute_s, copied_bytes / machine.copy_to_device_bytes_per_s)
    assert timing.step_s >= bound_s * (1 - CLOSE)
    # Weights leave where they have no room, or where it makes the step faster by much.
    assert plan.weights is not None
    try:
        kept = fastest(units, budget_bytes=budget_bytes - all_bytes, **options)
    except PlanError:
        event("weights have no room")
        assert plan.weights.resident_bytes < all_bytes
        return
    if plan.weights.resident_bytes == all_bytes:
        event("weights stay")
        assert plan.stream == kept
    else:
        event("weights leave although they have room")
        assert timing.step_s <= 0.97 * kept.predicted.step_s * (1 + CLOSE)


def test_as_few_weights_leave_as_have_no_room(machine: Hardware) -> None:
    """Of 320 MiB, beside 200 MiB of all else that cannot leave."""
    units, weights = training([([10, 10, 10, 10], False)] * 8)
    units = [
        replace(it, forward_peak_bytes=200 * MIB, backward_peak_bytes=200 * MIB) for it in units
    ]
    for budget_mib in (300, 350, 400, 450, 500):
        plan = plan_training(units, weights, budget_bytes=budget_mib * MIB, hardware=machine)
        check_plan(plan, weights, budget_mib * MIB)
        assert plan.weights is not None
        # No more than a step of the search, and a part, is left free.
        assert plan.device_bytes > (budget_mib - 320 // 16 - 10) * MIB
    with pytest.raises(PlanError, match=r"^weights, .* 80 MiB of device_budget.* by 80 MiB"):
        plan_training(units, weights, budget_bytes=200 * MIB, hardware=machine)


def test_an_error_counts_weights_that_always_stay(machine: Hardware) -> None:
    units, weights = training([([10, 10, 10, 10], False)] * 8)
    options: dict[str, Any] = {"hardware": machine, "fixed_bytes": 30 * MIB}
    with pytest.raises(PlanError, match=r"^weights, .* 110 MiB of device_budget.* by 10 MiB"):
        plan_training(units, weights, budget_bytes=100 * MIB, **options)
    plan = plan_training(units, weights, budget_bytes=110 * MIB, **options)
    assert plan.device_bytes == 110 * MIB


@pytest.mark.parametrize("is_trained", [False, True])
def test_frozen_weights_stay_if_the_loss_needs_memory(machine: Hardware, is_trained: bool) -> None:
    units, weights = training([([10, 10, 10, 10], is_trained)] * 8)
    units = [
        replace(it, forward_s=0.25 * MS, forward_peak_bytes=0, backward_peak_bytes=0)
        for it in units
    ]
    loss = StreamUnit("loss", 0, 0.0, 0.0, 0.0, 0, 200 * MIB, 200 * MIB)
    plan = plan_training([*units, loss], weights, budget_bytes=360 * MIB, hardware=machine)
    check_plan(plan, weights, 360 * MIB)
    placed, stream = plan.weights, plan.stream
    assert placed is not None
    assert placed.streamed_bytes > 0
    if is_trained:
        assert (plan.extra, plan.most_extra) == ({}, 0)
        return
    forward, backward = plan.extra["layers.0"]
    assert plan.most_extra >= min(forward, backward) > 0
    # One buffer less with each block towards the turn.
    counts = [its for its, _ in plan.extra.values()]
    assert all(before <= after + 1 for before, after in pairwise(counts))
    usual = simulate_stream(
        plan.units,
        stream.resident,
        stream.slots,
        hardware=machine,
        copied=stream.left_before,
        fetch_ahead=stream.fetch_ahead,
        weight_slots=placed.slots,
    )
    kept_bytes = sum(it.weight_bytes for it in plan.units[2 : 2 + min(forward, backward)])
    copied_bytes = stream.predicted.to_device_bytes[TensorClass.WEIGHTS]
    assert copied_bytes == usual.to_device_bytes[TensorClass.WEIGHTS] - kept_bytes
    assert stream.predicted.step_s < usual.step_s


@pytest.mark.slow
def test_weights_leave_for_a_large_gain_only(two_way: Hardware) -> None:
    """Where that makes room for the state of one unit more, of 200 MiB and 5 ms in all."""
    units, weights = training([([10, 10], False), ([1], True)] * 6, state_mib=200)
    options: dict[str, Any] = {"hardware": two_way}
    all_bytes = bytes_of(weights)
    gains, streamed_bytes = [], []
    for spare_mib in (480, 540, 600, 640):
        budget_bytes = all_bytes + spare_mib * MIB
        kept = plan_stream(
            StreamProblem(units, budget_bytes=spare_mib * MIB, **options)
        ).predicted.step_s
        plan = plan_training(units, weights, budget_bytes=budget_bytes, **options)
        check_plan(plan, weights, budget_bytes)
        assert plan.weights is not None
        gains.append(1 - plan.stream.predicted.step_s / kept)
        streamed_bytes.append(plan.weights.streamed_bytes)
    # Two slots for state have room, with 80 MiB to spare, 140, or 200.
    assert [gain > 0.03 for gain in gains] == [False, True, True, False]
    assert streamed_bytes[0] == streamed_bytes[-1] == 0
    assert streamed_bytes[1] > streamed_bytes[2] > 0
