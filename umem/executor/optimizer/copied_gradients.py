"""Copies gradients of chosen units to page-locked host memory as the backward pass makes them.

A gradient is complete when autograd has added it. Then its copy to the host starts, beside the rest
of the backward pass. A few units later the program's stream waits for the copy, and the gradient's
tensor, the same object, has the host's memory from then on: the device's is free. Later batches are
added to it there, clipping reads and writes it there, and so does the update, all in place over the
link.

From the copy's start until then a guard sees each use of the gradient by Python, and the copy is
waited for first. An addition by autograd itself changes the tensor's version: then the copy is of
no use, and the gradient stays where it is.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from umem.core.classes import TensorClass
from umem.executor.optimizer.access_guard import TensorGuard, are_plain
from umem.executor.optimizer.lanes import Copy, Lane, Lanes, Moment
from umem.executor.optimizer.state_staging import StateMemory
from umem.planning.stream_timing import UNITS_WITH_GRADIENTS
from umem.torch_compat import DisableTorchFunctionSubclass, version_counter

__all__ = ["CopiedGradients"]

_Parameters = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class _Gradient:
    tensor: torch.Tensor
    version: int
    """When the copy started."""
    home: torch.Tensor


@dataclass(eq=False)
class _Leaving:
    """The gradients of a unit on their way to the host."""

    gradients: list[_Gradient]
    asked: Moment
    """When the copies started, on the stream that owns the gradients' memory."""
    moment: Moment
    guard: TensorGuard
    units_behind: int = 0
    """Units whose gradients have begun to arrive since."""


@dataclass
class _Arriving:
    """The gradients of the unit that the backward pass is in."""

    name: str
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """By ``id``: autograd may add to one several times."""


class CopiedGradients:
    """Hooks on parameters that copy their gradients.

    Parameters
    ----------
    parameters
        Returns the optimizer's parameters by unit, in forward order.
    lanes
        Where the copies run.
    memory
        The device's memory, and homes.
    on_error
        Called with an exception of a hook, which does not reach the training.
    """

    def __init__(
        self,
        parameters: Callable[[], _Parameters],
        lanes: Lanes,
        memory: StateMemory,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._parameters = parameters
        self._lanes = lanes
        self._memory = memory
        self._on_error = on_error
        self._copied: frozenset[str] = frozenset()
        self._lock = threading.RLock()
        self._arriving = _Arriving("")
        self._leaving: deque[_Leaving] = deque()
        self._handles: list[RemovableHandle] = []

    def sizes(self) -> dict[str, int]:
        """Bytes of the gradients that can be copied, by unit in forward order."""
        return {
            name: sum(it.nbytes for it in some if it.requires_grad and self._memory.is_movable(it))
            for name, some in self._parameters().items()
        }

    def set_plan(self, copied: Collection[str]) -> None:
        """Choose the units whose gradients are copied, from the next backward pass on."""
        with self._lock:
            self.settle()
            self._remove_hooks()
            self._copied = frozenset(copied)
            every = self._parameters()
            names = list(every)
            for place, name in enumerate(names):
                # The units that the backward pass comes to behind a copied one tell the time.
                if self._copied.intersection(names[place : place + UNITS_WITH_GRADIENTS + 1]):
                    # Hooks of tensors must hold no strong reference: the garbage collector does not
                    # see them.
                    arrive = functools.partial(_arrive, weakref.ref(self), name)
                    self._handles += [
                        it.register_post_accumulate_grad_hook(arrive)
                        for it in every[name]
                        if it.requires_grad and it.is_leaf
                    ]

    def settle(self) -> None:
        """Let the current stream wait for copies under way: their gradients are on the host now."""
        with self._lock:
            self._send()
            while self._leaving:
                self._release(self._leaving.popleft())

    def close(self) -> None:
        """Remove the hooks; gradients stay where they are."""
        self.set_plan(())

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def arrive(self, name: str, parameter: torch.Tensor) -> None:
        """Note that autograd has added to a gradient."""
        with self._lock:
            try:
                if name != self._arriving.name:
                    self._send()
                    self._arriving = _Arriving(name)
                    self._unit_begins()
                gradient = parameter.grad
                if name in self._copied and gradient is not None and self._can_leave(gradient):
                    self._arriving.gradients[id(gradient)] = gradient
            except Exception as error:
                self._on_error(error)

    def _can_leave(self, gradient: torch.Tensor) -> bool:
        return (
            are_plain((gradient,))
            and not gradient.requires_grad
            and not self._lanes.is_capturing()
            and not torch.compiler.is_compiling()
            and self._memory.is_movable(gradient)  # it has no alias
            and not self._memory.is_home(gradient)
        )

    def _unit_begins(self) -> None:
        """Release what has had the time of some units to leave."""
        for leaving in self._leaving:
            leaving.units_behind += 1
        while self._leaving and self._leaving[0].units_behind >= UNITS_WITH_GRADIENTS:
            self._release(self._leaving.popleft())

    def _send(self) -> None:
        """Start the copies of what has arrived."""
        arrived, self._arriving = self._arriving, _Arriving("")
        gradients = [it for it in arrived.gradients.values() if self._can_leave(it)]
        if not gradients:
            return
        leaving = [
            _Gradient(it, version_counter(it), self._memory.home_like(it, TensorClass.GRADIENTS))
            for it in gradients
        ]
        asked = self._lanes.mark()
        parts = [Copy(it.home.data_ptr(), it.tensor.data_ptr(), it.home.nbytes) for it in leaving]

        def copy() -> None:
            self._lanes.copy(Lane.COPY_OUT, parts, TensorClass.GRADIENTS)

        moment = self._lanes.run(Lane.COPY_OUT, copy, [asked])
        guard = TensorGuard(self.settle)
        guard.hold(gradients)
        self._leaving.append(_Leaving(leaving, asked, moment, guard))

    def _release(self, leaving: _Leaving) -> None:
        """Let the stream wait for a unit's copies, and its gradients have the host's memory."""
        self._lanes.wait(leaving.moment)
        self._lanes.wait_on_stream_of(leaving.asked, leaving.moment)
        leaving.guard.release()
        with DisableTorchFunctionSubclass(), torch.no_grad():
            for it in leaving.gradients:
                tensor: Any = it.tensor
                if version_counter(tensor) == it.version:
                    tensor.data = it.home


def _arrive(reference: weakref.ref[CopiedGradients], name: str, parameter: torch.Tensor) -> None:
    gradients = reference()
    if gradients is not None:
        gradients.arrive(name, parameter)
