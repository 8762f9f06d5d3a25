"""Optimizer state of a GPU: at home in page-locked host memory, or in the device's own."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from umem.core.block_sizes import block_bytes
from umem.core.classes import TensorClass
from umem.cuda import bindings
from umem.executor.optimizer.state_staging import StateMemory, is_whole
from umem.executor.phase_measurement import DeviceRoom
from umem.runtime.inspection import tensor_class
from umem.torch_compat import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["CudaRoom", "CudaStateMemory"]

_PAGE_LOCKED = TensorClass.OPTIMIZER_STATE
"""The class whose memory is page-locked under a policy that streams."""


class CudaStateMemory(StateMemory):
    """State under a policy that keeps it in page-locked memory.

    Parameters
    ----------
    device
        The GPU.
    allocator
        Serves torch's allocations, by class.
    min_bytes
        Smaller state stays on the device: the policy's ``min_bytes`` of the class.
    staged_bytes
        State that is staged at a time, at most.
    """

    def __init__(
        self, device: torch.device, allocator: Allocator, min_bytes: int, staged_bytes: int
    ) -> None:
        self.staged_bytes = staged_bytes
        self._device = device
        self._allocator = allocator
        self._min_bytes = min_bytes

    def is_movable(self, tensor: torch.Tensor) -> bool:
        """Whether it is on this GPU, whole, and not small."""
        return (
            tensor.device == self._device and tensor.nbytes >= self._min_bytes and is_whole(tensor)
        )

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether CUDA knows its memory as the host's."""
        return bindings.memory_type(tensor.data_ptr()) == "cudaMemoryTypeHost"

    def place(self, tensor: torch.Tensor, *, on_device: bool) -> None:
        """Copy to new memory, which the tensor then has."""
        if self.is_home(tensor) != on_device:
            return
        born = TensorClass.OTHER if on_device else _PAGE_LOCKED
        moved = self._new(tensor, born, TensorClass.OPTIMIZER_STATE)
        with DisableTorchFunctionSubclass(), torch.no_grad():
            tensor.data = moved.copy_(tensor)

    def home_like(self, tensor: torch.Tensor, tensor_class: TensorClass) -> torch.Tensor:
        """Page-locked memory, which the allocator gives to optimizer state."""
        return self._new(tensor, _PAGE_LOCKED, tensor_class)

    def device_like(self, tensor: torch.Tensor, tensor_class: TensorClass) -> torch.Tensor | None:
        """Plain device memory, unless the budget had it put on the host."""
        new = self._new(tensor, TensorClass.OTHER, tensor_class)
        return None if self.is_home(new) else new

    def _new(self, tensor: torch.Tensor, born: TensorClass, counted: TensorClass) -> torch.Tensor:
        """New memory as a class gets it, counted as of another one."""
        with DisableTorchFunctionSubclass(), tensor_class(born):
            new = torch.empty_like(tensor)
        self._allocator.retag(new.data_ptr(), counted.number)
        return new

    def block_bytes(self, size_bytes: int) -> int:
        """The allocator's rounding."""
        return int(block_bytes(size_bytes))

    def buffer(self, size_bytes: int) -> torch.Tensor | None:
        """Plain device memory, unless the budget had it put on the host."""
        with tensor_class(TensorClass.OTHER):
            buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return None if self.is_home(buffer) else buffer


class CudaRoom(DeviceRoom):
    """A GPU's memory by the allocator's count.

    Parameters
    ----------
    allocator
        Serves torch's allocations.
    device
        Number of the GPU.
    budget_bytes
        The policy's budget.
    homes
        Classes that have their home in page-locked host memory.
    """

    def __init__(
        self,
        allocator: Allocator,
        device: int,
        budget_bytes: int,
        homes: Collection[TensorClass] = (),
    ) -> None:
        self.budget_bytes = budget_bytes
        self._allocator = allocator
        self._device = device
        self._homes = frozenset(it.number for it in homes)
        self._home_bytes = 0

    def find_homes(self) -> None:
        """Sum the page-locked blocks of these classes."""
        self._home_bytes = sum(
            block_bytes
            for _, _, block_bytes, number, device, kind in self._allocator.live_blocks()
            if device == self._device and kind == "pinned" and number in self._homes
        )

    def take_peak_bytes(self) -> int:
        """Blocks of all kinds of memory but homes."""
        return self._allocator.take_peak_bytes(self._device) - self._home_bytes

    def spilled_bytes(self) -> int:
        """Segments, cached ones included."""
        kinds = self._allocator.kind_stats(self._device).values()
        return sum(kind["spilled_bytes"] for kind in kinds)

    def trim(self) -> None:
        """Give cached segments back."""
        self._allocator.empty_cache()
