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
from umem.planning.stream_timing import StreamUnit
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
        return TrainingPlan(tuple(units), stream, None)
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
        plan = TrainingPlan(some, stream, chosen)
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
