"""A tuner's states, what leads from one to another, and what its plan keeps where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from umem.offloading import ActivationStatistics
from umem.streaming.plan.state_plan import StreamPlan

__all__ = ["TRANSITIONS", "TuningEvent", "TuningState", "TuningStatus"]


class TuningState(StrEnum):
    """What a tuner does."""

    MEASURING = "measuring"
    """Steps run as they are, or under the plan so far, and are measured."""
    PLANNED = "planned"
    """Steps run under a plan."""
    NO_PLAN_FITS = "no plan fits"
    """The budget is too small: by plan, all that can leave the device does, and tensors that have
    no room are used in host memory."""
    OFF = "off"
    """Not begun; or an error has ended measurements, and the last plan stays."""


class TuningEvent(StrEnum):
    """What changes the state of a tuner."""

    BEGINS = "begins"
    """The model has its first optimizer."""
    CHANGED = "changed"
    """Optimizers of the model, or trainings and models on the device, have come or gone; or
    parameters that no module holds have moved to the host, because no plan fits with them."""
    MOVED_INTO_BACKWARD = "moved into backward"
    """Parameters are updated in the backward pass from now on."""
    TIMES_DISTURBED = "times disturbed"
    """Something has slowed the steps that the plan is made from: tensors were in host memory, or
    steps under the plan are much faster than it predicts."""
    MEMORY_RAN_OUT = "memory ran out"
    """Under the plan, the budget has put more into host memory."""
    PLAN_FITS = "plan fits"
    """A plan was made, of steps that were measured or, for other sizes or shares, of the same."""
    NO_PLAN_FITS = "no plan fits"
    """The plan is for tensors in host memory, too."""
    ENDED = "ended"
    """The tuner was closed, or a measurement has failed."""


_MEASURED = (TuningState.PLANNED, TuningState.NO_PLAN_FITS)
_ACTIVE = (TuningState.MEASURING, *_MEASURED)

TRANSITIONS: Mapping[tuple[TuningState, TuningEvent], TuningState] = MappingProxyType({
    (TuningState.OFF, TuningEvent.BEGINS): TuningState.MEASURING,
    **{(state, TuningEvent.CHANGED): TuningState.MEASURING for state in _ACTIVE},
    **{(state, TuningEvent.MOVED_INTO_BACKWARD): TuningState.MEASURING for state in _ACTIVE},
    **{(state, TuningEvent.TIMES_DISTURBED): TuningState.MEASURING for state in _MEASURED},
    **{(state, TuningEvent.MEMORY_RAN_OUT): TuningState.MEASURING for state in _MEASURED},
    **{(state, TuningEvent.PLAN_FITS): TuningState.PLANNED for state in _ACTIVE},
    **{(state, TuningEvent.NO_PLAN_FITS): TuningState.NO_PLAN_FITS for state in _ACTIVE},
    **{(state, TuningEvent.ENDED): TuningState.OFF for state in TuningState},
})  # fmt: skip
"""The state after each event. No other event comes in a state."""


@dataclass(frozen=True)
class TuningStatus:
    """A tuner's state, and its plan."""

    state: TuningState
    budget_bytes: int
    share_bytes: int | None
    """What the plan may keep on the device of state, slots, and weights that are streamed; None
    where no other training or model is on it."""
    plan: StreamPlan | None
    """The plan in force; None before the first one."""
    plans: int
    """Number of plans so far."""
    resident_bytes: int
    """Optimizer state that the plan keeps on the device."""
    copied_bytes: int
    """Activations that the plan copies out in each forward pass."""
    copied_blocks: int
    recomputed_blocks: int
    """Blocks that run forward again in the backward pass."""
    remakes_results: bool
    """Whether results of cheap modules are made again in the backward pass."""
    left_out_checkpoints: int
    """Blocks without the checkpoints that the program has there."""
    slices_losses: bool
    """Whether large losses are computed in slices of rows."""
    copied_gradients_bytes: int
    """Gradients that the plan copies out in each step."""
    returning_gradients_bytes: int
    """Of these, what comes back to the device before the step."""
    overflow_bytes: int
    """What has no room on the device at the fullest moment, by plan, and is used in host memory."""
    predicted_s: float | None
    """A step under the plan, by prediction."""
    measured_s: float | None
    """A step under the plan, once it is in force, on the device's clock: the middle one of three.
    None before these are over."""
    spilled_bytes: int
    """Host memory that is held because of the budget, beside weights that were made there."""
    activations: ActivationStatistics
    """Copies of activations so far."""
