"""Models whose layers move the clock and the memory of a made-up device, to measure and to plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from lazy_lanes import NoRoom
from torch import nn
from torch.utils.checkpoint import checkpoint

from umem.capture.live import Clock

WIDTH, ROWS, LAYERS = 32, 128, 6
LAYER_STATE = 2 * 4 * (2 * WIDTH * 2 * WIDTH)
"""Moments of the matrices: smaller state is not streamed."""

SAVED = 4 * ROWS * (WIDTH + 2 * 2 * WIDTH)
"""What a layer saves: its input, gelu's input and gelu's output."""
BASE = 10**6
"""Weights and gradients, by the room's count."""
SLACK = 256 << 20


class Machine(Clock, NoRoom):
    """A clock and a device's memory, which the layers of a model move."""

    def __init__(self, more_bytes: int = 10**9) -> None:
        self.budget_bytes = SLACK + BASE + more_bytes
        self.now_s = 0.0
        self.live = self.peak = BASE
        self.spilled = 0
        self.trims = 0
        self.away: Callable[[], int] = int
        self.placed: Callable[[], int] = int
        self.at_home: Callable[[], int] = int
        """What of it is in host memory."""
        self.highest = 0
        self.highest_in_all = 0
        """With what plans have placed on the device."""
        self.readers: list[RoomOfMachine] = []

    def mark(self) -> int:
        return int(self.now_s * 1e9)

    def take_peak_bytes(self) -> int:
        peak, self.peak = self.peak, self.live - self.away()
        return peak + self.placed()

    def spilled_bytes(self) -> int:
        return self.spilled

    def trim(self) -> None:
        self.trims += 1
        self.spilled = 0

    def compute(self, seconds: float, more_bytes: int = 0) -> None:
        """Something runs, and makes or frees memory at its end."""
        self.now_s += seconds
        here = self.live - self.away()
        most = max(here, here + more_bytes)
        self.peak = max(self.peak, most)
        self.highest_in_all = max(self.highest_in_all, most + self.placed() - self.at_home())
        for reader in self.readers:
            reader.peak = max(reader.peak, most)
        self.live += more_bytes
        self.highest = max(self.highest, self.peak)
        over = most + self.placed() - (self.budget_bytes - SLACK)
        over -= self.at_home()
        self.spilled = max(self.spilled, over)


class RoomOfMachine(NoRoom):
    """The same memory, for one of several that read its peak."""

    def __init__(self, machine: Machine) -> None:
        self.budget_bytes = machine.budget_bytes
        self.peak = machine.live
        self._machine = machine
        machine.readers.append(self)

    def take_peak_bytes(self) -> int:
        peak, self.peak = self.peak, self._machine.live - self._machine.away()
        return peak + self._machine.placed()


class Compute(torch.autograd.Function):
    """Takes the seconds of a layer, and memory until its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        ctx.bytes = 5 * x.nbytes // 2
        layer.machine.compute(layer.forward_s, ctx.bytes)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.layer.machine.compute(ctx.layer.backward_s, -ctx.bytes)
        return gradients[0], None


class Layer(nn.Module):
    compute: Any = Compute

    def __init__(self, machine: Machine, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.machine, self.forward_s, self.backward_s = machine, forward_s, backward_s
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.compute.apply(self.up(x), self)
        return self.down(nn.functional.gelu(hidden))


class ComputeAgain(torch.autograd.Function):
    """Takes the seconds of a layer, and memory as long as its result's lives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer, y, size_bytes = layer, x.clone(), 5 * x.nbytes // 2
        layer.machine.compute(layer.forward_s, size_bytes)
        weakref.finalize(y.untyped_storage(), layer.machine.compute, 0.0, -size_bytes)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.layer.machine.compute(ctx.layer.backward_s)
        return gradients[0], None


class RepeatableLayer(Layer):
    """May run twice: the machine, which changes, is out of its reach."""

    compute = ComputeAgain

    def __init__(self, machine: Machine, forward_s: float, backward_s: float) -> None:
        super().__init__(machine, forward_s, backward_s)
        del self.machine
        self._machine = weakref.ref(machine)

    def __getattr__(self, name: str) -> Any:
        return self._machine() if name == "machine" else super().__getattr__(name)


class Net(nn.Module):
    def __init__(
        self, machine: Machine, is_checkpointed: bool = False, kind: type[Layer] = Layer
    ) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(
            kind(machine, 1.0 + number, 10.0 + number) for number in range(LAYERS)
        )
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.is_checkpointed:
                called: Any = checkpoint(layer, x, use_reentrant=False)
                x = x + called
            else:
                x = x + layer(x)
        return x


class WallClockOf(Clock):
    """The machine's clock."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def mark(self) -> int:
        return self._machine.mark()


def batch(number: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
