"""The status of a manager: its state, its plans and what became of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from umem.core.report import MigrationReport
from umem.policy import PolicyPlanner

__all__ = ["ManagerState", "ManagerStatus"]


class ManagerState(StrEnum):
    """The states of a manager, in the order in which a training reaches them."""

    WARMING_UP = "warming up"
    """The first two steps, in which the optimizer makes its state. Under :func:`umem.enable` the
    training's own first step comes before them."""
    RECORDING = "recording"
    """Steps are recorded, without a plan."""
    PLANNING = "planning"
    """A plan is searched for beside the training."""
    RUNNING = "running"
    """Steps run under a plan."""
    RESIDENT = "resident"
    """Everything fits the budget: there is nothing to do."""
    OFF = "off"
    """The manager has given up or was closed; ``reason`` says why."""


@dataclass(frozen=True)
class ManagerStatus:
    """Current state of a manager, and counts over the training so far.

    Parameters
    ----------
    state
        Current state.
    reason
        Why the state is ``OFF``; empty otherwise.
    planner
        ``planned``, ``lookahead`` or ``fault``.
    budget_bytes
        Device budget; None for all of the device.
    predicted
        Predicted step under the plan for the shapes seen last; None before there is a plan.
    plans
        Number of batch shapes that have a plan.
    steps, diverged_steps
        Steps carried out as planned; steps that were not, because an exception ended them or
        their phases differ from the recorded ones.
    unplanned
        Steps of shapes without a plan, which ran under one for other shapes.
    wait_s
        Time that the training thread has waited for pages, over all steps.
    wait_timeouts
        Waits for pages that were given up after 2 s; the pages came by fault.
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
