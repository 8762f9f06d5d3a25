"""Room on the device for optimizer state, until a plan for it is made.

A policy that streams optimizer state has it born in page-locked host memory. A plan then keeps on
the device what fits there. To page-lock memory for that part would take seconds and host memory for
a few steps' use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch.optim.optimizer import Optimizer

from umem.core.classes import TensorClass
from umem.runtime.model_parts import memory_bytes, optimizer_parameters
from umem.streaming.plan.state_plan import least_slack_bytes
from umem.streaming.plan.step_timing import FIRST_SLOTS, largest_slot_bytes

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["StateRoom"]


class StateRoom:
    """Has state that fits the device born there.

    Parameters
    ----------
    allocator
        Serves torch's allocations.
    budgets
        Device memory in bytes by GPU; None for a GPU whose state is born in host memory.
    """

    def __init__(self, allocator: Allocator, budgets: Sequence[int | None]) -> None:
        self._allocator = allocator
        self._budgets = budgets
        self._given = [0] * len(budgets)
        self._used = [0] * len(budgets)

    def open(self, optimizer: Optimizer) -> None:
        """Before a step in which an optimizer makes state: give what no earlier pass has needed."""
        for device in _devices(optimizer):
            self._given[device] = room_bytes = self._room_bytes(optimizer, device)
            self._allocator.set_device_room(device, TensorClass.OPTIMIZER_STATE.number, room_bytes)

    def close(self, optimizer: Optimizer) -> None:
        """Behind that step."""
        for device in _devices(optimizer):
            left = self._allocator.set_device_room(device, TensorClass.OPTIMIZER_STATE.number, 0)
            self._used[device] += self._given[device] - left
            self._given[device] = 0

    def _room_bytes(self, optimizer: Optimizer, device: int) -> int:
        budget_bytes = self._budgets[device]
        if budget_bytes is None:
            return 0
        taken_bytes = self._allocator.stats(device)["highest_bytes"] + self._used[device]
        taken_bytes += least_slack_bytes(budget_bytes)
        taken_bytes += FIRST_SLOTS * largest_slot_bytes(budget_bytes)
        return max(0, budget_bytes - taken_bytes - _temporary_bytes(optimizer))


def _devices(optimizer: Optimizer) -> Collection[int]:
    found = {it.device for it in optimizer_parameters(optimizer) if it.device.type == "cuda"}
    return {device.index or 0 for device in found}


def _temporary_bytes(optimizer: Optimizer) -> int:
    """What functions over lists of tensors allocate in a step: as much as the parameters."""
    return sum(
        memory_bytes(parameter)
        for group in optimizer.param_groups
        if not group.get("fused") and group.get("foreach") is not False
        for parameter in group["params"]
    )
