"""Tensor subclasses that wrap other tensors, as the parts of a sharded model do."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["wrapped_tensors"]


def wrapped_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that a tensor subclass wraps; None for a tensor that wraps none.

    What else it is made of is left out: a DTensor names its mesh of devices too.
    """
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return None
    parts = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, torch.Tensor)]
