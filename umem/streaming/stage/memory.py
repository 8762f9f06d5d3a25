"""Optimizer state of a GPU: at home in page-locked host memory, or in the device's own."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from umem.core.block_sizes import block_bytes
from umem.core.classes import TensorClass
from umem.runtime.native_library import native
from umem.runtime.peak_reader import PeakReader
from umem.runtime.refused_memory import unless_refused
from umem.runtime.unfilled_memory import unfilled_bytes, unfilled_like
from umem.runtime.unguarded import addresses_of
from umem.streaming.stage.device_room import DeviceRoom
from umem.streaming.stage.homes import StateMemory, is_whole
from umem.streaming.stage.state_room import lock_ahead

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["CudaRoom", "CudaStateMemory"]

_LOG = logging.getLogger("umem")


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
        self._has_warned = False

    def may_stage(self, tensor: torch.Tensor) -> bool:
        """Whether it is on this GPU, whole, and not small."""
        return (
            tensor.device == self._device and is_whole(tensor) and tensor.nbytes >= self._min_bytes
        )

    def is_of_device(self, tensor: torch.Tensor) -> bool:
        """Whether torch counts it as this GPU's."""
        return tensor.device == self._device

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether CUDA knows its memory as the host's."""
        return bool(native().memory_type(*addresses_of((tensor,))) == "host")

    def place(self, tensor: torch.Tensor, *, on_device: bool) -> None:
        """Move state, and count it as such: what the program has moved back has another class."""
        super().place(tensor, on_device=on_device)
        (address,) = addresses_of((tensor,))
        self._allocator.retag(address, TensorClass.OPTIMIZER_STATE.number)

    def new_home(self, tensor: torch.Tensor, tensor_class: TensorClass) -> torch.Tensor | None:
        """Page-locked memory, which the allocator gives to optimizer state."""
        new = self._like(tensor, _PAGE_LOCKED, tensor_class)
        if new is None and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "umem: page-locked host memory was refused: tensors stay on the device that have "
                "no room on the host"
            )
        return new

    def new_on_device(self, tensor: torch.Tensor, tensor_class: TensorClass) -> torch.Tensor | None:
        """Plain device memory, unless it is refused, or the budget had it put on the host."""
        new = self._like(tensor, TensorClass.OTHER, tensor_class)
        return None if new is None or self.is_home(new) else new

    def _like(
        self, tensor: torch.Tensor, born: TensorClass, counted: TensorClass
    ) -> torch.Tensor | None:
        """New memory as a class gets it, counted as of another one; None if it is refused."""
        new = unless_refused(self._allocator, born, lambda: unfilled_like(tensor))
        if new is not None:
            self._allocator.retag(new.data_ptr(), counted.number)
        return new

    def block_bytes(self, size_bytes: int) -> int:
        """The allocator's rounding."""
        return int(block_bytes(size_bytes))

    def buffer(self, size_bytes: int) -> torch.Tensor | None:
        """Plain device memory, unless it is refused, or the budget had it put on the host."""
        buffer = unless_refused(
            self._allocator, TensorClass.OTHER, lambda: unfilled_bytes(size_bytes, self._device)
        )
        return None if buffer is None or self.is_home(buffer) else buffer


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
        self._peak = PeakReader(allocator, device)
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
        return self._peak.take() - self._home_bytes

    def spilled_bytes(self) -> int:
        """Segments, cached ones included."""
        kinds = self._allocator.kind_stats(self._device).values()
        return sum(kind["spilled_bytes"] for kind in kinds)

    def spills(self) -> int:
        """Requests that the host has served in the device's place."""
        return int(self._allocator.stats(self._device)["served"]["spilled"])

    def trim(self) -> None:
        """Give cached segments back."""
        self._allocator.empty_cache()

    def lock_ahead(self, home_bytes: int) -> None:
        """Have the allocator lock what it does not hold."""
        held_bytes = self._allocator.kind_stats(self._device)["pinned"]["reserved_bytes"]
        lock_ahead(self._allocator, self._device, home_bytes - held_bytes)
