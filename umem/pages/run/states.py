"""The events that change the state of a manager, the table of both, and the steps it has seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from umem.capture.live import CallShapes
from umem.pages.run.status import ManagerState

__all__ = ["TRANSITIONS", "Event", "Progress"]

_DIVERGED = 3
"""Diverging steps in a row after which the training counts as changed; twice as many each time, as
some trainings never do the same twice."""


class Event(StrEnum):
    """What changes the state of a manager."""

    FITS = "fits"
    """After warm-up: all tensors so far have fitted the budget."""
    DOES_NOT_FIT = "does not fit"
    """After warm-up: they have not."""
    RECORDED = "recorded"
    """Enough steps were recorded, or recording them has failed."""
    PLANNED = "planned"
    """The search has found plans."""
    NOTHING_TO_MOVE = "nothing to move"
    """The search has found that everything stays where it is."""
    NEW_SHAPES = "new shapes"
    """Batches of unknown shapes have come for the second time."""
    CHANGED = "changed"
    """The training is no longer the recorded one."""
    NO_PLAN = "no plan"
    """No plan can be made, or no step of the model is seen."""
    ENDED = "ended"
    """The manager was closed, or has met an error."""


TRANSITIONS: Mapping[tuple[ManagerState, Event], ManagerState] = MappingProxyType({
    (ManagerState.WARMING_UP, Event.FITS): ManagerState.RESIDENT,
    (ManagerState.WARMING_UP, Event.DOES_NOT_FIT): ManagerState.RECORDING,
    (ManagerState.WARMING_UP, Event.NO_PLAN): ManagerState.OFF,
    (ManagerState.RECORDING, Event.RECORDED): ManagerState.PLANNING,
    (ManagerState.RECORDING, Event.CHANGED): ManagerState.RECORDING,
    (ManagerState.PLANNING, Event.PLANNED): ManagerState.RUNNING,
    (ManagerState.PLANNING, Event.NOTHING_TO_MOVE): ManagerState.RESIDENT,
    (ManagerState.PLANNING, Event.CHANGED): ManagerState.RECORDING,
    (ManagerState.PLANNING, Event.NO_PLAN): ManagerState.OFF,
    (ManagerState.RUNNING, Event.NEW_SHAPES): ManagerState.RECORDING,
    (ManagerState.RUNNING, Event.CHANGED): ManagerState.RECORDING,
    (ManagerState.RUNNING, Event.NO_PLAN): ManagerState.OFF,
    (ManagerState.RESIDENT, Event.NEW_SHAPES): ManagerState.RECORDING,
    (ManagerState.RESIDENT, Event.CHANGED): ManagerState.RECORDING,
    **{(state, Event.ENDED): ManagerState.OFF for state in ManagerState},
})  # fmt: skip
"""The state after each event. An event that a state does not have here changes nothing."""


@dataclass(slots=True)
class Progress:
    """The steps that a manager has seen."""

    steps: int = 0
    recording_since: int = 0
    """Steps before the present recording."""
    is_in_step: bool = False
    """Between a step's first forward pass and its optimizer's step."""
    unseen: int = 0
    """Steps since the last one in which the model was called."""
    unplanned: int = 0
    """Steps of shapes without a plan."""
    unknown: Counter[CallShapes] = field(default_factory=Counter)
    """The same by shape."""
    most_diverged: int = _DIVERGED
    """Diverging steps in a row that are borne."""
