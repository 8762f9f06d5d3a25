"""Runs the optimizer's step in the backward pass, per block as its gradients are complete."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from itertools import chain
from types import FrameType

import torch
from torch.amp import GradScaler
from torch.utils.weak import WeakIdKeyDictionary

from umem.core.errors import PlanError
from umem.executor.bit_checksum import bit_checksum
from umem.executor.optimizer.overlapped_step import OverlappedOptimizerStep
from umem.executor.optimizer.partial_step import Part, PartialOptimizerStep
from umem.runtime.model_parts import unwrapped
from umem.torch_compat import version_counter

__all__ = ["StepInBackward"]

_CHANGED = (
    "gradients are changed between the backward pass and the optimizer's step, as clipping, a "
    "gradient scaler and data parallel training do"
)


class StepInBackward:
    """Updates each block's parameters when autograd has computed the last of their gradients.

    The gradients are freed at once, so the program must not use them between the backward pass
    and the optimizer's step. Before :meth:`start` and after :meth:`stop` the optimizer steps as
    usual, and this class checks whether the program changes gradients, which forbids the move.

    Parameters
    ----------
    slices
        Runs the parts. A block of which not all parameters get a gradient is left to the step
        that the program calls.
    begin
        Called in autograd's thread before each part, with its name. Must not raise.
    beside
        Runs the parts that overlap with the backward pass.
    """

    def __init__(
        self,
        slices: PartialOptimizerStep,
        begin: Callable[[str], None],
        beside: OverlappedOptimizerStep,
    ) -> None:
        self.order: tuple[str, ...] = ()
        """The parts in the order in which the last step completed their gradients."""
        self.obstacle = ""
        """Why the step cannot move into the backward pass; empty if it can."""
        self._slices = slices
        self._begin = begin
        self._beside = beside
        self._is_active = False
        self._hooks = WeakIdKeyDictionary()
        this = weakref.ref(self)

        def on_gradient(parameter: torch.Tensor) -> None:
            """Hold no strong reference: the garbage collector does not see hooks of tensors."""
            step = this()
            if step is not None:
                step._see(parameter)

        self._on_gradient = on_gradient
        # Of the step in flight.
        self._parts: dict[str, Part] = {}
        self._name: dict[torch.Tensor, str] = {}
        self._missing: dict[str, int] = {}
        self._complete: list[str] = []
        # Gradients as they were before the backward pass, and as autograd has left them.
        self._kept: dict[torch.Tensor, tuple[int, int]] = {}
        self._made: dict[torch.Tensor, tuple[int, int]] = {}
        # Checksums of gradients, for changes that bypass torch's version counter.
        self._looks_at_contents = False
        self._contents: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def is_active(self) -> bool:
        """Whether steps run in the backward pass."""
        return self._is_active

    def start(self) -> None:
        """Run the steps in the backward pass from the next one on."""
        self._is_active = True

    def stop(self) -> None:
        """Let the optimizer step as usual."""
        if self._is_active:
            self._made.clear()  # the current step has freed gradients
        self._is_active = False
        self._beside.join_all()

    def close(self) -> None:
        """Stop, and remove the hooks. Do not call it from a hook."""
        self.stop()
        self._forget()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def step_begins(self, *, looks_at_contents: bool = False) -> None:
        """Before a step's first forward pass, find the gradients that each part waits for.

        Parameters
        ----------
        looks_at_contents
            Compare checksums of gradients too, which reads the gradients twice.
        """
        self._forget()
        self._beside.join_all()  # a failed backward pass has not joined them
        self._looks_at_contents = looks_at_contents and not self._is_active and not self.obstacle
        self._parts = self._slices.parts(lambda it: it.requires_grad and it.is_leaf)
        for name, part in self._parts.items():
            parameters = list(chain.from_iterable(part))
            self._missing[name] = len(parameters)
            for parameter in parameters:
                self._name[parameter] = name
                if parameter.grad is not None:
                    self._kept[parameter] = _version(parameter.grad)
                if parameter not in self._hooks:
                    hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                    self._hooks[parameter] = hook

    def step_ends(self) -> None:
        """After the optimizer's step, check whether the program has changed gradients."""
        if not self._is_active and not self.obstacle:
            if _is_called_by_scaler():  # its scale may be 1 now and change later
                self._see_obstacle("a gradient scaler divides gradients, and may skip the step")
            self._look_at_gradients()
        self.order = tuple(self._complete)
        self._forget()

    def _look_at_gradients(self) -> None:
        for parameter, made in self._made.items():
            if parameter.grad is None or _version(parameter.grad) != made:
                self._see_obstacle(_CHANGED)
        if self._contents and not self.obstacle:
            made_contents = torch.stack(list(self._contents.values()))
            now = [bit_checksum(_local(it.grad)) for it in self._contents if it.grad is not None]
            if not torch.equal(made_contents, torch.stack(now)):  # synchronises with the device
                self._see_obstacle(_CHANGED)

    def _see_obstacle(self, text: str) -> None:
        self.obstacle = self.obstacle or text

    def _forget(self) -> None:
        """Drop all references to parameters at the end of a step."""
        for held in (
            self._parts,
            self._name,
            self._missing,
            self._kept,
            self._made,
            self._contents,
        ):
            held.clear()
        self._complete.clear()

    def _see(self, parameter: torch.Tensor) -> None:
        name = self._name.get(parameter)
        if name is None or parameter.grad is None:  # a backward pass outside of training steps
            return
        is_again = parameter in self._made
        if self._is_active and name in self._complete:
            raise PlanError(
                "a second backward pass before the optimizer's step: the first one has updated "
                f"{name or 'the parameters outside of blocks'} already. Call optimizer.step() "
                "after each backward pass, or umem.manage without step_in_backward=True"
            )
        self._made[parameter] = _version(parameter.grad)
        if not self._is_active and not self.obstacle:
            self._look_at_gradient(parameter, parameter.grad, is_again=is_again)
        if is_again:
            return
        self._missing[name] -= 1
        if not self._missing[name]:
            self._complete.append(name)
            if self._is_active:
                self._run(name)

    def _look_at_gradient(
        self, parameter: torch.Tensor, gradient: torch.Tensor, *, is_again: bool
    ) -> None:
        """Check a gradient that autograd has computed or accumulated."""
        kept = self._kept.get(parameter)
        if not _is_plain(gradient):
            self._see_obstacle("gradients are sparse or of a type whose changes cannot be seen")
        elif is_again:
            self._see_obstacle("gradients are accumulated over several backward passes")
        elif kept is not None and _is_later(self._made[parameter], kept):
            self._see_obstacle(
                "gradients are kept from one step to the next: zero_grad() has to set them to None"
            )
        elif self._looks_at_contents:
            self._contents[parameter] = bit_checksum(_local(gradient))

    def _run(self, name: str) -> None:
        part = self._parts[name]
        self._begin(name)
        if not self._beside.run(name, part):
            self._slices.run_part(part)
        for parameter in chain.from_iterable(part):
            parameter.grad = None


def _version(gradient: torch.Tensor) -> tuple[int, int]:
    """Address of a gradient, and its version counter."""
    address = _local(gradient).data_ptr() if _is_plain(gradient) else 0
    return address, version_counter(gradient)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the part of a DTensor on this rank."""
    return next(unwrapped(gradient))


def _is_plain(gradient: torch.Tensor) -> bool:
    """Whether the gradient is a dense tensor with an address."""
    local = _local(gradient)
    return type(local) is torch.Tensor and local.layout is torch.strided


def _is_called_by_scaler() -> bool:
    """Whether a gradient scaler called the optimizer's step, by walking up the call stack.

    There is no other sign: a scaler divides gradients without a change of the version counter,
    and a scale of 1 does not even change bits.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__ and frame.f_locals["self"].is_enabled():
            return True
        frame = frame.f_back
    return False


def _is_later(made: tuple[int, int], kept: tuple[int, int]) -> bool:
    """Whether this is the same gradient tensor with a higher version."""
    return made[0] == kept[0] and made[1] > kept[1]
