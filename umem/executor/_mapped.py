"""Memory that the device uses in place on the host, by advice."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch.optim.optimizer import Optimizer

from umem.classes import TensorClass
from umem.executor._machine import Machine
from umem.schedule import HintOp

__all__ = ["MappedBlock", "MappedBlocks"]

MappedBlock = tuple[int, int, TensorClass]
"""Address, bytes, and the class under which hints on it are counted."""


class MappedBlocks:
    """The blocks that a plan uses in place, for as long as it runs.

    Advice stays with memory. So it is taken back when the plan ends, and when the optimizer goes,
    whose memory others will have.

    Parameters
    ----------
    machine
        Whose engine gives the advice.
    optimizer
        Whose state the blocks hold. Only a weak reference is kept.
    """

    def __init__(self, machine: Machine, optimizer: Optimizer) -> None:
        self._machine = machine
        self._held: list[MappedBlock] = []
        end = weakref.finalize(optimizer, _bring_back, machine, self._held)
        end.atexit = False  # the memory goes with the process

    def hold(self, blocks: Sequence[MappedBlock]) -> None:
        """Map these blocks, and no others. Those that are mapped stay as they are."""
        known, wanted = set(self._held), set(blocks)
        _bring_back(self._machine, [block for block in self._held if block not in wanted])
        for block in blocks:
            if block not in known:
                _use_in_place(self._machine, block)
        self._held[:] = blocks


def _use_in_place(machine: Machine, block: MappedBlock) -> None:
    """Send a block to the host, and let the device reach it there."""
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


def _bring_back(machine: Machine, blocks: Sequence[MappedBlock]) -> None:
    engine, device = machine.engine, machine.index
    for address, size_bytes, tensor_class in blocks:
        engine.advise(
            address, size_bytes, placement="device", device=device, tensor_class=tensor_class
        )
        engine.submit(
            HintOp.PREFETCH, address, size_bytes, device=device, tensor_class=tensor_class
        )
