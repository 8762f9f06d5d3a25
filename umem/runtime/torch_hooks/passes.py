"""Which pass through a model a thread is in: the one place that asks torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from umem.torch_compat import current_graph_task_id, function_transform_level

__all__ = ["Pass", "is_forward_pass", "running_pass"]


class Pass(NamedTuple):
    """A pass through a model."""

    has_gradients: bool
    """Whether autograd records it."""
    is_second: bool
    """Whether a backward pass runs: a checkpoint calls the block again."""
    is_transform: bool
    """Whether a function of ``torch.func`` is transformed, whose tensors are wrappers."""
    is_forward: bool
    """Whether it is neither of these."""
    is_training: bool
    """Whether it is a forward pass that autograd records."""


def _passes(has_gradients: bool, is_second: bool) -> tuple[Pass, Pass]:
    is_forward = not is_second
    return (
        Pass(has_gradients, is_second, False, is_forward, has_gradients and is_forward),
        Pass(has_gradients, is_second, True, False, False),
    )


# Made once: blocks are called often.
_PASSES = tuple(
    tuple(_passes(has_gradients, is_second) for is_second in (False, True))
    for has_gradients in (False, True)
)


def running_pass() -> Pass:
    """Return the pass that this thread is in."""
    of_gradients = _PASSES[torch.is_grad_enabled()]
    return of_gradients[current_graph_task_id() != -1][function_transform_level() is not None]


def is_forward_pass() -> bool:
    """Whether no compiler traces the call, and it is neither transformed nor in a backward pass."""
    return not is_compiling() and running_pass().is_forward
