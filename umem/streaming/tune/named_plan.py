"""A training's plan by the names of its units, as what follows it knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from umem.streaming.plan.stretches import block_of
from umem.streaming.plan.training_plan import TrainingPlan
from umem.streaming.step.temporary_slots import TemporaryPlan
from umem.streaming.tune.measured_steps import BETWEEN

__all__ = ["FEWEST_SLOTS", "NamedPlan"]

_FORWARD_PASSES_TO_LEAVE = 2
"""The memory of a unit's activations is free that many forward passes later, at the earliest."""

FEWEST_SLOTS = 2
"""With one, nothing is copied in while anything is copied out."""


@dataclass(frozen=True)
class NamedPlan:
    """What is copied, and what stays."""

    copied: Mapping[str, str | None]
    """Units whose activations are copied out, each with the unit before which they leave; None for
    the end of the forward pass."""
    fetch_ahead: int
    """Blocks by which they come back early."""
    recomputed: Mapping[str, str | None]
    """Units that run forward again in the backward pass. Each with the unit before which its
    activations leave where it cannot."""
    left_out: frozenset[str]
    """Units whose checkpoints of the program are left out."""
    resident: frozenset[str]
    """Units whose state stays on the device."""
    slots: int
    """One where all state is to stay on the device, for what has no room there."""
    stages_operands: bool
    """Whether slots are for weights and gradients at home, too."""
    temporary: TemporaryPlan
    """Further slots."""
    copied_gradients: frozenset[str]
    """Units whose gradients are copied out."""
    final_gradients: frozenset[str]
    """Those of them whose gradients are in the last batch only."""
    adds_at_home: bool
    """Whether later batches are added to those at home."""
    returning: Mapping[str, str]
    """Those of them that come back, each with the unit at which they do."""
    hosts: frozenset[str]
    """Units that the host updates."""
    batches: int
    """Forward passes of a step."""
    order: tuple[str, ...]
    """All units, in forward order."""

    @property
    def places(self) -> tuple[object, ...]:
        """What has to be laid out anew where it changes."""
        temporary = len(self.temporary.made_in)
        return self.resident, self.slots, self.stages_operands, temporary, self.hosts

    @classmethod
    def of(cls, whole: TrainingPlan, batches: int) -> NamedPlan:
        """A plan for units in forward order, which has them by number."""
        plan, units = whole.stream, whole.units
        order = tuple(unit.name for unit in units)

        # Nothing tells when other trainings' passes begin in between.
        heard = tuple(name for name in order if name != BETWEEN)

        def name_before(number: int) -> str | None:
            return heard[number] if number < len(heard) else None

        cut = {block_of(name) for name in order if block_of(name) != name}

        def made_in(number: int | None) -> str | None:
            """The block whose backward pass begins with the unit's, or next; None for the step."""
            before = heard[: 0 if number is None else number + 1]
            found = (name for name in reversed(before) if block_of(name) not in cut)
            return next(filter(None, found), None)

        def freed_in(number: int) -> str:
            """The block whose backward pass begins with the unit's, or before."""
            return next(filter(None, map(block_of, heard[number:])), heard[-1])

        freed = [slot.freed_before for slot in plan.temporary]
        freed_before = [name_before(it) for it in freed if it <= len(order)]
        return cls(
            copied={order[n]: name_before(left) for n, left in plan.left_before.items()},
            fetch_ahead=plan.fetch_ahead,
            recomputed={
                name: name_before(number + _FORWARD_PASSES_TO_LEAVE)
                for number, name in enumerate(order)
                if name in whole.recomputed
            },
            left_out=whole.left_out,
            resident=frozenset(order[n] for n in plan.resident),
            slots=1 if len(plan.resident) == len(units) else plan.slots,
            stages_operands=plan.stages_operands,
            temporary=TemporaryPlan(
                tuple(made_in(slot.made_in) for slot in plan.temporary),
                tuple(None if name is None else block_of(name) for name in freed_before),
                tuple(freed_in(2 * len(order) - 1 - it) for it in freed if it > len(order)),
                batches,
            ),
            copied_gradients=frozenset(order[n] for n in plan.copied_gradients),
            final_gradients=frozenset(order[n] for n in plan.final_gradients),
            adds_at_home=plan.adds_at_home,
            returning={order[n]: order[at] for n, at in plan.returning_gradients.items()},
            hosts=frozenset(order[n] for n in plan.hosts),
            batches=batches,
            order=order,
        )
