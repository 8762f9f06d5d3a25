"""A unit of parameters, and the pieces that its state is staged in."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from umem.core.errors import PlanError
from umem.runtime.guard import Guard
from umem.streaming.stage.lanes import Lane, Lanes, Moment
from umem.streaming.stage.ring import Bundle, Slot
from umem.streaming.stage.staged_state import StagedState
from umem.streaming.step.call import ParameterGroups, parameters_of

if TYPE_CHECKING:
    from umem.streaming.step.host_units import HostWork

__all__ = ["PendingUpdate", "Piece", "StreamedUnit", "UnitGuards"]


@dataclass(frozen=True, slots=True)
class UnitGuards:
    """The guards of a unit's parameters and gradients."""

    gradients: Guard
    parameters: Guard
    flats: Guard
    """Of what a library gathers from."""


@dataclass(slots=True)
class PendingUpdate:
    """An update that no forward pass has waited for yet."""

    asked: Moment
    """When the step was called, on the stream that owns the memory of the gradients."""
    guards: tuple[Guard, ...]
    """Guards of parameters, and of gradients, until then."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """Gradients that the program has no more, and the update reads."""


class Piece(Bundle):
    """State that is staged at a time: a unit's, that of some of its parameters, or a span of one.

    Parameters
    ----------
    unit
        The unit.
    parameters
        Those that it has state of.
    state
        Their state.
    """

    lane = Lane.COPY_IN

    def __init__(self, unit: StreamedUnit, parameters: Collection[Any], state: StagedState) -> None:
        super().__init__()
        self.unit = unit
        self.state = state
        self.size_bytes = state.size_bytes
        self.queued = _groups_of(unit.groups, parameters)
        """Its parameters, by group."""
        self.is_touched = False
        """Whether something has used a home since the state was laid out."""

    @property
    def may_come(self) -> bool:
        """Not what the program may change before its update."""
        return super().may_come and not (self.is_touched or self.state.is_shared)

    def bind(self, slot: Slot | None) -> None:
        """Have a slot, and no views of another one."""
        if slot is not self.slot:
            self.state.unbind()
        self.slot = slot

    def copy_in(self, lanes: Lanes) -> Callable[[], None]:
        """Make views of the slot, and copy the state."""
        self.state.bind(self.slot)
        return partial(self.state.copy_in, lanes, self.state.binding)

    def copy_out(self, lanes: Lanes) -> Callable[[], None]:
        """Copy the state home, from where it is updated."""
        return partial(self.state.copy_out, lanes, self.state.binding)


class StreamedUnit:
    """Parameters that are updated together: those of a block, or a part of the others.

    Parameters
    ----------
    name
        The name of their block.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups: ParameterGroups = []
        """The unit's parameters."""
        self.queued: ParameterGroups = []
        """Those whose updates are queued: with state in host memory or, where units are updated in
        the backward pass, with any state."""
        self.parameters: list[Any] = []
        """The same, without groups."""
        self.state: StagedState | None = None
        """State of these parameters; None if there are none."""
        self.pieces: list[Piece] = []
        """It in the parts that are staged; one for all of it if it is not divided."""
        self.state_guard: Guard | None = None
        """It guards the state from one layout to the next."""
        self.guards: UnitGuards | None = None
        """None until they are needed first."""
        self.updated: Moment | None = None
        """The moment after the last update."""
        self.pending: PendingUpdate | None = None
        self.ahead: list[Any] = []
        """Parameters that were updated in the backward pass, whose ``step()`` is still to come."""
        self.is_touched = False
        """Whether something has used a home since the state was laid out."""
        self.sizes: tuple[int, ...] = (0,)
        """Bytes of its state that can be streamed, by piece."""
        self.device_bytes = 0
        """Those of them that are on the device for good."""
        self.fixed_bytes = 0
        """Those of them that stay in host memory, whatever a plan says: something else sees it."""
        self.home_bytes = 0
        """Parameters that were moved to host memory."""
        self.is_hosts = False
        """Whether the host makes its updates, where it can: its pieces have no slots of their
        own."""
        self.host_work: HostWork | None = None
        """The host's update that nothing has waited for yet."""
        self.host_homes: dict[Any, torch.Tensor] = {}
        """Host memory for the weights that the host updates."""

    def queue(self, parameters: Collection[Any]) -> None:
        """Set the parameters whose updates are queued, some of the unit's."""
        self.queued = _groups_of(self.groups, parameters)
        self.parameters = parameters_of(self.queued)

    @property
    def is_turned(self) -> bool:
        """Whether the elements of a divided parameter are in another order in memory by now."""
        divided = (it.state.divided for it in self.pieces)
        return any(it is not None and not it.is_contiguous() for it in divided)

    def check_not_ahead(self) -> None:
        """Raise PlanError if the backward pass has updated it, and ``step()`` is still to come."""
        if self.ahead:
            name = self.name or "the parameters outside of blocks"
            raise PlanError(
                f"step_in_backward: the backward pass has updated {name} already, and "
                "optimizer.step() was not called since. Without umem it would have its old weights "
                "and its gradients still. Call optimizer.step() right behind backward(), and "
                "umem.manage without step_in_backward for clipping, accumulation, skipped steps or "
                "any other use in between. After an error in a backward pass, load the state of "
                "the model and of the optimizer"
            )


def _groups_of(groups: ParameterGroups, parameters: Collection[Any]) -> ParameterGroups:
    every = ((number, [p for p in some if p in parameters]) for number, some in groups)
    return [(number, some) for number, some in every if some]
