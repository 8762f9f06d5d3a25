"""Plans a training whole: weights, optimizer state, activations and gradients under one budget.

Weights leave last, since their copies come for both passes. How many leave is tried out: what they
leave is room for state and activations, whose best use :mod:`umem.streaming.plan.state_plan` finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from umem.core.errors import PlanError
from umem.core.units import format_bytes
from umem.hardware import Hardware
from umem.streaming.plan.overflow import LEAST, without_overflow
from umem.streaming.plan.state_plan import (
    NoShorterStepError,
    StreamPlan,
    StreamProblem,
    plan_stream,
    simulate_plan,
)
from umem.streaming.plan.step_timing import StreamTiming, StreamUnit
from umem.streaming.plan.weight_plan import WeightPlan, WeightUnit, plan_weights

__all__ = ["WEIGHT_SLOTS", "TrainingPlan", "plan_training", "with_weights"]

_ROOMS = 16
"""Steps in which the weights on the device are tried, from all to the fewest. Less room for weights
may be slower and still less faster again: one more slot for state takes much room at once."""

_HALVINGS = 2
"""How often the step around the best one is halved: often that is the most that has room."""

_TRIAL_ROOMS = 2
"""The same of a plan that only shows what another choice is worth."""

_MOST_PLANNED = 4_000
"""Units to plan in all, so that plans for thousands of units take seconds."""

_LEAST_GAIN = 0.03
"""Part of the step that has to be gained where weights leave although they have room: homes take
page-locked memory, and predictions are not exact to less."""

_DOUBT = 1.5
"""How much longer a step may be without anything that has no room: a tensor is in host memory as a
whole, also where a small part of it has no room, and some are read often."""

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
    device_bytes: int
    """Device memory at the fullest moment."""
    recomputed: frozenset[str] = frozenset()
    """Names of the units that run forward again in the backward pass."""
    left_out: frozenset[str] = frozenset()
    """Names of the units without the checkpoints that the program has there."""
    overflow_bytes: int = 0
    """What has no room at the fullest moment, and is used in host memory."""

    @property
    def step_s(self) -> float:
        """A step, by prediction."""
        return self.stream.predicted.step_s

    @property
    def lost_s(self) -> float:
        """Time of it beyond its computation."""
        return self.step_s - self.stream.predicted.compute_s

    @property
    def most_extra(self) -> int:
        """The most further buffers at a time."""
        return max(map(max, self.extra.values()), default=0)

    def predict_again(
        self, units: Sequence[StreamUnit], hardware: Hardware, **options: Any
    ) -> StreamTiming:
        """Predict the step of this plan for other figures of its units.

        `options` are those of :func:`umem.streaming.plan.state_plan.simulate_plan` but for weights.
        """
        return simulate_plan(
            units,
            self.stream,
            hardware=hardware,
            weight_slots=0 if self.weights is None else self.weights.slots,
            # As many of the first units' weights as are kept from one pass to the next.
            weights_ahead=min(next(iter(self.extra.values()), (0, 0))),
            **options,
        )


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
            trained_weight_bytes=it.trained_weight_bytes + trained.get(it.name, 0),
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
    weight_share: float = 1.0,
    most_placed_bytes: int | None = None,
    is_trial: bool = False,
    longest_s: float = math.inf,
    may_overflow: bool = False,
    **options: Any,
) -> TrainingPlan:
    """Choose where weights, state, activations and gradients are, for the shortest predicted step.

    All weights that have room stay on the device, unless the step gains much where some leave.

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
    weight_share
        The most of all weights that may be on the device, as a share of their bytes. `fixed_bytes`
        count, staging buffers do not.
    most_placed_bytes
        The most that state, weights, `fixed_bytes` and staging buffers may take on the device; None
        for as much as has room.
    is_trial
        Whether to try few numbers of weights: in a small part of the time, for a step that may be
        longer than it need be.
    longest_s
        A step that takes as long is of no use: without `weights`, the search ends where none can be
        shorter.
    may_overflow
        Whether to plan for a budget that is too small, too: all that can leave does, and the rest
        is used in host memory (:mod:`umem.streaming.plan.overflow`).
    **options
        Of :class:`umem.streaming.plan.state_plan.StreamProblem`.

    Raises
    ------
    PlanError
        If the budget is too small for any choice, unless `may_overflow`.
    NoShorterStepError
        If no step can be below `longest_s`.
    """
    problem = StreamProblem(
        units, budget_bytes, hardware, most_state_bytes=most_placed_bytes, **options
    )
    if weights is None:
        try:
            return _plan_beside(problem, None, 0, longest_s)
        except PlanError as error:
            if not may_overflow or isinstance(error, NoShorterStepError):
                raise
            return _plan_with_overflow(problem, None, 0)
    every = list(weights.values())
    all_bytes = sum(sum(unit.part_bytes) for unit in every)
    least_bytes = plan_weights(every, 0, WEIGHT_SLOTS).device_bytes
    most_bytes = max(0, int(weight_share * (fixed_bytes + all_bytes)) - fixed_bytes)
    tried: set[WeightPlan] = set()
    errors: dict[float, str] = {}

    def plan_with(
        share: float, plan_beside: _Planner = _plan_beside, longest_s: float = math.inf
    ) -> TrainingPlan | None:
        """Plan with a share of the weights that can leave on the device; None for no better plan.

        A step that takes `longest_s` is none.
        """
        room_bytes = least_bytes + int(share * (all_bytes - least_bytes))
        placed = plan_weights(every, room_bytes, WEIGHT_SLOTS, most_resident_bytes=most_bytes)
        if placed in tried:
            return None
        tried.add(placed)
        placed_bytes = fixed_bytes + placed.device_bytes
        left_bytes = None if most_placed_bytes is None else most_placed_bytes - placed_bytes
        beside = replace(
            problem,
            units=with_weights(units, weights, placed),
            budget_bytes=budget_bytes - placed_bytes,
            weight_slots=placed.slots,
            most_state_bytes=left_bytes,
        )
        try:
            return plan_beside(beside, placed, placed_bytes, longest_s)
        except PlanError as error:
            errors[share] = str(error)
            return None

    everything = plan_with(1.0)
    if everything is not None and everything.lost_s <= _LEAST_GAIN * everything.step_s:
        return everything
    best: TrainingPlan | None = None
    best_share = 1.0
    rooms, halvings = (_TRIAL_ROOMS, 0) if is_trial else (_ROOMS, _HALVINGS)
    count = max(1, min(rooms, _MOST_PLANNED // max(1, len(units))))
    shares = [1.0 - number / count for number in range(1, count + 1)]
    for halving in range(halvings + 1):
        for share in shares:
            longest_s = math.inf if best is None else best.step_s * (1.0 - _EQUAL)
            plan = plan_with(share, longest_s=longest_s)
            if plan is not None and plan.step_s < longest_s:
                best, best_share = plan, share
                if _waits_for_nothing(plan):
                    break
        width = 0.5 ** (halving + 1) / count
        shares = [min(1.0, best_share + width), max(0.0, best_share - width)]
    if everything is not None:
        limit_s = (1.0 - _LEAST_GAIN) * everything.step_s
        return everything if best is None or best.step_s > limit_s else best
    if best is None and may_overflow:
        tried.clear()
        best = plan_with(0.0, _plan_with_overflow)
    if best is None:
        raise _too_small(errors[min(errors)], least_bytes + fixed_bytes)
    return best


_Planner = Callable[[StreamProblem, WeightPlan | None, int, float], TrainingPlan]


def _plan_beside(
    problem: StreamProblem,
    placed: WeightPlan | None,
    placed_bytes: int,
    longest_s: float = math.inf,
) -> TrainingPlan:
    """Plan all but weights, which take so many bytes. PlanError if what they leave is little.

    Where state may not have all of it, nothing is kept in further buffers either: they would be
    there while others need the memory.
    """
    has_extra = placed is not None and problem.most_state_bytes is None
    units = tuple(problem.units)
    stream = plan_stream(problem, longest_s, may_shorten=has_extra)
    extra: dict[str, tuple[int, int]] = {}
    device_bytes = stream.peak_bytes
    if placed is not None and has_extra:
        extra, peak_bytes = _extra_slots(problem, stream, placed)
        device_bytes = max(device_bytes, peak_bytes)
    plan = TrainingPlan(units, stream, placed, extra, placed_bytes + device_bytes)
    if not extra:
        return plan
    timing = plan.predict_again(
        units,
        problem.hardware,
        other_s=problem.other_s,
        is_deferred=problem.is_deferred,
        in_backward=problem.in_backward,
        batches=problem.batches,
        launch_s=problem.launch_s,
    )
    return replace(plan, stream=replace(stream, predicted=timing))


def _plan_with_overflow(
    problem: StreamProblem, placed: WeightPlan | None, placed_bytes: int, _: float = math.inf
) -> TrainingPlan:
    """The same where what they leave is too little for the usual number of copies under way."""
    plans = []
    for slots, ahead in LEAST:
        fitting, overflow_bytes = without_overflow(problem, slots, ahead)
        plan = _plan_beside(fitting, placed, placed_bytes)
        plans.append(replace(plan, overflow_bytes=overflow_bytes))
    return min(plans, key=lambda plan: plan.step_s * (_DOUBT if plan.overflow_bytes else 1.0))


def _too_small(error: str, placed_bytes: int) -> PlanError:
    """The error of the plan that needs least, whose budget is what weights leave."""
    if not placed_bytes:
        return PlanError(error)
    return PlanError(
        f"weights, as few as possible, and their staging buffers take {format_bytes(placed_bytes)} "
        f"of device_budget, and the budget that they leave is too small: {error}"
    )


def _waits_for_nothing(plan: TrainingPlan) -> bool:
    """Whether copies cost no more than the computation that they slow."""
    return plan.lost_s <= plan.stream.predicted.slowed_s + _EQUAL * plan.step_s


def _extra_slots(
    problem: StreamProblem, stream: StreamPlan, weights: WeightPlan
) -> tuple[dict[str, tuple[int, int]], int]:
    """Buffers for which the passes leave room, such as all but the one of the loss.

    They keep the first blocks' weights from the backward pass to the next forward pass. Not for
    weights that an update changes in between.

    Returns
    -------
    tuple
        By unit, the buffers in its forward and in its backward pass; and the most memory while
        there are any, of all but weights and the usual buffers.
    """
    units, step_bytes = problem.units, problem.step_peak_bytes
    update_bytes = problem.update_peak_bytes
    every = list(enumerate(units))
    staged = [number for number, unit in every if unit.weight_bytes]
    stays = any(slot.freed_before > len(units) for slot in stream.temporary)
    if not staged or stays or any(units[number].trained_weight_bytes for number in staged):
        return {}, 0
    forward_bytes, backward_bytes = (
        [unit.forward_peak_bytes + stream.temporary_bytes(forward=n) for n, unit in every],
        [unit.backward_peak_bytes + stream.temporary_bytes(backward=n) for n, unit in every],
    )
    # A buffer that comes with a unit's pass is there until the next unit with staged weights.
    in_forward = [max(forward_bytes[n:end]) for n, end in pairwise([*staged, len(units)])]
    in_backward = [max(backward_bytes[n + 1 : end + 1]) for n, end in pairwise([-1, *staged])]
    in_backward[0] = max(
        in_backward[0],
        step_bytes + stream.temporary_bytes(backward=0),
        (step_bytes if update_bytes is None else update_bytes) + stream.temporary_bytes(),
        *forward_bytes[: staged[0]],
    )
    state_bytes = sum(units[number].state_bytes for number in stream.resident)
    state_bytes += stream.slots * stream.slot_bytes
    room_bytes = problem.budget_bytes - state_bytes
    forward, backward = (
        [max(0, room_bytes - most_bytes) // weights.slot_bytes for most_bytes in its]
        for its in (in_forward, in_backward)
    )
    # One less with each unit towards the turn, so that nothing is fetched and then dropped.
    forward[-1] = 0
    for number in reversed(range(len(staged) - 1)):
        forward[number] = min(forward[number], forward[number + 1] + 1)
    for number in range(1, len(staged)):
        backward[number] = min(backward[number], backward[number - 1] + 1)
    if not max(forward):
        return {}, 0
    peak_bytes = state_bytes + max(
        most_bytes + count * weights.slot_bytes
        for most_bytes, count in zip(in_forward + in_backward, forward + backward, strict=True)
        if count
    )
    pairs = zip(forward, backward, strict=True)
    extra = {units[number].name: pair for number, pair in zip(staged, pairs, strict=True)}
    return extra, peak_bytes
