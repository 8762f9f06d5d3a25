"""Time that streamed optimizer state adds to a step of a model with many parameters.

``python benchmarks/many_parameters.py`` runs a mixture of experts by its count of parameters: 60
blocks of 393 small ones, whose passes do nothing. Each run takes stock steps and then streamed ones
with the same tensors, on the CPU: what the streamed ones take longer is umem's own Python, and
copies of a few bytes. A step is ``step()``, ``zero_grad()`` and the next forward pass, which waits.
Kernels, which are torch's function ``adam``, stand in a column of their own: it is called once for
each group, and by a streamed step once for each piece, whose tensors the processor's caches hold.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from umem.core.classes import TensorClass
from umem.streaming import StreamedTraining
from umem.streaming.stage import HostLanes, StateMemory, is_whole

BLOCKS, PARAMETERS, ELEMENTS = 60, 393, 16
BLOCK_BYTES = 64  # of a tensor's memory: copies take no time
STEPS = 12


class Kernels:
    """Adds up the time of torch's function that updates tensors."""

    def __init__(self) -> None:
        self.seconds = 0.0
        module: Any = importlib.import_module("torch.optim.adam")
        self._function, module.adam = module.adam, self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Update tensors."""
        start = time.perf_counter()
        self._function(*args, **kwargs)
        self.seconds += time.perf_counter() - start


KERNELS = Kernels()


class Block(nn.Module):
    """Many parameters, and a forward pass that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(ELEMENTS) for _ in range(PARAMETERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x


class Homes(StateMemory):
    """Host memory in which state lies side by side, as in umem's page-locked memory."""

    def __init__(self, count: int, pieces: int) -> None:
        self._arena = (ctypes.c_byte * (count * BLOCK_BYTES))()
        self._address = ctypes.addressof(self._arena)
        self._offset = 0
        self.staged_bytes = PARAMETERS * 2 * ELEMENTS * 4 // pieces

    def adopt(self, tensor: torch.Tensor) -> None:
        """Move a tensor into this memory."""
        elements, offset = tensor.numel(), self._offset
        self._offset += BLOCK_BYTES
        home = torch.frombuffer(self._arena, dtype=tensor.dtype, count=elements, offset=offset)
        tensor.data = home.view(tensor.shape).copy_(tensor)

    def may_stage(self, tensor: torch.Tensor) -> bool:
        """All but counts of steps."""
        return tensor.dim() > 0 and is_whole(tensor)

    def is_home(self, tensor: torch.Tensor) -> bool:
        """Whether it lies here."""
        return 0 <= tensor.data_ptr() - self._address < len(self._arena)

    def place(self, tensor: torch.Tensor, *, on_device: bool) -> None:
        """Give a tensor other memory."""
        if on_device and self.is_home(tensor):
            tensor.data = tensor.clone()

    def new_home(self, tensor: torch.Tensor, tensor_class: TensorClass) -> torch.Tensor:
        """Any memory."""
        return torch.empty_like(tensor)

    new_on_device = new_home

    def is_of_device(self, tensor: torch.Tensor) -> bool:
        """All tensors."""
        return True

    def block_bytes(self, size_bytes: int) -> int:
        """Bytes of a tensor and what is left behind it."""
        return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Any memory."""
        return torch.zeros(size_bytes, dtype=torch.uint8)


class Run:
    """A training, whose steps are those of the optimizer until :meth:`stream`.

    Parameters
    ----------
    settings
        Arguments of AdamW.
    is_resident
        Whether all state stays where it is used.
    pieces
        Number of pieces in which the state of a block is staged.
    """

    def __init__(self, settings: dict[str, Any], *, is_resident: bool, pieces: int) -> None:
        self.model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, **settings)
        self.seconds: dict[str, list[float]] = {}
        self._backward()
        self.optimizer.step()
        values = [it for state in self.optimizer.state.values() for it in state.values()]
        moments = [value for value in values if value.dim()]
        self.homes = Homes(len(moments), pieces)
        for moment in () if is_resident else moments:
            self.homes.adopt(moment)

    def stream(self) -> StreamedTraining:
        """Stream the state from now on."""
        return StreamedTraining(self.model, self.optimizer, HostLanes(), self.homes)

    def _backward(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 0.01)

    def _timed(self, name: str, call: Callable[[], object]) -> None:
        KERNELS.seconds = 0.0
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start - KERNELS.seconds
        self.seconds.setdefault(name, []).append(seconds)
        if name == "step":
            self.seconds.setdefault("kernels", []).append(KERNELS.seconds)

    def measure(self, steps: int) -> dict[str, float]:
        """Milliseconds of the parts of a step: the least of several."""
        self.seconds.clear()
        x = torch.ones(1)
        for _ in range(steps):
            self._backward()
            gc.collect()
            self._timed("step", self.optimizer.step)
            self._timed("zero_grad", self.optimizer.zero_grad)
            self._timed("forward", lambda: self.model(x))
        return {name: 1e3 * min(seconds) for name, seconds in self.seconds.items()}


def report(name: str, run: Run, steps: int) -> None:
    """Print what a run takes with its state streamed, and before."""
    stock = run.measure(steps)
    training = run.stream()
    run.measure(3)
    streamed = run.measure(steps)
    training.close()
    added = {name: streamed[name] - stock[name] for name in streamed}
    parts = "".join(f"{streamed[it]:7.1f} ({stock[it]:5.1f})" for it in streamed)
    python_ms = sum(added.values()) - added["kernels"]
    print(f"{name:30}{parts}{python_ms:9.1f}{sum(added.values()):9.1f}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"{BLOCKS * PARAMETERS:,} parameters, ms: streamed (stock), least of {steps} steps")
    titles = "".join(f"{it:^15}" for it in ("step()", "kernels", "zero_grad()", "forward"))
    print(f"{'':30}{titles}{'added':>9}{'in all':>9}")
    for kind in ("fused", "foreach"):
        for name, is_resident, pieces in (
            ("resident", True, 1),
            ("streamed", False, 1),
            ("streamed in 10 pieces", False, 10),
        ):
            run = Run({kind: True}, is_resident=is_resident, pieces=pieces)
            report(f"{kind}, {name}", run, steps)


if __name__ == "__main__":
    main()
