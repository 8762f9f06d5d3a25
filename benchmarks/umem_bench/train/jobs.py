"""What a training worker is asked to do, and what it answers."""

from __future__ import annotations

from typing import Literal

from umem_bench.results_file import Record
from umem_bench.train.results import Figures, Method, TrainingModel, Variant

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


class TrainingAnswer(Figures):
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
    parameters: int = 0
    device_flops_per_s: float | None = None
    """Of the stock variant only."""
