"""Where tensors have their homes, and how they get other memory."""

from __future__ import annotations

from typing import Protocol

import torch

from umem.core.classes import TensorClass
from umem.runtime.aliases import has_alias
from umem.runtime.guard import can_guard
from umem.runtime.model_parts import lies_in_memory
from umem.runtime.torch_hooks.memory_access import original_data
from umem.runtime.unguarded import Unguarded
from umem.torch_compat import InferenceMode

__all__ = ["StateMemory", "is_whole", "rehome"]


class StateMemory(Protocol):
    """Where the state, weights and gradients of a device lie."""

    staged_bytes: int
    """State of several parameters, or of a span of a large one, that is staged at a time."""

    def may_stage(self, tensor: torch.Tensor) -> bool:
        """Whether a state tensor is large enough to be streamed, and fills its memory."""

    def is_movable(self, tensor: torch.Tensor) -> bool:
        """Whether that holds, and nothing else sees the memory."""
        return self.may_stage(tensor) and not has_alias((tensor,))

    def is_of_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the device's, at home too, and the program has not moved it away."""

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether a state tensor is in host memory, from where it is staged for its use."""

    def place(self, tensor: torch.Tensor, *, on_device: bool) -> None:
        """Move state to the device or to the host, if it is not there, and has room."""
        rehome(tensor, self, TensorClass.OPTIMIZER_STATE, on_device=on_device)

    def new_home(self, tensor: torch.Tensor, tensor_class: TensorClass) -> torch.Tensor | None:
        """New host memory for a tensor's contents, counted as of a class; None if there is none."""

    def new_on_device(self, tensor: torch.Tensor, tensor_class: TensorClass) -> torch.Tensor | None:
        """New memory on the device, counted as of a class; None where it has no room."""

    def block_bytes(self, size_bytes: int) -> int:
        """Bytes of the allocator's block for a tensor; what is left of it belongs to nobody."""

    def buffer(self, size_bytes: int) -> torch.Tensor | None:
        """Bytes on the device; None where it has no room for them."""


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own classes and fills its memory, which others may see."""
    return (
        can_guard(tensor)
        and lies_in_memory(tensor)
        and tensor.storage_offset() == 0
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def rehome(
    tensor: torch.Tensor, memory: StateMemory, tensor_class: TensorClass, *, on_device: bool
) -> bool:
    """Give a tensor memory on the device or at home, with its contents, if it has none there.

    Returns False where there is no room: the tensor stays where it is.
    """
    if memory.is_home(tensor) != on_device:
        return True
    with Unguarded(), InferenceMode(tensor.is_inference()):
        torch.set_grad_enabled(False)
        data = original_data.__get__(tensor)
        new = (memory.new_on_device if on_device else memory.new_home)(data, tensor_class)
        if new is None:
            return False
        original_data.__set__(tensor, new.copy_(data))
    return True
