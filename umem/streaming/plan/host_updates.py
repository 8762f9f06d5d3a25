"""Chooses the units that the host updates, of those whose state a plan streams.

A streamed unit's state crosses the link twice in each step, when the last gradient is clipped. Of a
unit that the host updates, only the weights do, and its gradient has left beside the backward pass,
which makes room for the state of others. But the host updates fewer elements in a second than the
link carries. So it gets some of the units, as many as make the shortest step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from umem.core.errors import PlanError
from umem.hardware import Hardware
from umem.streaming.plan.state_plan import StreamProblem, plan_stream
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.plan.training_plan import (
    WEIGHT_SLOTS,
    TrainingPlan,
    plan_training,
    with_weights,
)
from umem.streaming.plan.weight_plan import WeightPlan, WeightUnit, plan_weights

__all__ = ["plan_with_host_updates", "with_host_updates"]

_LEAST_GAIN = 0.03
"""Part of the step that has to be gained: the host's cores do nothing else meanwhile, weights and
gradients take page-locked memory, and predictions are not exact to less."""

_MOST_TRIED = 12
"""Numbers of units to try, from the least on, until steps become longer."""

_TOO_MANY = 3
"""Tensors of the gradient's size in the state of what the host does not update: Adam has two."""

_ROOMS = 4
"""Steps in which the room for weights is tried, from what it is without the host to all of them."""

_STAYS = WeightUnit(())
"""Weights none of which may leave."""

_MOST_LONGER = 2
"""Numbers one after another with longer steps, behind which no more are tried."""


def plan_with_host_updates(
    units: Sequence[StreamUnit],
    weights: Mapping[str, WeightUnit] | None,
    *,
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
        is_trial=is_trial,
        longest_s=longest_s if is_trial else math.inf,
        may_overflow=may_overflow,
        **options,
    )
    return without if is_trial else with_host_updates(without, units, weights, **options)


def with_host_updates(
    without: TrainingPlan,
    units: Sequence[StreamUnit],
    weights: Mapping[str, WeightUnit] | None,
    *,
    budget_bytes: int,
    hardware: Hardware,
    fixed_bytes: int = 0,
    weight_share: float = 1.0,
    most_placed_bytes: int | None = None,
    **options: Any,
) -> TrainingPlan:
    """Plan anew with the host's updates, where that gains time.

    Where weights leave, those of the host's units stay, and others leave in their place.

    Parameters
    ----------
    without
        The plan without, which the other parameters have made as those of
        :func:`umem.streaming.plan.training_plan.plan_training`.
    units
        As there.
    weights
        As there.
    """
    problem = StreamProblem(
        units, budget_bytes, hardware, most_state_bytes=most_placed_bytes, **options
    )
    may_gain = problem.is_deferred and not problem.in_backward
    has_room = not (without.extra or without.overflow_bytes)
    if not (may_gain and has_room) or without.lost_s <= _LEAST_GAIN * without.step_s:
        return without
    search = _Search(problem, weights or {}, without, fixed_bytes, weight_share)
    search.run()
    gains = search.best.step_s <= (1.0 - _LEAST_GAIN) * without.step_s
    return search.best if gains else without


class _Search:
    """Searches the units of the host, and which weights leave beside them."""

    def __init__(
        self,
        problem: StreamProblem,
        weights: Mapping[str, WeightUnit],
        without: TrainingPlan,
        fixed_bytes: int,
        weight_share: float,
    ) -> None:
        self.best = without
        self._problem, self._weights, self._fixed_bytes = problem, weights, fixed_bytes
        self._size_bytes = [
            sum(weights[it.name].part_bytes) if it.name in weights else 0 for it in problem.units
        ]
        """Of the weights of each unit that can leave."""
        most_bytes = int(weight_share * (fixed_bytes + sum(self._size_bytes))) - fixed_bytes
        self._most_bytes = max(0, most_bytes)

    def run(self) -> None:
        """Find the best plan."""
        without = self.best
        self._try(without.units, lambda _: without.weights)
        placed, all_bytes = without.weights, sum(self._size_bytes)
        if placed is None or not (placed.streamed_bytes or placed.in_place_bytes):
            return
        # The host's gradients make room for weights, too.
        more_bytes = max(0, all_bytes - placed.device_bytes)
        for number in range(_ROOMS + 1):
            room_bytes = placed.device_bytes + number * more_bytes // _ROOMS
            self._try(self._problem.units, partial(self._place, room_bytes))

    def _place(self, room_bytes: int, hosts: frozenset[int]) -> WeightPlan:
        """Weights in so much room, of which those of the host's units stay."""
        names = {self._problem.units[number].name for number in hosts}
        kept_bytes = sum(self._size_bytes[number] for number in hosts)
        placed = plan_weights(
            [_STAYS if name in names else it for name, it in self._weights.items()],
            room_bytes - kept_bytes,
            WEIGHT_SLOTS,
            most_resident_bytes=max(0, self._most_bytes - kept_bytes),
        )
        return replace(placed, resident_bytes=placed.resident_bytes + kept_bytes)

    def _try(
        self,
        units: Sequence[StreamUnit],
        place: Callable[[frozenset[int]], WeightPlan | None],
    ) -> None:
        # Where all state stays and weights leave, the host takes state to make room for these.
        stream = self.best.stream
        resident = stream.resident if stream.slots else frozenset[int]()
        for choices in _choices(units, resident):
            shortest_s, longer = math.inf, 0
            for hosts in choices:
                plan = self._plan(hosts, place(hosts))
                if plan is None:
                    continue
                self.best = min(self.best, plan, key=lambda it: it.step_s)
                longer = 0 if plan.step_s < shortest_s else longer + 1
                shortest_s = min(shortest_s, plan.step_s)
                if longer == _MOST_LONGER:
                    break

    def _plan(self, hosts: frozenset[int], placed: WeightPlan | None) -> TrainingPlan | None:
        """The plan with the host's units; None if it has no room."""
        problem, placed_bytes = self._problem, 0
        most_bytes = problem.most_state_bytes
        if placed is not None:
            placed_bytes = self._fixed_bytes + placed.device_bytes
            most_bytes = None if most_bytes is None else most_bytes - placed_bytes
            problem = replace(
                problem,
                units=with_weights(problem.units, self._weights, placed),
                weight_slots=placed.slots,
            )
        beside = replace(
            problem,
            budget_bytes=problem.budget_bytes - placed_bytes,
            most_state_bytes=most_bytes,
            hosts=hosts,
        )
        try:
            stream = plan_stream(beside)
        except PlanError:
            return None
        device_bytes = placed_bytes + stream.peak_bytes
        return TrainingPlan(tuple(beside.units), stream, placed, {}, device_bytes)


def _choices(
    units: Sequence[StreamUnit], resident: Collection[int]
) -> Iterator[list[frozenset[int]]]:
    """Units to try: more and more, spread evenly over those that can be, and over the later half.

    The link then has as much time for the others between two of them. Resident ones cannot be, nor
    those with more state than Adam's, such as float32 copies of weights, or with weights at home.
    """
    can_be = [
        number
        for number, unit in enumerate(units)
        if unit.state_bytes
        and number not in resident
        and unit.state_bytes < _TOO_MANY * unit.gradient_bytes
        and not (unit.weight_bytes or unit.trained_weight_bytes)
    ]
    for some in (can_be, can_be[len(can_be) // 2 :]):
        most = min(len(some), _MOST_TRIED)
        counts = [tried * len(some) // most for tried in range(1, most + 1)]
        yield [
            frozenset(some[int((it + 0.5) * len(some) / count)] for it in range(count))
            for count in counts
        ]
