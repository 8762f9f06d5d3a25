"""A training's plan by the names of its units, as what follows it knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from umem.streaming.plan.state_plan import StreamPlan
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.step.temporary_slots import TemporaryPlan
from umem.streaming.tune.optimizers import OptimizerPlan

__all__ = ["FEWEST_SLOTS", "NamedPlan", "by_names", "everything_leaves"]

FEWEST_SLOTS = 2
"""With one, nothing is copied in while anything is copied out."""


@dataclass(frozen=True)
class NamedPlan:
    """What is copied, and what stays."""

    copied: dict[str, str | None]
    """Units whose activations are copied out, each with the unit before which they leave; None for
    the end of the forward pass."""
    fetch_ahead: int
    """Blocks by which they come back early."""
    optimizers: OptimizerPlan


def by_names(plan: StreamPlan, units: Sequence[StreamUnit], batches: int) -> NamedPlan:
    """Name what a plan has by number.

    Parameters
    ----------
    plan
        The plan.
    units
        What it is for, in forward order.
    batches
        Forward passes of a step.
    """

    def name_before(number: int) -> str | None:
        return units[number].name if number < len(units) else None

    temporary = TemporaryPlan(
        tuple(None if it.made_in is None else units[it.made_in].name for it in plan.temporary),
        tuple(name_before(it.freed_before) for it in plan.temporary),
        batches,
    )
    return NamedPlan(
        {units[it].name: name_before(behind) for it, behind in plan.left_before.items()},
        plan.fetch_ahead,
        OptimizerPlan(
            resident=frozenset(units[it].name for it in plan.resident),
            slots=plan.slots,
            stages_operands=plan.stages_operands,
            temporary=temporary,
            copied_gradients=frozenset(units[it].name for it in plan.copied_gradients),
            returning={
                units[it].name: units[behind].name
                for it, behind in plan.returning_gradients.items()
            },
            batches=batches,
            order=tuple(it.name for it in units),
        ),
    )


def everything_leaves(units: Sequence[StreamUnit], batches: int) -> NamedPlan:
    """For a budget that is too small for any plan: all is streamed and copied.

    Parameters
    ----------
    units
        In forward order.
    batches
        Forward passes of a step.
    """
    return NamedPlan(
        {it.name: behind.name for it, behind in pairwise(units) if it.saved_bytes},
        1,
        OptimizerPlan(
            resident=frozenset(),
            slots=FEWEST_SLOTS,
            stages_operands=False,
            temporary=TemporaryPlan(),
            copied_gradients=frozenset(it.name for it in units if it.gradient_bytes),
            returning={},
            batches=batches,
            order=tuple(it.name for it in units),
        ),
    )
