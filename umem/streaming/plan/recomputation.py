"""Chooses units that run forward again in the backward pass, where that is faster than copies.

What such a unit saves is free from the end of its forward pass to its backward pass, and no link
carries it. It costs the unit's forward pass once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from umem.core.errors import PlanError
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.plan.training_plan import TrainingPlan

__all__ = ["plan_with_recomputation", "with_recomputed"]

_SHARES = 8
"""Numbers of units to try are multiples of this part of those that may run again."""

_LEAST_GAIN = 0.03
"""Part of the step that has to be gained: predictions are not exact to less."""

_EQUAL = 0.005
"""Relative difference below which the plan with fewer such units is taken."""


def with_recomputed(
    units: Sequence[StreamUnit], freed_bytes: Mapping[str, int], names: Collection[str]
) -> tuple[StreamUnit, ...]:
    """Units of a step in which some run forward again in the backward pass.

    Parameters
    ----------
    units
        Those of a step without that, in forward order.
    freed_bytes
        By name, what need not be kept of a unit between its two passes.
    names
        The units that run again.
    """
    freed = [freed_bytes.get(unit.name, 0) if unit.name in names else 0 for unit in units]
    before = [0, *accumulate(freed)]
    found = []
    for unit, own_bytes, gone_bytes in zip(units, freed, before, strict=False):
        forward_bytes = max(0, unit.forward_peak_bytes - gone_bytes)
        backward_bytes = max(0, unit.backward_peak_bytes - gone_bytes)
        its = replace(unit, forward_peak_bytes=forward_bytes, backward_peak_bytes=backward_bytes)
        if own_bytes:
            its = replace(
                its,
                backward_s=unit.backward_s + unit.forward_s,
                # The second forward pass needs what the first did.
                backward_peak_bytes=max(forward_bytes, backward_bytes),
                saved_bytes=0,
            )
        found.append(its)
    return tuple(found)


def plan_with_recomputation(
    units: Sequence[StreamUnit],
    freed_bytes: Mapping[str, int],
    plan: Callable[[Sequence[StreamUnit]], TrainingPlan],
) -> TrainingPlan:
    """Plan a training with the number of units that run again by which a step is shortest.

    Parameters
    ----------
    units
        In forward order.
    freed_bytes
        By name of each unit that may run again, what need not be kept of it.
    plan
        Plans everything else for given units.

    Raises
    ------
    PlanError
        If there is no plan for any number: that of none.
    """
    # The most memory for the least time first; at the turn of the passes all of it is needed.
    useful = [
        (freed_bytes[unit.name] / unit.forward_s, number)
        for number, unit in enumerate(units)
        if freed_bytes.get(unit.name) and unit.forward_s > 0
    ]
    order = [units[number].name for _, number in sorted(useful, reverse=True)]
    best: TrainingPlan | None = None
    refusal: PlanError | None = None
    for count in dict.fromkeys(len(order) * share // _SHARES for share in range(_SHARES + 1)):
        names = frozenset(order[:count])
        try:
            tried = plan(with_recomputed(units, freed_bytes, names) if names else units)
        except PlanError as error:
            refusal = refusal or error
            continue
        least_gain = _EQUAL if best is None or best.recomputed else _LEAST_GAIN
        step_s = tried.stream.predicted.step_s
        if best is None or step_s < (1.0 - least_gain) * best.stream.predicted.step_s:
            best = replace(tried, recomputed=names)
        if _lost_s(tried) <= _LEAST_GAIN * step_s:
            break  # more of them could only compute for longer
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _lost_s(plan: TrainingPlan) -> float:
    """Time of a step beyond its computation."""
    return plan.stream.predicted.step_s - plan.stream.predicted.compute_s
