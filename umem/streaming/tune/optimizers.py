"""The optimizers of one model: they have one plan, and each gets its part of it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from umem.streaming.gradients.copied_gradients import CopiedGradients
from umem.streaming.stage.ring import Ring
from umem.streaming.step.temporary_slots import TemporaryPlan, TemporarySlots

__all__ = ["OptimizerPlan", "StreamedState", "TunedOptimizer", "TunedOptimizers"]


class StreamedState(Protocol):
    """The state of one optimizer, which a plan is about."""

    @property
    def ring(self) -> Ring:
        """Its slots, which the optimizers of a model may share."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of state that is on the device for good."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes of state that has to be streamed."""

    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Bytes of state that can be streamed, by block in the order of the forward pass.

        Those of a block are of what is staged at a time.
        """

    def home_bytes(self) -> Mapping[str, int]:
        """Bytes of parameters that were sent to host memory, by block."""

    @property
    def may_have_temporary(self) -> bool:
        """Whether pieces of state may have temporary slots."""

    def set_plan(
        self,
        resident: frozenset[str],
        slots: int,
        *,
        stages_operands: bool = True,
        temporary: int = 0,
    ) -> None:
        """Set the blocks whose state stays on the device, and the slots for the others."""


@dataclass(frozen=True)
class OptimizerPlan:
    """The part of a plan that is for each optimizer of the model."""

    resident: frozenset[str]
    """Units whose state stays on the device."""
    slots: int
    stages_operands: bool
    """Whether slots are for weights and gradients at home, too."""
    temporary: TemporaryPlan
    """Further slots."""
    copied_gradients: frozenset[str]
    """Units whose gradients are copied out."""
    returning: Mapping[str, str]
    """Those of them that come back, each with the unit at which they do."""
    batches: int
    order: tuple[str, ...]
    """All units."""

    @property
    def places(self) -> tuple[object, ...]:
        """What has to be laid out anew where it changes."""
        return self.resident, self.slots, self.stages_operands, len(self.temporary.made_in)


@dataclass(eq=False)
class TunedOptimizer:
    """One of the optimizers of a model."""

    state: StreamedState
    gradients: CopiedGradients | None
    """None where they stay."""
    join: Callable[[], None]
    """Lets the program's stream wait for all updates."""
    move_to_host: Callable[[], int]
    """Moves parameters that no module holds to host memory, and returns their bytes."""
    waits: Callable[[], bool]
    """Whether the program's stream waits for updates within ``step()``."""
    temporary: TemporarySlots | None
    in_backward: bool = False
    """Whether it updates parameters in the backward pass."""
    expects_backward: bool = False
    """Whether it soon will."""
    planned: OptimizerPlan | None = None
    """What it was given."""

    def set_plan(self, plan: OptimizerPlan | None) -> None:
        """Follow a plan from now on, if it is another one; None for no plan yet."""
        known = self.planned
        if plan is None or plan is known:
            return
        self.planned = plan
        if self.gradients is not None:
            triggers = _triggers(plan.returning, self.gradients, plan.order)
            self.gradients.set_plan(plan.copied_gradients, triggers, plan.batches)
        if self.temporary is not None:
            self.temporary.set_plan(plan.temporary)
        if known is None or plan.places != known.places:
            self.state.set_plan(
                plan.resident,
                plan.slots,
                stages_operands=plan.stages_operands,
                temporary=len(plan.temporary.made_in),
            )


class TunedOptimizers:
    """All optimizers of a model, taken together."""

    def __init__(self) -> None:
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
        for it in self._all:
            it.join()

    def move_to_host(self) -> int:
        """Move parameters that no module holds to host memory, and return their bytes."""
        return sum(it.move_to_host() for it in self._all)

    @property
    def in_backward(self) -> bool:
        """Whether all updates are made in the backward pass, so that it frees all gradients."""
        return all(it.in_backward for it in self._all)

    @property
    def expects_backward(self) -> bool:
        """Whether an optimizer soon updates in the backward pass."""
        return any(it.expects_backward for it in self._all)

    def waits(self) -> bool:
        """Whether the program's stream waits for updates of one within ``step()``."""
        return any(it.waits() for it in self._all)

    # ------------------------------------------------------------------ state

    @property
    def device_bytes(self) -> int:
        """State on the device, and slots."""
        rings = {id(it.state.ring): it.state.ring for it in self._all}
        resident_bytes = sum(it.state.resident_bytes for it in self._all)
        return resident_bytes + sum(it.device_bytes for it in rings.values())

    def state_sizes(self) -> dict[str, tuple[int, ...]]:
        """Bytes of state that can be streamed, by unit, of what is staged at a time."""
        found: dict[str, tuple[int, ...]] = {}
        for it in self._all:
            for name, pieces in it.state.sizes().items():
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
        fixed_bytes, state_bytes = sum(it.state.fixed_bytes for it in self._all), self.state_bytes
        return 1.0 - fixed_bytes / state_bytes if state_bytes else 1.0

    @property
    def may_have_temporary(self) -> bool:
        """Whether a plan may have temporary slots: only one optimizer's turns are known."""
        if len(self._all) != 1:
            return False
        (only,) = self._all
        return only.temporary is not None and only.state.may_have_temporary

    def parameters_at_home(self) -> Counter[str]:
        """Bytes of the parameters that were sent there, by unit."""
        found: Counter[str] = Counter()
        for it in self._all:
            found.update(it.state.home_bytes())
        return found

    # ------------------------------------------------------------------ gradients

    def gradient_sizes(self) -> Counter[str]:
        """Bytes of gradients that can be copied out, by unit."""
        found: Counter[str] = Counter()
        for it in self._gradients():
            found.update(it.sizes())
        return found

    @property
    def copied_gradients(self) -> frozenset[str]:
        """Units whose gradients are copied out."""
        return frozenset(name for it in self._gradients() for name in it.copied)

    @property
    def returning_gradients(self) -> frozenset[str]:
        """Those of them that come back."""
        return frozenset(name for it in self._gradients() for name in it.returning)

    def _gradients(self) -> list[CopiedGradients]:
        return [it.gradients for it in self._all if it.gradients is not None]


def _triggers(
    returning: Mapping[str, str], copied: CopiedGradients, order: Sequence[str]
) -> dict[str, str]:
    """For an optimizer's gradients that come back, the unit of its own at which they do.

    It is the one that the plan names, or the next one that the backward pass comes to.
    """
    places = {name: place for place, name in enumerate(order)}
    own = sorted(places[name] for name, size in copied.sizes().items() if size and name in places)
    found = {}
    for name, trigger in returning.items():
        place = bisect_right(own, places[trigger])
        if place:
            found[name] = order[own[place - 1]]
    return found
