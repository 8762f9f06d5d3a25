"""Chooses what runs forward again in the backward pass, where that makes the shortest step.

What such a unit saves is free from the end of its forward pass to its backward pass, and no link
carries it. It costs the unit's forward pass once more. So units run again in place of copies, and
where there is room the program's own checkpoints are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType

from umem.core.errors import PlanError
from umem.hardware import Hardware
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.plan.training_plan import TrainingPlan

__all__ = ["plan_with_recomputation", "with_recomputed", "without_checkpoints"]

_SHARES = (1.0, 0.5, 0.25, 0.75, 0.875, 0.625, 0.375, 0.125)
"""Numbers of units to try, as parts of those that may gain by running again."""

_SHARES_LEFT_OUT = sorted(_SHARES, reverse=True)
"""Numbers of units whose checkpoints to leave out, as parts of all that have some."""

_MOST_COPIES = 4
"""How often the link need not carry a byte that is free: out and back the activation itself, and in
and out the state that is on the device in its place."""

_LEAST_GAIN = 0.03
"""Part of the step that has to be gained: predictions are not exact to less."""

_MOST_AGAIN = 1.5
"""How much longer a step may seem in which blocks run twice, where times are too long to tell: a
forward pass is a third of all passes, and copies that do not hide cost several times as much."""

_NOTHING: Mapping[str, int] = MappingProxyType({})

_EQUAL = 0.005
"""Part of the step by which another number of units has to be faster."""


def with_recomputed(
    units: Sequence[StreamUnit],
    freed_bytes: Mapping[str, int],
    names: Collection[str],
    more_bytes: Mapping[str, int] = _NOTHING,
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
    more_bytes
        By name, what is on the device in the second forward pass of a unit, and not in the first.
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
                backward_peak_bytes=max(forward_bytes, backward_bytes)
                + more_bytes.get(unit.name, 0),
                saved_bytes=max(0, unit.saved_bytes - own_bytes),
            )
        found.append(its)
    return tuple(found)


def without_checkpoints(
    units: Sequence[StreamUnit], saved_bytes: Mapping[str, int], names: Collection[str]
) -> tuple[StreamUnit, ...]:
    """Units of a step in which checkpoints of the program are left out.

    Parameters
    ----------
    units
        Those of a step with them, in forward order.
    saved_bytes
        By name, what a unit keeps more between its two passes without its checkpoint.
    names
        The units without.
    """
    more = [saved_bytes.get(unit.name, 0) if unit.name in names else 0 for unit in units]
    before = [0, *accumulate(more)]
    last = units[-1]
    return tuple(
        replace(
            unit,
            forward_peak_bytes=unit.forward_peak_bytes + kept_bytes + own_bytes,
            # The second forward pass had its own on the device, but not yet at the loss.
            backward_peak_bytes=unit.backward_peak_bytes
            + kept_bytes
            + (own_bytes if unit is last else 0),
            backward_s=max(0.0, unit.backward_s - (unit.forward_s if own_bytes else 0.0)),
            saved_bytes=unit.saved_bytes + own_bytes,
        )
        for unit, own_bytes, kept_bytes in zip(units, more, before, strict=False)
    )


def plan_with_recomputation(
    units: Sequence[StreamUnit],
    freed_bytes: Mapping[str, int],
    hardware: Hardware,
    plan: Callable[..., TrainingPlan],
    checkpointed_bytes: Mapping[str, int] = _NOTHING,
    more_bytes: Mapping[str, int] = _NOTHING,
    *,
    are_slowed: bool = False,
) -> TrainingPlan:
    """Plan a training with the number of units that run again by which a step is shortest.

    Parameters
    ----------
    units
        In forward order.
    freed_bytes
        By name of each unit that may run again, what need not be kept of it.
    hardware
        The machine.
    plan
        Plans everything else for given units, as
        :func:`umem.streaming.plan.training_plan.plan_training`, whose options `is_trial` and
        `longest_s` it gets.
    checkpointed_bytes
        By name of each unit whose checkpoint may be left out, what is kept more of it then.
    more_bytes
        By name, what is on the device in the second forward pass of a unit, and not in the first.
    are_slowed
        Whether the units' times are too long, which has copies seem to hide beside the passes, and
        others are to come: all units run again that may, in place of copies.

    Raises
    ------
    PlanError
        If there is no plan for any number: that of none.
    """
    best, refusal = _try(plan, units)
    fits = best is not None and not best.overflow_bytes
    recomputing = partial(with_recomputed, units, freed_bytes, more_bytes=more_bytes)
    names = frozenset(_useful(units, freed_bytes, None) if are_slowed else ())
    if names and best is not None and best.stream.copied:
        other, _ = _try(plan, recomputing(names))
        if other is not None and other.step_s < _MOST_AGAIN * best.step_s:
            return replace(other, recomputed=names)
    if best is not None and fits and best.lost_s <= _LEAST_GAIN * best.step_s:
        return _leave_out(units, checkpointed_bytes, plan, best)
    # Where nothing fits, what saves no time may make room.
    order = _useful(units, freed_bytes, hardware if fits else None)
    limit_s = math.inf if best is None else (1.0 - _LEAST_GAIN) * best.step_s
    # Of two choices that trials find, a whole plan may be faster for the one with the longer trial.
    for names in _best_in_trials(units, recomputing, order, plan) if order else ():
        other, _ = _try(plan, recomputing(names))
        if other is not None and other.step_s < limit_s:
            best, limit_s = replace(other, recomputed=names), other.step_s
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _leave_out(
    units: Sequence[StreamUnit],
    saved_bytes: Mapping[str, int],
    plan: Callable[..., TrainingPlan],
    best: TrainingPlan,
) -> TrainingPlan:
    """The plan for as many units without their checkpoints as have room, or `best`."""
    # What is saved last is needed first.
    order = [unit.name for unit in reversed(units) if saved_bytes.get(unit.name) and unit.forward_s]
    for share in _SHARES_LEFT_OUT if order else ():
        names = frozenset(order[: math.ceil(share * len(order))])
        changed = without_checkpoints(units, saved_bytes, names)
        for is_trial in (True, False):
            other, _ = _try(plan, changed, is_trial=is_trial)
            if other is None or not _gains(other, best):
                break
        else:
            assert other is not None
            return replace(other, left_out=names)
    return best


def _gains(other: TrainingPlan, best: TrainingPlan) -> bool:
    """Whether a step is shorter, and nothing is waited for instead."""
    is_shorter = other.step_s < (1.0 - _LEAST_GAIN) * best.step_s
    return is_shorter and other.lost_s <= _LEAST_GAIN * other.step_s


def _best_in_trials(
    units: Sequence[StreamUnit],
    recomputing: Callable[[Collection[str]], Sequence[StreamUnit]],
    order: Sequence[str],
    plan: Callable[..., TrainingPlan],
) -> list[frozenset[str]]:
    """The units by which trials have the shortest step, in two orders; empty where none gain."""
    best: dict[int, frozenset[str]] = {}
    without, _ = _try(plan, units, is_trial=True)
    limit_s = math.inf if without is None else (1.0 - _LEAST_GAIN) * without.step_s
    # Early units are away for longest: where sizes differ, those that free most may be late ones.
    in_forward = [unit.name for unit in units if unit.name in order]
    for number, its in enumerate((order, in_forward) if in_forward != order else (order,)):
        for share in _SHARES:
            tried = frozenset(its[: math.ceil(share * len(its))])
            found, _ = _try(plan, recomputing(tried), is_trial=True, longest_s=limit_s)
            if found is not None and found.step_s < limit_s:
                best[number], limit_s = tried, (1.0 - _EQUAL) * found.step_s
    return list(best.values())


def _try(
    plan: Callable[..., TrainingPlan], units: Sequence[StreamUnit], **options: bool | float
) -> tuple[TrainingPlan | None, PlanError | None]:
    try:
        return plan(units, **options), None
    except PlanError as error:
        return None, error


def _useful(
    units: Sequence[StreamUnit], freed_bytes: Mapping[str, int], hardware: Hardware | None
) -> list[str]:
    """Units that may gain by running again; of those that free most for their time the first.

    Without a machine, all that free memory. Of equal ones the first come first, whose copies the
    forward pass would wait for. Not the last unit, whose backward pass comes at once.
    """
    found = []
    for number, unit in enumerate(units[:-1]):
        size_bytes = freed_bytes.get(unit.name, 0)
        copies_s = 0.0
        if hardware is not None:
            copies_s = _MOST_COPIES * size_bytes / hardware.copy_link_bytes_per_s
        if size_bytes and unit.forward_s > 0 and (hardware is None or copies_s > unit.forward_s):
            found.append((-size_bytes / unit.forward_s, number))
    return [units[number].name for _, number in sorted(found)]
