"""Chooses the units that the host updates, of those whose state a plan streams.

A streamed unit's state crosses the link twice in each step, when the last gradient is clipped. Of a
unit that the host updates, only the weights do, and its gradient has left beside the backward pass,
which makes room for the state of others. But the host updates fewer elements in a second than the
link carries. So it gets some of the units, as many as make the shortest step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from umem.core.errors import PlanError
from umem.hardware import Hardware
from umem.streaming.plan.state_plan import StreamPlan, StreamProblem, plan_stream
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.plan.training_plan import TrainingPlan, plan_training
from umem.streaming.plan.weight_plan import WeightUnit

__all__ = ["plan_with_host_updates"]

_LEAST_GAIN = 0.03
"""Part of the step that has to be gained: the host's cores do nothing else meanwhile, weights and
gradients take page-locked memory, and predictions are not exact to less."""

_MOST_TRIED = 12
"""Numbers of units to try, from the least on, until steps become longer."""

_MOST_LONGER = 2
"""Numbers one after another with longer steps, behind which no more are tried."""


def plan_with_host_updates(
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
    """Plan as :func:`umem.streaming.plan.training_plan.plan_training`, with the host's updates.

    There are none in a trial, or where steps are not deferred.

    Raises
    ------
    PlanError
        If the budget is too small for any choice.
    """
    without = plan_training(
        units,
        weights,
        budget_bytes=budget_bytes,
        hardware=hardware,
        fixed_bytes=fixed_bytes,
        weight_share=weight_share,
        most_placed_bytes=most_placed_bytes,
        is_trial=is_trial,
        longest_s=longest_s if is_trial else math.inf,
        may_overflow=may_overflow,
        **options,
    )
    stream, placed_bytes = without.stream, without.device_bytes - without.stream.peak_bytes
    problem = StreamProblem(
        without.units,
        budget_bytes - placed_bytes,
        hardware,
        weight_slots=0 if without.weights is None else without.weights.slots,
        most_state_bytes=None if most_placed_bytes is None else most_placed_bytes - placed_bytes,
        **options,
    )
    may_gain = problem.is_deferred and not problem.in_backward and stream.slots > 0
    has_room = not (without.extra or without.overflow_bytes)
    if is_trial or not (may_gain and has_room) or without.lost_s <= _LEAST_GAIN * without.step_s:
        return without
    best = _fastest(problem, stream)
    if best.predicted.step_s > (1.0 - _LEAST_GAIN) * without.step_s:
        return without
    return replace(without, stream=best, device_bytes=placed_bytes + best.peak_bytes)


def _fastest(problem: StreamProblem, best: StreamPlan) -> StreamPlan:
    for choices in _choices(problem.units, best):
        longer = 0
        for hosts in choices:
            try:
                plan = plan_stream(replace(problem, hosts=hosts))
            except PlanError:
                continue
            if plan.predicted.step_s < best.predicted.step_s:
                best, longer = plan, 0
            else:
                longer += 1
            if longer == _MOST_LONGER:
                break
    return best


def _choices(units: Sequence[StreamUnit], plan: StreamPlan) -> Iterator[list[frozenset[int]]]:
    """Units to try: more and more, spread evenly over those that can be, and over the later half.

    The link then has as much time for the others between two of them. Weights at home are updated
    there by nobody but the device.
    """
    can_be = [
        number
        for number, unit in enumerate(units)
        if unit.state_bytes
        and number not in plan.resident
        and unit.gradient_bytes
        and not (unit.weight_bytes or unit.trained_weight_bytes)
    ]
    for some in (can_be, can_be[len(can_be) // 2 :]):
        most = min(len(some), _MOST_TRIED)
        counts = [tried * len(some) // most for tried in range(1, most + 1)]
        yield [
            frozenset(some[int((it + 0.5) * len(some) / count)] for it in range(count))
            for count in counts
        ]
