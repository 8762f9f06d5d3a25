"""Lifts the allocator's device budget while plans keep it by moving memory ahead of need."""

from __future__ import annotations

import threading

from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.executor.machine import Machine

__all__ = ["BudgetLift", "lifted_bytes"]

_RESERVE_SHARE = 0.05
_RESERVE_BYTES = 1 << 30
"""Card memory that the allocator leaves free while the budget is lifted, as a share and at least
in bytes: for contexts with their kernels, about half a GiB each, and for NCCL and cuDNN. It is a
margin and not a measurement; where it is too small, the driver evicts tensors by faults."""

_NO_BOUND = 0
_CLASSES = tuple(TensorClass)

_holders: dict[tuple[int, int], dict[BudgetLift, bool]] = {}
"""For each allocator and device: the lifts in effect, and whether a plan runs under each. A lift
keeps its allocator alive, so that its id is not reused."""
_lock = threading.RLock()  # a manager may be collected, and release its lift, while it is held


def lifted_bytes(budget_bytes: int, device_bytes: int) -> int:
    """Bytes that the allocator may place on a card while plans keep the budget.

    Parameters
    ----------
    budget_bytes
        The policy's budget, which is the least.
    device_bytes
        Memory of the card: pages beyond it would be populated only to be evicted by faults.
    """
    reserve_bytes = max(_RESERVE_BYTES, int(_RESERVE_SHARE * device_bytes))
    return max(budget_bytes, device_bytes - reserve_bytes)


class BudgetLift:
    """One manager's request that the allocator leave the budget of a device to plans.

    The managers of a device share its budget: the allocator keeps the budget again when the last
    of them has released its request. Without a budget in the policy this class does nothing.

    Parameters
    ----------
    machine
        The device, its allocator and the policy.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._key = (id(machine.allocator), machine.index)
        self._budget_bytes = machine.policy.device_budget_bytes or 0

    def acquire(self) -> None:
        """Let the allocator exceed the budget up to the card's memory while no plan runs.

        The first request brings back the memory that the allocator has mapped for the budget.
        """
        allocator = self._machine.allocator
        if allocator is None or not self._budget_bytes:
            return
        bound_bytes = lifted_bytes(self._budget_bytes, self._machine.hardware.device_bytes)
        with _lock:
            holders = _holders.get(self._key, {})
            if holders.get(self) is False:
                return
            is_first = not holders
            holders[self] = False
            # Also where it is not the first: the last one may have been collected since.
            _holders[self._key] = holders
            self._set_bound(holders)
        if is_first:
            _bring_back(self._machine, bound_bytes)

    def leave_to_plans(self) -> None:
        """Let the allocator place everything on the device, now that a plan runs.

        The allocator counts evicted pages as resident, and a training may be larger than the
        card.
        """
        with _lock:
            holders = _holders.get(self._key)
            if holders is not None and self in holders:
                holders[self] = True
                self._set_bound(holders)

    def release(self) -> None:
        """Let the allocator keep the budget, unless other managers still lift it.

        Beyond the budget the allocator maps new memory on the host. Later calls do nothing.
        """
        allocator = self._machine.allocator
        with _lock:
            holders = _holders.get(self._key)
            if allocator is None or holders is None or self not in holders:
                return
            del holders[self]
            if holders:
                self._set_bound(holders)
            else:
                _holders.pop(self._key, None)
                allocator.set_device_budget(self._machine.index, self._budget_bytes)

    def _set_bound(self, holders: dict[BudgetLift, bool]) -> None:
        machine = self._machine
        assert machine.allocator is not None
        bound_bytes = lifted_bytes(self._budget_bytes, machine.hardware.device_bytes)
        machine.allocator.set_device_budget(
            machine.index, _NO_BOUND if any(holders.values()) else bound_bytes
        )


def _bring_back(machine: Machine, bound_bytes: int) -> None:
    """Bring memory that the allocator has mapped for the budget to the device, if all of it fits.

    Mapped memory is slow. Memory that is brought to a full card is evicted by faults, and a card
    that the driver has to oversubscribe far can hang.
    """
    allocator, index = machine.allocator, machine.index
    assert allocator is not None
    if not allocator.kind_stats(index)["managed"]["spilled_bytes"]:
        return
    allocator.empty_cache()
    held_bytes = sum(
        block_bytes
        for _, _, block_bytes, number, device, kind in allocator.live_blocks()
        if device == index
        and kind == "managed"
        and machine.policy.rules[number].placement != "host"
    )
    if held_bytes > bound_bytes:
        return
    # Prefetch at once: a block whose class changes later must not get this older advice.
    for address, _, block_bytes, number, _, _ in allocator.unspill(index):
        machine.engine.submit(
            HintOp.PREFETCH, address, block_bytes, device=index, tensor_class=_CLASSES[number]
        )
