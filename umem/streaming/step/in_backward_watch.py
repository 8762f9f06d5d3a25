"""Watches the first steps of a training for what a step in the backward pass cannot do exactly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from umem.runtime.guard import Guard, can_guard, guard_of
from umem.runtime.known_tensors import KnownTensors
from umem.streaming.stage.lanes import Lanes
from umem.streaming.step.call import StepCall
from umem.streaming.step.unit import StreamedUnit
from umem.torch_compat import version_counter

__all__ = ["StepObserver"]

_SCALER = (GradScaler.step.__code__, GradScaler.unscale_.__code__)
_ACCUMULATED = "gradients are accumulated over several backward passes"


@dataclass
class _Gradient:
    parameter: torch.Tensor
    tensor: torch.Tensor
    version: int


class StepObserver:
    """Guards the gradients and weights of steps that still run behind the backward pass.

    Parameters
    ----------
    lanes
        Where the updates run.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.obstacle = ""
        """Why the step cannot move into the backward pass; empty if it can so far."""
        self.steps = 0
        """Complete steps that were seen."""
        self._lanes = lanes
        self._gradients: dict[int, _Gradient] = {}
        self._guards = (
            Guard(lambda: self.note_use("a gradient is used between backward() and step()")),
            Guard(lambda: self.note_use("weights are used between backward() and step()")),
        )
        """Of gradients and of weights."""
        self._stepped: KnownTensors[bool] = KnownTensors()
        """Gradients that a step has used."""
        self._call: StepCall | None = None

    def note(self, obstacle: str) -> None:
        """Keep the first reason."""
        self.obstacle = self.obstacle or obstacle

    def note_use(self, what: str) -> None:
        """Note that the program uses something, and where."""
        frame = sys._getframe(1)
        if any(it.f_code in _SCALER for it in _frames(frame)):
            self.note("a gradient scaler divides gradients, and may skip the step")
        self.note(f"{what} at {_place(frame)}")

    def arrived(self, parameter: Any, optimizer: Optimizer) -> None:
        """See a gradient that autograd has computed or added to."""
        if guard_of(parameter) is self._guards[1] or id(parameter) in self._gradients:
            self.note(_ACCUMULATED)
            return
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient in self._stepped:
            self.note("gradients are kept from one step to the next: zero_grad() is not called")
        if self._call is None:
            self._call = StepCall(optimizer, self._lanes)
        self._gradients[id(parameter)] = _Gradient(parameter, gradient, version_counter(gradient))
        if not can_guard(gradient) or gradient.layout is not torch.strided:
            self.note("gradients are sparse, or of a class of their own")
            return
        if type(gradient) is torch.Tensor:
            self._guards[0].hold([gradient])

    def completed(self, unit: StreamedUnit) -> None:
        """Guard the weights of a unit, all of whose gradients have arrived."""
        self._guards[1].hold(p for p in unit.parameters if type(p) is torch.nn.Parameter)

    def forward_begins(self) -> None:
        """See a new forward pass of the training."""
        if self._gradients:
            self.note("a forward pass begins behind backward() without step()")
        self._forget()

    def compilation_begins(self) -> None:
        """See that code is compiled, which may use gradients or weights past the guard."""
        if any(guard.is_on for guard in self._guards):
            self.note("code is compiled between backward() and step()")
            self._release()

    def step_begins(self, optimizer: Optimizer) -> None:
        """Look at what has become of the gradients and hyperparameters.

        Parameters
        ----------
        optimizer
            The optimizer.
        """
        seen, call = list(self._gradients.values()), self._call
        self._forget()
        for it in seen:
            if it.parameter.grad is not it.tensor or version_counter(it.tensor) != it.version:
                self.note("gradients are set, changed or dropped between backward() and step()")
        if call is not None and not call.has_hyperparameters_of(optimizer):
            self.note("hyperparameters are changed between backward() and step()")
        for it in seen:
            self._stepped[it.tensor] = True
        self.steps += bool(seen)

    def _release(self) -> None:
        for guard in self._guards:
            guard.release()

    def _forget(self) -> None:
        self._release()
        self._gradients.clear()
        self._call = None

    def close(self) -> None:
        """Guard nothing any more."""
        self._forget()


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    """The line of the program that has called torch."""
    for it in _frames(frame):
        if it.f_globals.get("__name__", "").split(".")[0] not in ("umem", "torch"):
            return f"{it.f_code.co_filename}:{it.f_lineno}"
    return "an unknown place"
