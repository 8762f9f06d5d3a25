"""The optimizers of one model, and its weights: they have one plan, and each follows its part."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from torch import nn

from umem.streaming.gradients.copied_gradients import CopiedGradients
from umem.streaming.stage.shared_budget import BudgetMember
from umem.streaming.step.step import StreamedStep
from umem.streaming.step.temporary_slots import TemporarySlots
from umem.streaming.tune.measured_steps import MeasuredSteps
from umem.streaming.tune.named_plan import FEWEST_SLOTS, NamedPlan
from umem.streaming.weights.model_weights import ModelWeights

__all__ = ["TunedOptimizer", "TunedOptimizers"]


@dataclass(eq=False)
class TunedOptimizer:
    """What of one optimizer follows a plan."""

    step: StreamedStep
    gradients: CopiedGradients | None
    """None where they stay."""
    temporary: TemporarySlots
    in_backward: bool = False
    """Whether it updates parameters in the backward pass."""
    expects_backward: bool = False
    """Whether it soon will."""
    planned: NamedPlan | None = None
    """What it follows."""

    def set_plan(self, plan: NamedPlan | None) -> None:
        """Follow a plan from now on, if it is another one; None for no plan yet."""
        known = self.planned
        if plan is None or plan is known:
            return
        self.planned = plan
        if self.gradients is not None:
            triggers = _triggers(plan, self.gradients)
            self.gradients.set_plan(
                plan.copied_gradients,
                triggers,
                plan.batches,
                plan.final_gradients,
                adds_at_home=plan.adds_at_home,
            )
        self.temporary.set_plan(plan.temporary)
        if known is None or plan.places != known.places:
            self.step.units.set_plan(
                plan.resident,
                plan.slots,
                stages_operands=plan.stages_operands,
                temporary=len(plan.temporary.made_in),
                hosts=plan.hosts,
            )


class TunedOptimizers(BudgetMember):
    """All optimizers of a model, taken together, and its weights: a member of the device's budget.

    Parameters
    ----------
    model
        The model. Only a weak reference is kept.
    weights
        Streams its weights; None where they stay.
    measured
        Knows what steps need.
    """

    def __init__(
        self, model: nn.Module, weights: ModelWeights | None, measured: MeasuredSteps
    ) -> None:
        self.weights = weights
        """Streams weights; None where they stay."""
        self._model = weakref.ref(model)
        self._measured = measured
        self._all: list[TunedOptimizer] = []

    def __len__(self) -> int:
        return len(self._all)

    def add(self, optimizer: TunedOptimizer) -> None:
        """Count one more."""
        self._all.append(optimizer)

    def remove(self, optimizer: TunedOptimizer) -> None:
        """Count one less."""
        self._all.remove(optimizer)

    def join(self) -> None:
        """Let the program's stream wait for all updates."""
        for optimizer in self._all:
            optimizer.step.join()

    def move_to_host(self) -> int:
        """Move parameters that no module holds to host memory, and return their bytes."""
        model = self._model()
        if model is None:
            return 0
        held = set(map(id, model.parameters()))
        return sum(optimizer.step.units.move_to_host(held) for optimizer in self._all)

    @property
    def in_backward(self) -> bool:
        """Whether all updates are made in the backward pass, so that it frees all gradients."""
        return all(optimizer.in_backward for optimizer in self._all)

    @property
    def expects_backward(self) -> bool:
        """Whether an optimizer soon updates in the backward pass."""
        return any(optimizer.expects_backward for optimizer in self._all)

    @property
    def are_used_early(self) -> bool:
        """Whether the program waits for all updates of one before each next forward pass."""
        return any(optimizer.step.is_used_early for optimizer in self._all)

    @property
    def waits(self) -> bool:
        """Whether the program's stream waits for updates of one before the next forward pass."""
        return self.are_used_early or any(optimizer.step.waits for optimizer in self._all)

    @property
    def may_use_host(self) -> bool:
        """Whether the host may update units, by all that is known so far."""
        return len(self._all) == 1 and all(
            it.gradients is not None and it.step.hosts.may_update for it in self._all
        )

    def prepare_host(self) -> bool:
        """Have the host ready for updates; returns whether they have the device's bits."""
        return all(optimizer.step.hosts.prepare() for optimizer in self._all)

    # ------------------------------------------------------------------ the member of the budget

    @property
    def placed_bytes(self) -> int:
        """What plans have placed: resident state, slots, and weights wherever they are."""
        weights = 0 if self.weights is None else self.weights.placed_bytes
        return self._state_and_slots_bytes + weights + sum(self.parameters_at_home().values())

    @property
    def device_bytes(self) -> int:
        """The part of it that is on the device."""
        weights = 0 if self.weights is None else self.weights.device_bytes
        return self._state_and_slots_bytes + weights

    @property
    def least_bytes(self) -> int:
        """The fewest slots, and weights that cannot leave, with their buffers."""
        pieces = [size for pieces in self.state_sizes().values() for size in pieces]
        state_bytes = min(sum(pieces), FEWEST_SLOTS * max(pieces, default=0))
        return state_bytes + (0 if self.weights is None else self.weights.least_bytes)

    @property
    def most_bytes(self) -> int:
        """All state and weights."""
        return self.state_bytes + (0 if self.weights is None else self.weights.most_bytes)

    @property
    def need_bytes(self) -> int:
        """The most live tensors of the measured steps that nobody has placed."""
        figures = self._measured.figures
        return 0 if figures is None else figures.need_bytes

    # ------------------------------------------------------------------ state

    @property
    def _state_and_slots_bytes(self) -> int:
        every = [optimizer.step.units for optimizer in self._all]
        rings = {id(units.ring): units.ring.device_bytes for units in every}
        return sum(units.resident_bytes for units in every) + sum(rings.values())

    def state_sizes(self) -> dict[str, tuple[int, ...]]:
        """Bytes of state that can be streamed, by unit, of what is staged at a time."""
        found: dict[str, tuple[int, ...]] = {}
        for optimizer in self._all:
            for name, pieces in optimizer.step.units.sizes().items():
                others = found.get(name)
                found[name] = pieces if others is None else (*filter(None, others), *pieces)
        return found

    @property
    def state_bytes(self) -> int:
        """All state that can be streamed."""
        return sum(map(sum, self.state_sizes().values()))

    @property
    def movable_share(self) -> float:
        """Of all state, what may be on the device."""
        fixed_bytes = sum(optimizer.step.units.fixed_bytes for optimizer in self._all)
        state_bytes = self.state_bytes
        return 1.0 - fixed_bytes / state_bytes if state_bytes else 1.0

    @property
    def may_have_temporary(self) -> bool:
        """Whether a plan may have temporary slots: only one optimizer's turns are known."""
        return len(self._all) == 1 and self._all[0].step.units.may_have_temporary

    def parameters_at_home(self) -> Counter[str]:
        """Bytes of the parameters that :meth:`move_to_host` has moved, by unit."""
        found: Counter[str] = Counter()
        for optimizer in self._all:
            found.update(optimizer.step.units.home_bytes())
        return found

    # ------------------------------------------------------------------ gradients

    def gradient_sizes(self) -> Counter[str]:
        """Bytes of gradients that can be copied out, by unit."""
        found: Counter[str] = Counter()
        for gradients in self._gradients():
            found.update(gradients.sizes())
        return found

    @property
    def copied_gradients(self) -> frozenset[str]:
        """Units whose gradients are copied out."""
        return frozenset(name for gradients in self._gradients() for name in gradients.copied)

    @property
    def returning_gradients(self) -> frozenset[str]:
        """Those of them that come back."""
        return frozenset(name for gradients in self._gradients() for name in gradients.returning)

    def _gradients(self) -> list[CopiedGradients]:
        return [it.gradients for it in self._all if it.gradients is not None]


def _triggers(plan: NamedPlan, gradients: CopiedGradients) -> dict[str, str]:
    """For an optimizer's gradients that come back, the unit of its own at which they do.

    It is the one that the plan names, or the next one that the backward pass comes to.
    """
    places = {name: place for place, name in enumerate(plan.order)}
    sizes = gradients.sizes().items()
    own = sorted(places[name] for name, size in sizes if size and name in places)
    found = {}
    for name, trigger in plan.returning.items():
        place = bisect_right(own, places[trigger])
        if place:
            found[name] = plan.order[own[place - 1]]
    return found
