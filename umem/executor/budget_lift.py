"""Lifts the allocator's device budget while plans keep it by moving memory ahead of need."""

from __future__ import annotations

import threading

from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.executor.machine import Machine

__all__ = ["BudgetLift", "lifted_bytes"]

_RESERVE_SHARE = 0.05
_RESERVE_BYTES = 1 << 30
"""What the allocator leaves of a card without its budget, as a share and at least: the contexts
with their kernels, about half a GiB each, and what NCCL or cuDNN hold besides. A margin, not a
measurement; where the driver has to make room for these, it takes it from tensors by faults."""

_NO_BOUND = 0
_CLASSES = tuple(TensorClass)

_holders: dict[tuple[int, int], dict[BudgetLift, bool]] = {}
"""By allocator and device, and whether a plan runs. A holder keeps its allocator, so that its
identity is not reused."""
_lock = threading.RLock()  # a manager may be collected, and release its own, inside of it


def lifted_bytes(budget_bytes: int, device_bytes: int) -> int:
    """What the allocator may place on a card while plans keep the budget.

    Parameters
    ----------
    budget_bytes
        The policy's budget, which is the least.
    device_bytes
        All of the card: more than that would be populated only to be evicted by faults.
    """
    reserve_bytes = max(_RESERVE_BYTES, int(_RESERVE_SHARE * device_bytes))
    return max(budget_bytes, device_bytes - reserve_bytes)


class BudgetLift:
    """One manager's wish that the allocator leave the budget of a device to plans.

    The budget belongs to the device, and several managers share it: the allocator keeps it again
    when the last of them has released its own. Where the policy has no budget, nothing is lifted.

    Parameters
    ----------
    machine
        Whose allocator it is.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._key = (id(machine.allocator), machine.index)
        self._budget_bytes = machine.policy.device_budget_bytes or 0

    def acquire(self) -> None:
        """Let the allocator pass the budget, as far as the card goes, while no plan runs.

        The first one brings back what the allocator has mapped for the budget.
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
        """A plan runs: the allocator places all on the device.

        It counts what the plan has sent away as being there, and a training may be larger than the
        card.
        """
        with _lock:
            holders = _holders.get(self._key)
            if holders is not None and self in holders:
                holders[self] = True
                self._set_bound(holders)

    def release(self) -> None:
        """Let the allocator keep the budget, unless others still hold it lifted; again for nothing.

        Past it, new memory is mapped on the host.
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
    """Undo what the allocator has mapped on the host for the budget, if the card holds all of it.

    What is mapped beside a full card is slow; what is brought to a full card is evicted by faults,
    and a card that the driver has to oversubscribe far can hang.
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
    # At once, so that no class that changes from now on is overtaken by older advice.
    for address, _, block_bytes, number, _, _ in allocator.unspill(index):
        machine.engine.submit(
            HintOp.PREFETCH, address, block_bytes, device=index, tensor_class=_CLASSES[number]
        )
