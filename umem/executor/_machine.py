"""What an executor works with: a device, its hint engine, its figures and the policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from umem.activations import Mover
from umem.allocator import runtime
from umem.classes import TensorClass
from umem.hardware import Hardware
from umem.hints import HintEngine
from umem.host import host_memory_bytes
from umem.policy import ResolvedPolicy
from umem.schedule import HintOp

if TYPE_CHECKING:
    from umem._native import Allocator

__all__ = ["SMALLEST_BYTES", "Machine", "cuda_machine", "within_host"]

SMALLEST_BYTES = 2 << 20
"""Blocks from here on have pages of their own; moving a smaller one would move its neighbours."""

_CLASSES = tuple(TensorClass)


@dataclass(frozen=True)
class Machine:
    """One device and what moves its memory.

    Parameters
    ----------
    device
        Where the model trains.
    engine
        Moves pages.
    hardware
        What the planner reckons with.
    policy
        Budget, rules and planner.
    allocator
        Whose own way of keeping the budget is lifted while a plan runs; None where there is none.
    mover
        Copies activations; None for that of the device.
    stream
        Handle of the stream that the caller's thread works on.
    """

    device: torch.device
    engine: HintEngine
    hardware: Hardware
    policy: ResolvedPolicy
    allocator: Allocator | None
    mover: Mover | None
    stream: Callable[[], int]

    @property
    def index(self) -> int:
        """Number of the device."""
        return self.device.index or 0

    def everything_fits(self) -> bool:
        """Whether the tensors of the run so far fitted the budget together."""
        if self.allocator is None:
            return False
        peak: int = self.allocator.stats(self.index)["allocated_bytes"]["all"]["peak"]
        return peak <= (self.policy.device_budget_bytes or self.hardware.device_bytes)

    def restore_allocator_budget(self) -> None:
        """Let the allocator keep the budget: past it, new memory is mapped on the host."""
        if self.allocator is not None:
            budget_bytes = self.policy.device_budget_bytes or 0
            self.allocator.set_device_budget(self.index, budget_bytes)

    def lift_allocator_budget(self) -> None:
        """Keep the budget without the allocator's help, and undo what it has mapped for it."""
        if self.allocator is None:
            return
        self.allocator.set_device_budget(self.index, 0)
        if not self.allocator.kind_stats(self.index)["managed"]["spilled_bytes"]:
            return
        self.allocator.empty_cache()
        for address, _, block_bytes, number, device, kind in self.allocator.live_blocks():
            rule = self.policy.rules[number]
            if (
                device != self.index
                or kind != "managed"
                or block_bytes < SMALLEST_BYTES
                or rule.placement == "host"
            ):
                continue
            tensor_class = _CLASSES[number]
            self.engine.advise(
                address,
                block_bytes,
                placement=rule.placement,
                read_mostly=rule.read_mostly,
                device=device,
                tensor_class=tensor_class,
            )
            self.engine.submit(
                HintOp.PREFETCH, address, block_bytes, device=device, tensor_class=tensor_class
            )


def within_host(
    hardware: Hardware,
    host_bytes: Callable[[], tuple[int, int] | None] = host_memory_bytes,
) -> Hardware:
    """A machine whose host memory is what is available now, so that no plan takes more.

    Parameters
    ----------
    hardware
        With all that the host has.
    host_bytes
        Tells the host's (total, available) memory in bytes, or None.
    """
    known = host_bytes()
    if known is None:
        return hardware
    return replace(hardware, host_bytes=min(hardware.host_bytes, known[1]))


def cuda_machine(device: int) -> Machine:
    """A GPU of this process, under the policy that umem was enabled with.

    Raises
    ------
    EnableError
        If umem is not enabled.
    UnsupportedError, NativeLibraryError
        If there can be no hints.
    """
    state = runtime()
    engine = _process_engine()
    engine.start(device)
    return Machine(
        device=torch.device("cuda", device),
        engine=engine,
        hardware=within_host(Hardware.detect(device)),
        policy=state.resolved,
        allocator=state.allocator,
        mover=None,
        stream=lambda: torch._C._cuda_getCurrentRawStream(device),
    )


@functools.cache
def _process_engine() -> HintEngine:
    """One engine for all models of the process: they share the link."""
    engine = HintEngine.on_cuda()
    engine.listen_to_releases(runtime().allocator)
    return engine
