"""Room on the device for optimizer state, until a plan for it is made.

A policy that streams optimizer state has it born in page-locked host memory. A plan then keeps on
the device what fits there. To page-lock memory for that part would take seconds and host memory for
a few steps' use. Memory for the other part is page-locked beside the first passes.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.core.classes import TensorClass
from umem.runtime.cuda_streams import CurrentStream
from umem.runtime.model_parts import memory_bytes, optimizer_parameters
from umem.streaming.plan.state_plan import least_slack_bytes
from umem.streaming.plan.step_timing import FIRST_SLOTS, largest_slot_bytes

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["StateRoom", "lock_ahead"]

_TWO_AVERAGES = torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam
"""Optimizers with two tensors of state as large as a parameter, or three: the most."""

_MOST_COPIES = 3


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

    def expect(self, model: nn.Module) -> None:
        """Before a model's first pass: have memory locked beside it for state that is to come.

        It is no more than the first step asks for, whose activations take room, too.
        """
        trained = [it for it in model.parameters() if it.requires_grad and it.is_cuda]
        if not torch.is_grad_enabled():
            return
        for device in {it.device.index or 0 for it in trained}:
            stats, trained_bytes = self._allocator.stats(device), _bytes_on(device, trained)
            live_bytes = stats["allocated_bytes"]["all"]["current"] + trained_bytes  # gradients
            room_bytes = self._left_bytes(device, live_bytes)
            if self._budgets[device] is None or room_bytes > _MOST_COPIES * trained_bytes:
                continue
            # No list of torch's has all optimizers. One that an error has ended the making of has
            # no groups.
            every = [it for it in gc.get_objects() if issubclass(type(it), Optimizer)]
            born_bytes = sum(
                _copies(it, group) * _bytes_on(device, group["params"])
                for it in every
                if not vars(it).get("state")
                for group in vars(it).get("param_groups", ())
            )
            born_bytes -= max(0, room_bytes) + stats["locked_ahead_bytes"]
            lock_ahead(self._allocator, device, born_bytes)

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
        needed_bytes = self._allocator.stats(device)["highest_bytes"] + _temporary_bytes(optimizer)
        return max(0, self._left_bytes(device, needed_bytes))

    def _left_bytes(self, device: int, needed_bytes: int) -> int:
        """What all else, earlier state, slack and slots leave; nothing without a budget."""
        budget_bytes = self._budgets[device]
        if budget_bytes is None:
            return 0
        taken_bytes = needed_bytes + self._used[device] + least_slack_bytes(budget_bytes)
        return budget_bytes - taken_bytes - FIRST_SLOTS * largest_slot_bytes(budget_bytes)


def lock_ahead(allocator: Allocator, device: int, size_bytes: int) -> None:
    """Begin to lock as much for homes that a GPU's tensors will get on this stream."""
    if size_bytes > 0:
        atexit.register(allocator.end_locking_ahead, device)
        # Without CUDA, in tests, there is the default stream alone.
        has_streams = torch.cuda.is_initialized()
        stream = CurrentStream(torch.device("cuda", device)).handle() if has_streams else 0
        allocator.lock_ahead(device, size_bytes, stream)


def _devices(optimizer: Optimizer) -> Collection[int]:
    found = {it.device for it in optimizer_parameters(optimizer) if it.device.type == "cuda"}
    return {device.index or 0 for device in found}


def _bytes_on(device: int, parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of those that are trained on a GPU."""
    its = (it for it in parameters if it.is_cuda and (it.device.index or 0) == device)
    return sum(memory_bytes(it) for it in its if it.requires_grad)


def _copies(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    """Tensors of state as large as a parameter, where the optimizer's class tells them."""
    if isinstance(optimizer, _TWO_AVERAGES):
        return 2 + bool(group.get("amsgrad"))
    return int(isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0)


def _temporary_bytes(optimizer: Optimizer) -> int:
    """What functions over lists of tensors allocate in a step: as much as the parameters."""
    return sum(
        memory_bytes(parameter)
        for group in optimizer.param_groups
        if not group.get("fused") and group.get("foreach") is not False
        for parameter in group["params"]
    )
