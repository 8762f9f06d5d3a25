"""The machine of an executor: a device, its hint engine, its hardware figures and the policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.hardware import Hardware, detect_hardware
from umem.offloading import Mover
from umem.offloading.movers import returning_bytes
from umem.pages.run.background import Background, run_in_thread
from umem.policy import ResolvedPolicy, without
from umem.runtime.hints import HintEngine, HintSettings
from umem.runtime.host_room import share_bytes
from umem.runtime.model_parts import buffers_of, optimizer_parameters, storage_addresses, tensors_in
from umem.runtime.state import runtime

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = [
    "Machine",
    "cuda_machine",
    "held_host_bytes",
    "within_host",
]


@dataclass(frozen=True)
class Machine:
    """One device and what moves its memory."""

    device: torch.device
    engine: HintEngine
    hardware: Hardware
    policy: ResolvedPolicy
    allocator: Allocator | None
    """The native allocator, which keeps the budget while no plan runs."""
    mover: Mover | None
    """Copies activations; None for that of the device."""
    stream: Callable[[], int]
    """Returns the handle of the current stream of the calling thread."""
    is_capturing: Callable[[], bool]
    """Whether a CUDA graph of that stream is being captured."""
    background: Background = run_in_thread

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
    hardware: Hardware,
    held_bytes: int = 0,
    host_bytes: Callable[[], int | None] = share_bytes,
) -> Hardware:
    """The hardware with the host memory that a plan may use, so that no plan takes more.

    That is this process's share of what is available (`host_bytes`, None where unknown), and what
    it holds already (:func:`held_host_bytes`): no byte is given twice.
    """
    own_bytes = host_bytes()
    if own_bytes is None:
        return hardware
    return replace(hardware, host_bytes=min(hardware.host_bytes, own_bytes + held_bytes))


def held_host_bytes(
    allocator: Allocator, device: int, model: nn.Module, optimizer: Optimizer
) -> int:
    """Host memory that is not available, and that a plan for this training may use all the same.

    A plan needs host memory for all tensors of the training that are off the device, of which this
    process has page-locked some already. No byte is added that the need lacks, or twice. Live
    pinned blocks of the training are tensors of its plan; those of others stay, and are not added.
    Cached pinned blocks go to the training's next pinned tensors. A closed pool's buffer is gone
    with the graph of a step that began under a closed manager, before a new one has a plan; buffers
    of open pools serve other trainings.
    """
    tensors = [*optimizer_parameters(optimizer), *model.parameters(), *buffers_of(model)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    tensors += tensors_in(optimizer.state)
    own = {address for tensor in tensors for address in storage_addresses(tensor)}
    others_bytes = sum(
        block_bytes
        for address, _, block_bytes, _, where, kind in allocator.live_blocks()
        if where == device and kind == "pinned" and address not in own
    )
    pinned_bytes: int = allocator.kind_stats(device)["pinned"]["reserved_bytes"]
    return pinned_bytes - others_bytes + returning_bytes()


def cuda_machine(
    device: int,
    model: nn.Module,
    optimizer: Optimizer,
    host_bytes: Callable[[], int | None] = share_bytes,
) -> Machine:
    """A GPU of this process, under the policy that umem was enabled with, for one training.

    `host_bytes` returns what the training may take of the host.

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
        hardware=within_host(
            detect_hardware(device),
            held_host_bytes(state.allocator, device, model, optimizer),
            host_bytes,
        ),
        policy=state.resolved,
        allocator=state.allocator,
        mover=None,
        stream=lambda: current_raw_stream(device),
        is_capturing=torch.cuda.is_current_stream_capturing,
    )


@functools.cache
def _process_engine() -> HintEngine:
    """One engine for all models and devices of the process, with two driver calls each way."""
    call_bytes = detect_hardware(0).call_bytes
    engine = HintEngine.on_cuda(
        HintSettings(chunk_bytes=call_bytes, in_flight_bytes=2 * call_bytes, without=without())
    )
    engine.listen_to_releases(runtime().allocator)
    return engine
