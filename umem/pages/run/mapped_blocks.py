"""Memory that a manager keeps on the host in place, and the budget that its allocator has then."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Collection, Sequence

from torch.optim.optimizer import Optimizer

from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.pages.run.machine import Machine

__all__ = ["AllocatorBudget", "MappedBlock", "MappedBlocks", "bring_back_spilled"]

MappedBlock = tuple[int, int, TensorClass]
"""Address, bytes, and the class under which hints on it are counted."""

_CLASSES = tuple(TensorClass)
_NO_BOUND = 0


class MappedBlocks:
    """The blocks that a manager maps on the host, so that the device uses them in place.

    The allocator's budget follows them. Advice stays with memory, so it is withdrawn when a block
    is no longer wanted, and when the optimizer, the owner of the state in it, is collected.
    """

    def __init__(self, machine: Machine, optimizer: Optimizer) -> None:
        self._machine = machine
        self._held: list[MappedBlock] = []
        self._budget = AllocatorBudget(machine)
        end = weakref.finalize(optimizer, _bring_back, machine, self._held)
        end.atexit = False  # the memory goes with the process

    def held_bytes(self) -> dict[TensorClass, int]:
        """Bytes of the mapped blocks, by class."""
        total: Counter[TensorClass] = Counter()
        for _, size_bytes, tensor_class in self._held:
            total[tensor_class] += size_bytes
        return dict(total)

    @property
    def held(self) -> tuple[MappedBlock, ...]:
        """The blocks that are mapped now."""
        return tuple(self._held)

    def hold(
        self,
        blocks: Sequence[MappedBlock] = (),
        stay: Collection[int] = (),
        *,
        plan_runs: bool = False,
    ) -> None:
        """Map exactly these blocks. Blocks that are mapped already are left alone.

        `stay` has addresses of memory that is not brought to the device when it is no longer
        mapped. With `plan_runs` a plan keeps the budget from now on, and the allocator none.
        """
        known, wanted = set(self._held), set(blocks)
        _bring_back(self._machine, [it for it in self._held if it not in wanted], stay)
        for block in blocks:
            if block not in known:
                _use_in_place(self._machine, block)
        self._held[:] = blocks
        self._budget.keep(None if plan_runs else sum(size_bytes for _, size_bytes, _ in blocks))

    def release(self) -> None:
        """Give the allocator its budget back; the blocks stay mapped until the optimizer goes."""
        self._budget.release()


def _use_in_place(machine: Machine, block: MappedBlock) -> None:
    """Evict a block to the host and map it into the device's page tables."""
    address, size_bytes, tensor_class = block
    engine, device = machine.engine, machine.index
    engine.advise(
        address,
        size_bytes,
        placement="host",
        accessed_by_device=True,
        device=device,
        tensor_class=tensor_class,
    )
    engine.submit(HintOp.EVICT, address, size_bytes, device=device, tensor_class=tensor_class)


def _bring_back(
    machine: Machine, blocks: Sequence[MappedBlock], stay: Collection[int] = ()
) -> None:
    engine, device = machine.engine, machine.index
    for address, size_bytes, tensor_class in blocks:
        engine.advise(
            address,
            size_bytes,
            placement="device",
            read_mostly=machine.policy.rules[tensor_class.number].read_mostly,
            device=device,
            tensor_class=tensor_class,
        )
        if address not in stay:
            engine.submit(
                HintOp.PREFETCH, address, size_bytes, device=device, tensor_class=tensor_class
            )


def bring_back_spilled(machine: Machine, stay: Collection[int] = ()) -> None:
    """Bring what the allocator has mapped for the budget to the device, where a plan wants it.

    Memory at the addresses in `stay` is not brought now. It may move from now on, too.
    """
    allocator, index = machine.allocator, machine.index
    if allocator is None or not allocator.kind_stats(index)["managed"]["spilled_bytes"]:
        return
    allocator.empty_cache()  # free memory on the host would serve requests before the device does
    for address, _, block_bytes, number, _, _ in allocator.unspill(index):
        if address not in stay:
            machine.engine.submit(
                HintOp.PREFETCH, address, block_bytes, device=index, tensor_class=_CLASSES[number]
            )


_lock = threading.RLock()  # a manager may be collected, and release its budget, while it is held
_shares: dict[tuple[int, int], dict[AllocatorBudget, int | None]] = {}
"""For each allocator and device: the bytes that each manager has mapped on the host; None while a
plan runs. A budget keeps its allocator alive, so that its id is not reused."""


class AllocatorBudget:
    """What one manager lets the allocator place on a device; nothing without a budget.

    The allocator counts live memory, wherever its pages are: its bound is the budget plus what
    managers have mapped on the host. While a plan runs, that keeps the budget, without a bound.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._key = (id(machine.allocator), machine.index)

    def release(self) -> None:
        """Forget this manager. Later calls do nothing."""
        with _lock:
            shares = _shares.get(self._key, {})
            if shares.pop(self, 0) != 0:
                self._set_bound(shares)
            if not shares:
                _shares.pop(self._key, None)

    def keep(self, mapped_bytes: int | None = 0) -> None:
        """Let the allocator keep the budget, beside memory mapped on the host; None for a plan."""
        with _lock:
            shares = _shares.get(self._key, {})
            if shares.get(self, 0) != mapped_bytes:
                _shares[self._key] = shares
                shares[self] = mapped_bytes
                self._set_bound(shares)

    def _set_bound(self, shares: dict[AllocatorBudget, int | None]) -> None:
        allocator, budget_bytes = self._machine.allocator, self._machine.policy.device_budget_bytes
        if allocator is None or not budget_bytes:
            return
        mapped = [share for share in shares.values() if share is not None]
        is_bound = len(mapped) == len(shares)
        bound_bytes = budget_bytes + sum(mapped) if is_bound else _NO_BOUND
        allocator.set_device_budget(self._machine.index, bound_bytes)
