"""What a manager says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from umem.core.report import MigrationReport
from umem.policy import PolicyPlanner

__all__ = ["ManagerState", "ManagerStatus"]


class ManagerState(StrEnum):
    """What a manager is at."""

    WARMING_UP = "warming up"
    """Its first two steps: the optimizer makes its state. Under :func:`umem.enable` the first one
    of the training has gone by then."""
    RECORDING = "recording"
    RUNNING = "running"
    """Steps are carried out as planned."""
    RESIDENT = "resident"
    """Everything fits the budget: there is nothing to do."""
    OFF = "off"
    """It has given up; the reason says why."""


@dataclass(frozen=True)
class ManagerStatus:
    """What a manager is at, and how it goes.

    Parameters
    ----------
    state
        What it is at.
    reason
        Why it is off; empty otherwise.
    planner
        ``planned``, ``lookahead`` or ``fault``.
    budget_bytes
        Device budget; None for all of the device.
    predicted
        What the plan of the shapes seen last should come to; None before there is one.
    plans
        Shapes of batches that have a plan.
    steps, diverged_steps
        Steps carried out as planned; steps that were not, because of an exception or of phases
        unlike the recorded ones.
    unplanned
        Steps of shapes without a plan, which ran under one for other shapes.
    wait_s
        Time that the training thread has waited for pages, in all steps.
    wait_timeouts
        Waits for pages that took too long; the pages came by fault.
    corrections
        Plans made anew from measured bandwidths.
    step_in_backward
        Whether the optimizer's step is done in the backward pass.
    """

    state: ManagerState
    reason: str
    planner: PolicyPlanner
    budget_bytes: int | None
    predicted: MigrationReport | None
    plans: int
    steps: int
    diverged_steps: int
    unplanned: int
    wait_s: float
    wait_timeouts: int
    corrections: int
    step_in_backward: bool
