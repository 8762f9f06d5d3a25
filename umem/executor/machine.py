"""The machine of an executor: a device, its hint engine, its hardware figures and the policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from umem.hardware import Hardware, detect_hardware
from umem.hardware.host_memory import host_memory_bytes
from umem.offload import Mover
from umem.policy import ResolvedPolicy
from umem.runtime.hints import HintEngine, HintSettings
from umem.runtime.state import runtime

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["Machine", "cuda_machine", "within_host"]


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
        The figures that plans are made with.
    policy
        Budget, rules and planner.
    allocator
        The native allocator. Its bound on residency is lifted while a plan runs. None for none.
    mover
        Copies activations; None for that of the device.
    stream
        Returns the handle of the current stream of the calling thread.
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
        """Whether the process's tensors have fitted the budget at all times so far.

        The allocator's highest level decides: a training loop may reset torch's peaks.
        """
        if self.allocator is None:
            return False
        highest: int = self.allocator.stats(self.index)["highest_bytes"]
        return highest <= (self.policy.device_budget_bytes or self.hardware.device_bytes)


def within_host(
    hardware: Hardware, host_bytes: Callable[[], tuple[int, int] | None] = host_memory_bytes
) -> Hardware:
    """The hardware with the host memory that is available now, so that no plan takes more.

    Parameters
    ----------
    hardware
        With all that the host has.
    host_bytes
        Returns the host's (total, available) memory in bytes, or None.
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
    from umem.torch_compat import current_raw_stream  # not in a torch without CUDA

    state = runtime()
    engine = _process_engine()
    engine.start(device)
    return Machine(
        device=torch.device("cuda", device),
        engine=engine,
        hardware=within_host(detect_hardware(device)),
        policy=state.resolved,
        allocator=state.allocator,
        mover=None,
        stream=lambda: current_raw_stream(device),
    )


@functools.cache
def _process_engine() -> HintEngine:
    """One engine for all models and devices of the process, with two driver calls each way."""
    call_bytes = detect_hardware(0).call_bytes
    engine = HintEngine.on_cuda(
        HintSettings(chunk_bytes=call_bytes, in_flight_bytes=2 * call_bytes)
    )
    engine.listen_to_releases(runtime().allocator)
    return engine
