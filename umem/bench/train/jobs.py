"""What a training worker is asked to do, and what it answers."""

from __future__ import annotations

from typing import Literal

from umem.bench.results_file import Record
from umem.bench.train.results import (
    HintedStep,
    ManagerFigures,
    Method,
    ProfiledStep,
    TrainingModel,
    Variant,
)

__all__ = ["TrainingAnswer", "TrainingJob"]


class TrainingJob(Record):
    """One variant with one budget; sizes in bytes."""

    model: TrainingModel
    method: Method
    variant: Variant
    budget_bytes: int | None
    steps: int
    deterministic: bool
    managed_limit_bytes: int
    device: Literal["cuda", "cpu"] = "cuda"
    """On the CPU there is only the stock variant, with nothing to profile and no peaks."""


class TrainingAnswer(Record):
    """A worker's answer; `state` and `reason` say why there are no figures."""

    state: Literal[
        "ready",
        "measured",
        "off",
        "failed",
        "not installed",
        "not comparable",
        "cannot fork",
        "no answer",
    ]
    reason: str | None = None
    parameters: int = 0
    warm_steps: int = 0
    plan_running: bool | None = None
    manager: ManagerFigures | None = None
    steps_s: tuple[float, ...] = ()
    sm_clock_mhz: float | None = None
    losses_hex: tuple[str, ...] = ()
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    resident_bytes: int | None = None
    optimizer_state_bytes: int | None = None
    host_state_bytes: int | None = None
    unseen_bytes: int | None = None
    mapped_bytes_per_s: float | None = None
    profile: ProfiledStep | None = None
    hinted: HintedStep | None = None
    notes: tuple[str, ...] = ()
    device_flops_per_s: float | None = None
    """Of the stock variant only."""
    timed_out: bool = False
    """Whether the process was ended because its time was over."""
