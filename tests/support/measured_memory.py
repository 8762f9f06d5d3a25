"""The memory of a training on the CPU, counted by tensors, and a device that has so much."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from activation_chain import LazyMover
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from umem.capture.live import Clock
from umem.core.classes import TensorClass
from umem.hardware import load_hardware
from umem.offloading import ActivationStore
from umem.streaming import StreamedTraining
from umem.streaming.tune import StreamTuner, TuningStatus

__all__ = ["SCALAR_BYTES", "HostBesideMover", "MeasuredRoom", "MemoryMeter", "train_within"]

_SLACK_BYTES = 256 << 20

SCALAR_BYTES = 256
"""A measured step may have some more scalars at its fullest moment."""


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of all storages that operators have made and that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.most_bytes = 0
        """The most since the test has set it to 0."""
        self._peak_bytes = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        known = self._seen.get(storage._cdata)
        if known is None or known() is None:
            self._seen[storage._cdata] = weakref.ref(storage)
            weakref.finalize(storage, self._freed, storage.nbytes())
            self.live_bytes += storage.nbytes()
            self._peak_bytes = max(self._peak_bytes, self.live_bytes)
            self.most_bytes = max(self.most_bytes, self.live_bytes)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count the memory of a tensor that no operator was seen to make."""
        storage = tensor.untyped_storage()
        self._seen[storage._cdata] = weakref.ref(storage)

    def _freed(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes

    def take_peak_bytes(self) -> int:
        """The most since the last call."""
        peak_bytes, self._peak_bytes = self._peak_bytes, self.live_bytes
        return peak_bytes


class HostBesideMover(LazyMover):
    """Late copies, whose host memory is no memory of the device."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self._meter = meter

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        with _disable_current_modes():
            memory = super().allocate_host(size_bytes)
        self._meter.leave_out(memory)
        return memory


class MeasuredRoom(Clock, NoRoom):
    """A device with the memory that a meter counts, and a clock that ticks when it is read."""

    def __init__(self, meter: MemoryMeter, limit_bytes: int, slack_bytes: int) -> None:
        self.budget_bytes = limit_bytes + slack_bytes
        self._limit_bytes = limit_bytes
        self._meter = meter
        self._now = 0

    def mark(self) -> int:
        self._now += 1000
        return self._now

    def take_peak_bytes(self) -> int:
        """The most since the last call."""
        return self._meter.take_peak_bytes()

    def spilled_bytes(self) -> int:
        """What the fullest moment of the step had beyond the limit."""
        return max(0, self._meter.most_bytes - self._limit_bytes)


def train_within(
    model: nn.Module,
    limit_bytes: int | None,
    batch: Callable[[int], torch.Tensor],
    steps: int,
    *,
    min_bytes: int = 64,
    may_recompute: bool = False,
) -> tuple[int, list[bytes], TuningStatus | None]:
    """Train with so much memory, or without umem.

    Returns the most memory of the last step, the weights, and what became of the plan. A last step
    under a plan copies what was planned.
    """
    with MemoryMeter() as meter:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        training = tuner = plan = None
        before_bytes = 0
        if limit_bytes is not None:
            room = MeasuredRoom(meter, limit_bytes, _SLACK_BYTES)
            store = ActivationStore("cpu", HostBesideMover(meter), min_bytes=min_bytes)
            hardware = load_hardware("h200")
            tuner = StreamTuner(model, hardware, room, room, store, may_recompute=may_recompute)
            lanes, memory = LazyLanes(model, 0.0, 1), HostStateMemory()
            training = StreamedTraining(model, optimizer, lanes, memory, tuner, streams_state=False)
        for step in range(steps):
            meter.most_bytes = 0
            if tuner is not None:
                plan, before_bytes = tuner.plan, store.statistics.bytes_out
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        status = None if training is None else training.status().tuning
        if training is not None:
            training.close()
        if tuner is not None and plan is not None and plan is tuner.plan:
            planned_bytes = plan.predicted.to_host_bytes.get(TensorClass.ACTIVATIONS, 0)
            copied_bytes = store.statistics.bytes_out - before_bytes
            # Plans count tensors that are too small to be copied where a block runs twice.
            assert abs(copied_bytes - planned_bytes) <= planned_bytes / 100
        most_bytes = meter.most_bytes
    return most_bytes, [it.detach().numpy().tobytes() for it in model.parameters()], status
