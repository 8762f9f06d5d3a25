"""Optimizers whose step may be divided by parameters, and the step's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

__all__ = ["PER_PARAMETER_OPTIMIZERS", "can_slice", "plain_step"]

PER_PARAMETER_OPTIMIZERS = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers that update each parameter from its own gradient and state alone, so that a step in
parts gives the same bits."""


def can_slice(optimizer: Optimizer) -> bool:
    """Whether a step may run in parts: only for torch's own classes, not for subclasses."""
    return type(optimizer) in PER_PARAMETER_OPTIMIZERS


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The step without torch's hooks around it, which run once for the whole step."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    plain: Callable[[Optimizer], Any] = step
    return plain
