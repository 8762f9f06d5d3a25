"""What stands in the place of a gradient that an update in the backward pass has used."""

from __future__ import annotations

import torch

from umem.core.errors import PlanError
from umem.runtime.guard import Guard, guard_of

__all__ = ["freed_gradient", "is_freed"]


def _refuse() -> None:
    raise PlanError(
        "step_in_backward: this gradient was freed when the backward pass has updated its "
        "parameter, so it cannot be read, changed or added to. Call zero_grad() between "
        "optimizer.step() and the next backward(), and umem.manage without step_in_backward if the "
        "training uses gradients behind the backward pass (clipping, accumulation, a gradient "
        "scaler, logged norms)"
    )


_guard = Guard(_refuse)


def freed_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of a parameter's shape and no values: any use of these is an error.

    Autograd's own addition to it is one. It can be replaced by None, as ``zero_grad()`` does.
    """
    freed = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    _guard.watch([freed])
    return freed


def is_freed(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient was freed."""
    return gradient is not None and guard_of(gradient) is _guard
