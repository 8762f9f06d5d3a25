"""What a tuner does, and what its plan keeps where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from umem.offloading import ActivationStatistics
from umem.streaming.plan.state_plan import StreamPlan

__all__ = ["TuningState", "TuningStatus"]


class TuningState(StrEnum):
    """What a tuner does."""

    MEASURING = "measuring"
    """Steps run as they are, or under the plan so far, and are measured."""
    PLANNED = "planned"
    """Steps run under a plan."""
    NO_PLAN_FITS = "no plan fits"
    """The budget is too small for a plan: all state is streamed, and all activations and gradients
    are copied."""
    OFF = "off"
    """An error has ended measurements; the last plan stays."""


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
    copied_gradients_bytes: int
    """Gradients that the plan copies out in each step."""
    returning_gradients_bytes: int
    """Of these, what comes back to the device before the step."""
    predicted_s: float | None
    """A step under the plan, by prediction."""
    spilled_bytes: int
    """Host memory that is held because of the budget, beside weights that were made there."""
    activations: ActivationStatistics
    """Copies of activations so far."""
