"""Plans a training whole: weights, optimizer state, activations and gradients under one budget.

Weights leave last, since their copies come for both passes. How many leave is tried out: what they
leave is room for state and activations, whose best use :mod:`umem.planning.stream_plan` finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from umem.core.errors import PlanError
from umem.hardware import Hardware
from umem.planning.stream_plan import StreamPlan, plan_stream
from umem.planning.stream_timing import StreamUnit, simulate_stream
from umem.planning.weight_plan import WeightPlan, WeightUnit, plan_weights

__all__ = ["TrainingPlan", "plan_training", "with_weights"]

_ROOM_SHARES = (1.0, 0.97, 0.94, 0.91, 0.88, 0.82, 0.75, 0.66, 0.5, 0.33, 0.16, 0.0)
"""Device memory for weights to try, as shares of what lies between the least and all of them."""

_MOST_WORSE = 2
"""Trials that may be slower than the best one in a row: fewer weights on the device only help for
as long as state or activations gain more."""

_EQUAL = 1e-6
"""Relative difference of two equal times."""

WEIGHT_SLOTS = 2
"""Staging buffers for weights: one in use, one that is being filled."""


@dataclass(frozen=True)
class TrainingPlan:
    """What is where in a training."""

    units: tuple[StreamUnit, ...]
    """With the weights that they have at home."""
    stream: StreamPlan
    weights: WeightPlan | None
    """None for a training whose weights are not planned."""
    extra: Mapping[str, tuple[int, int]]
    """By unit with staged weights, staging buffers beyond the usual ones that have room in its
    forward and in its backward pass. At the turn between the passes there are the usual ones."""

    @property
    def device_bytes(self) -> int:
        """Device memory at the fullest moment."""
        placed_bytes = 0 if self.weights is None else self.weights.device_bytes
        return self.stream.peak_bytes + placed_bytes


def with_weights(
    units: Sequence[StreamUnit], weights: Mapping[str, WeightUnit], plan: WeightPlan
) -> tuple[StreamUnit, ...]:
    """Units with the bytes of weights that a plan gives homes, by the names of the units."""
    staged, trained = {}, {}
    for name, unit, streamed, in_place in zip(
        weights, weights.values(), plan.streamed, plan.in_place, strict=True
    ):
        staged[name] = sum(unit.part_bytes[part] for part in streamed)
        at_home = (streamed | in_place) & unit.trained
        trained[name] = sum(unit.part_bytes[part] for part in at_home)
    return tuple(
        replace(
            it,
            weight_bytes=staged.get(it.name, 0),
            trained_weight_bytes=trained.get(it.name, 0),
        )
        for it in units
    )


def plan_training(
    units: Sequence[StreamUnit],
    weights: Mapping[str, WeightUnit] | None,
    *,
    budget_bytes: int,
    hardware: Hardware,
    fixed_bytes: int = 0,
    **options: Any,
) -> TrainingPlan:
    """Choose where weights, state, activations and gradients are, for the shortest predicted step.

    Parameters
    ----------
    units
        In forward order. Their peaks leave out all weights, if `weights` are given.
    weights
        Weights that can leave the device, by name of their unit; None to leave weights where they
        are.
    budget_bytes
        Device memory for everything.
    hardware
        The machine's figures.
    fixed_bytes
        Weights that are always on the device.
    **options
        Of :func:`umem.planning.stream_plan.plan_stream`.

    Raises
    ------
    PlanError
        If the budget is too small for any choice.
    """
    if weights is None:
        stream = plan_stream(units, budget_bytes=budget_bytes, hardware=hardware, **options)
        return TrainingPlan(tuple(units), stream, None, {})
    every = list(weights.values())
    all_bytes = sum(sum(unit.part_bytes) for unit in every)
    least_bytes = plan_weights(every, 0, WEIGHT_SLOTS).device_bytes
    best: TrainingPlan | None = None
    error: PlanError | None = None
    tried = set()
    worse = 0
    for share in _ROOM_SHARES:
        room_bytes = least_bytes + int(share * max(0, all_bytes - least_bytes))
        chosen = plan_weights(every, room_bytes, WEIGHT_SLOTS)
        if chosen in tried:
            continue
        tried.add(chosen)
        some = with_weights(units, weights, chosen)
        left_bytes = budget_bytes - fixed_bytes - chosen.device_bytes
        try:
            stream = plan_stream(
                some,
                budget_bytes=left_bytes,
                hardware=hardware,
                weight_slots=chosen.slots,
                **options,
            )
        except PlanError as its:
            error = its
            continue
        extra = _extra_slots(some, stream, chosen, left_bytes, options.get("step_peak_bytes", 0))
        plan = TrainingPlan(some, stream, chosen, extra)
        if extra:
            plan = _with_extra(plan, hardware, options)
        if best is None or _is_faster(plan, best):
            best, worse = plan, 0
            if not stream.predicted.exposed_s:
                break
        else:
            worse += 1
            if worse > _MOST_WORSE:
                break
    if best is None:
        assert error is not None
        raise error
    return best


def _is_faster(plan: TrainingPlan, other: TrainingPlan) -> bool:
    return plan.stream.predicted.step_s < other.stream.predicted.step_s * (1.0 - _EQUAL)


def _extra_slots(
    units: Sequence[StreamUnit],
    stream: StreamPlan,
    weights: WeightPlan,
    room_bytes: int,
    step_peak_bytes: int,
) -> dict[str, tuple[int, int]]:
    """Buffers for which the passes leave room, such as all but the one of the loss.

    They keep the first blocks' weights from the backward pass to the next forward pass. Not for
    weights that an update changes in between.

    Parameters
    ----------
    units, stream, weights
        The plan without them.
    room_bytes
        Device memory for all but weights and the usual buffers.
    step_peak_bytes
        Device memory of everything but state and weights when the step begins.
    """
    staged = [number for number, unit in enumerate(units) if unit.weight_bytes]
    if not staged or any(units[number].trained_weight_bytes for number in staged):
        return {}
    resident_bytes = sum(units[number].state_bytes for number in stream.resident)
    room_bytes -= resident_bytes + stream.slots * stream.slot_bytes

    def fits(peaks: Sequence[int]) -> int:
        return max(0, room_bytes - max(peaks)) // weights.slot_bytes

    # A buffer that comes with a unit's pass is there until the next unit with staged weights.
    ends = [*staged[1:], len(units)]
    forward = [
        fits([it.forward_peak_bytes for it in units[begin:end]])
        for begin, end in zip(staged, ends, strict=True)
    ]
    begins = [0, *(number + 1 for number in staged[:-1])]
    backward = [
        fits([it.backward_peak_bytes for it in units[begin : end + 1]])
        for begin, end in zip(begins, staged, strict=True)
    ]
    first = [step_peak_bytes, *(it.forward_peak_bytes for it in units[: staged[0]])]
    backward[0] = min(backward[0], fits(first))
    # One less with each unit towards the turn, so that nothing is fetched and then dropped.
    forward[-1] = 0
    for number in reversed(range(len(staged) - 1)):
        forward[number] = min(forward[number], forward[number + 1] + 1)
    for number in range(1, len(staged)):
        backward[number] = min(backward[number], backward[number - 1] + 1)
    if not max(forward):
        return {}
    pairs = zip(forward, backward, strict=True)
    return {units[number].name: pair for number, pair in zip(staged, pairs, strict=True)}


def _with_extra(plan: TrainingPlan, hardware: Hardware, options: Mapping[str, Any]) -> TrainingPlan:
    """The plan with the time that its step takes with further buffers."""
    stream = plan.stream
    assert plan.weights is not None
    names = {"other_s", "is_deferred", "in_backward", "batches"}
    timing = simulate_stream(
        plan.units,
        stream.resident,
        stream.slots,
        hardware=hardware,
        copied=stream.copied,
        left_before=stream.left_before,
        fetch_ahead=stream.fetch_ahead,
        copied_gradients=stream.copied_gradients,
        returning_gradients=stream.returning_gradients,
        weight_slots=plan.weights.slots,
        weights_ahead=next(iter(plan.extra.values()))[0],
        **{name: value for name, value in options.items() if name in names},
    )
    return replace(plan, stream=replace(stream, predicted=timing))
