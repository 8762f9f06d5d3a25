"""What stands in the place of a gradient that an update in the backward pass has used."""

from __future__ import annotations

from typing import Any

import torch

from umem.core.errors import PlanError
from umem.torch_compat import DisableTorchFunctionSubclass, make_wrapper_subclass

__all__ = ["FreedGradient", "freed_gradient"]

_TEXT = (
    "step_in_backward: this gradient was freed when the backward pass has updated its parameter, "
    "so it cannot be read, changed or added to. Call zero_grad() between optimizer.step() and the "
    "next backward(), and umem.manage without step_in_backward if the training uses gradients "
    "behind the backward pass (clipping, accumulation, a gradient scaler, logged norms)"
)


class FreedGradient(torch.Tensor):
    """A gradient without memory: it has the shape, and any use of its values is an error.

    Autograd's own addition to it is one. It can be replaced by None, as ``zero_grad()`` does.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.item):
            raise PlanError(_TEXT)
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> Any:
        raise PlanError(_TEXT)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """It wraps no tensor, for whoever looks for memory in tensor subclasses."""
        return [], None

    @staticmethod
    def __tensor_unflatten__(*_: object) -> Any:
        raise PlanError(_TEXT)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FreedGradient(shape={tuple(self.shape)})"


def freed_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """What takes the place of a parameter's gradient."""
    freed: torch.Tensor = make_wrapper_subclass(
        FreedGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
    )
    return freed
