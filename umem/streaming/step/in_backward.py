"""Updates units of parameters in the backward pass, as soon as their gradients are complete.

The values are those of the step that the program calls later, or an error is raised before the
program can see others:

* In the first steps nothing is updated in the backward pass. A :class:`StepObserver` watches for
  whatever a step in the backward pass would change; ``step()`` raises its reason.
* Later, a unit is updated when autograd has added the last of its gradients. From then on until
  ``step()`` any use of its parameters or state raises, and the gradients are gone. ``step()``
  compares the hyperparameters with those that the updates have used.
* A unit is left to ``step()`` if its gradients are not complete by then, or if anything else has
  the memory of its parameters, gradients or state.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from umem.core.errors import PlanError
from umem.runtime.aliases import has_alias
from umem.runtime.guard import are_plain
from umem.runtime.known_tensors import hook_accumulation
from umem.streaming.gradients.freed_gradient import freed_gradient, is_freed
from umem.streaming.plan.step_timing import UNITS_WITH_GRADIENTS
from umem.streaming.stage.lanes import Lanes
from umem.streaming.step.call import StepCall
from umem.streaming.step.in_backward_watch import StepObserver
from umem.streaming.step.step import StreamedStep
from umem.streaming.step.unit import StreamedUnit
from umem.torch_compat import is_distributed

__all__ = ["BackwardUpdates"]

_OBSERVED_STEPS = 2
"""Complete steps that are watched before units are updated in the backward pass."""

_REMEDY = "Call umem.manage without step_in_backward"


class _Arrivals:
    """Counts the gradients of a unit. One for each parameter is called from C++: kept small."""

    __slots__ = ("hooked", "is_mixed", "left", "stream", "unit")

    def __init__(self, unit: StreamedUnit) -> None:
        self.unit = unit
        self.hooked: frozenset[int] = frozenset()
        """``id`` of the parameters that have a hook."""
        self.reset()

    def reset(self) -> None:
        """Count from the start."""
        self.left = len(self.hooked)
        self.stream: int | None = None
        self.is_mixed = False
        """Whether gradients were added on several streams."""


class BackwardUpdates:
    """Updates units in the backward pass of one training.

    Parameters
    ----------
    step
        The training's step.
    optimizer
        Its optimizer. Only a weak reference is kept.
    lanes
        Where the updates run.

    Raises
    ------
    PlanError
        Where ``torch.distributed`` is initialised.
    """

    def __init__(self, step: StreamedStep, optimizer: Optimizer, lanes: Lanes) -> None:
        _check_not_distributed()
        _references()
        self._step = step
        self._optimizer = weakref.ref(optimizer)
        self._lanes = lanes
        self._observer: StepObserver | None = StepObserver(lanes)
        self._arrivals: list[_Arrivals] = []
        self._handles: list[RemovableHandle] = []
        self._layout = -1
        self._freed: dict[int, tuple[torch.Tensor, torch.dtype, torch.Size]] = {}
        """What takes the place of gradients, by ``id`` of the parameter, with dtype and shape."""
        self._call: StepCall | None = None
        """Hyperparameters of the updates whose ``step()`` is still to come."""
        self._ahead: list[StreamedUnit] = []
        self._waiting: deque[StreamedUnit] = deque()
        """Units whose gradients are kept for their update."""
        self._loaded: set[str] = set()
        """What was loaded behind updates without a ``step()``."""
        self._is_known: bool | None = None
        """Whether the optimizer is as it was when units were found; None to look."""
        step.units.move_into_backward(True)

    @property
    def is_observing(self) -> bool:
        """Whether units are updated behind the backward pass still."""
        return self._observer is not None

    @property
    def is_ahead(self) -> bool:
        """Whether parameters are updated whose ``step()`` is still to come."""
        return bool(self._ahead)

    # ------------------------------------------------------------------ around the backward pass

    def forward_begins(self) -> None:
        """Before a training's forward pass."""
        _check_not_distributed()
        with self._step.lock:
            if self._observer is not None:
                self._observer.forward_begins()
            if self._ahead:
                raise self._refused("a forward pass begins behind backward() without step()")
            self._is_known = None
            for arrivals in self._arrivals:
                arrivals.reset()

    def forward_ends(self, optimizer: Optimizer) -> None:
        """Behind a training's forward pass: find the units, and count their gradients.

        The state moves here, not within ``step()``: now the gradients of the last step are gone.
        """
        with self._step.lock:
            units = self._step.units
            if self._layout == units.layouts and units.are_laid_out(optimizer.state):
                return
            self._step.lay_out(optimizer)
            self._remove_hooks()
            self._layout = units.layouts
            for unit in units.queued:
                self._hook(unit)

    def _hook(self, unit: StreamedUnit) -> None:
        arrivals = _Arrivals(unit)
        trained = [p for p in unit.parameters if p.requires_grad and p.is_leaf]
        arrivals.hooked = frozenset(map(id, trained))
        arrivals.reset()
        # Hooks of tensors must hold no strong reference: the garbage collector does not see them.
        this, stream_key = weakref.ref(self), self._lanes.stream_key

        def arrive(parameter: torch.Tensor) -> None:
            arrivals.left -= 1
            stream = stream_key()
            if arrivals.left <= 0 or stream != arrivals.stream:
                updates = this()
                if updates is not None:
                    updates._arrived(arrivals, parameter, stream)

        self._handles += [hook_accumulation(it, arrive) for it in trained]
        self._arrivals.append(arrivals)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._arrivals.clear()
        self._freed.clear()

    def compilation_begins(self) -> None:
        """Before code is compiled, whose uses of tensors are not seen."""
        with self._step.lock:
            if self._observer is not None:
                self._observer.compilation_begins()
            if self._ahead:
                raise self._refused("code is compiled between backward() and step()")

    # ------------------------------------------------------------------ in the backward pass

    def _arrived(self, arrivals: _Arrivals, parameter: torch.Tensor, stream: int) -> None:
        optimizer, unit = self._optimizer(), arrivals.unit
        if optimizer is None:
            return
        with self._step.lock:
            if self._observer is not None:
                self._observer.arrived(parameter, optimizer)
                if arrivals.left == 0:
                    self._observer.completed(unit)
                return
            arrivals.is_mixed |= arrivals.stream not in (None, stream)
            arrivals.stream = stream
            if arrivals.left == 0 and self._can_update(arrivals, optimizer):
                self._update(unit, optimizer)

    def _can_update(self, arrivals: _Arrivals, optimizer: Optimizer) -> bool:
        """Whether a unit may be updated now; otherwise ``step()`` does it."""
        unit, state = arrivals.unit, arrivals.unit.state
        if self._lanes.is_capturing():
            raise PlanError(
                "step_in_backward: a CUDA graph is captured, which would not hold the updates. "
                f"{_REMEDY}"
            )
        if state is None or unit.is_touched or unit.pending is not None or arrivals.is_mixed:
            return False
        if self._is_known is None:
            _check_not_distributed()
            self._is_known = self._step.units.knows(optimizer)
        if not self._is_known:
            return False
        parameters = unit.parameters
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in arrivals.hooked:
                self._layout = -1  # hooks are set anew behind the next forward pass
                return False
            if parameter.requires_grad and parameter.grad is None:
                return False
        gradients = [it.grad for it in parameters if it.grad is not None]
        if any(map(is_freed, gradients)):
            raise self._refused(
                "a gradient is kept from one step to the next: zero_grad() is not called"
            )
        return (
            not self._step.units.has_common_state
            and not has_numbers(state.known)
            and are_plain((*parameters, *gradients))
            and not any(it.requires_grad for it in gradients)
            and not any(sys.getrefcount(it) > _references() for it in gradients)
            and not has_alias((*parameters, *gradients))
            and not state.is_shared
            and not unit.is_turned
            and state.is_current(optimizer.state)
        )

    def _update(self, unit: StreamedUnit, optimizer: Optimizer) -> None:
        if self._call is None:
            self._call = StepCall(optimizer, self._lanes)
        self._ahead.append(unit)
        self._waiting.append(unit)
        self._step.update_ahead(unit, self._call, self._freed_gradient)
        while len(self._waiting) > UNITS_WITH_GRADIENTS:
            self._step.free_gradients(self._waiting.popleft())

    def _freed_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        freed, *facts = self._freed.get(id(parameter), (None,))
        if freed is None or facts != [parameter.dtype, parameter.shape]:
            freed = freed_gradient(parameter)
            self._freed[id(parameter)] = freed, parameter.dtype, parameter.shape
        return freed

    # ------------------------------------------------------------------ the program's step

    def step_begins(self, optimizer: Optimizer, obstacle: str) -> None:
        """Before the program's step: raise if it differs from what was updated.

        Parameters
        ----------
        optimizer
            The optimizer.
        obstacle
            Why no such step can be done in the backward pass; empty if it can.
        """
        _check_not_distributed()
        with self._step.lock:
            if self._observer is not None:
                self._observer.step_begins(optimizer)
                obstacle = self._observer.obstacle or obstacle
            if obstacle:
                raise self._refused(obstacle)
            if self._observer is not None:
                return
            self._check(optimizer)
            self._end()

    def _check(self, optimizer: Optimizer) -> None:
        if self._loaded:
            raise self._refused(
                f"only the state of the {self._loaded.pop()} was loaded behind a backward pass"
            )
        if self._call is not None:
            if not self._step.units.knows(optimizer):
                raise self._refused("parameters were added between backward() and step()")
            if not self._call.has_hyperparameters_of(optimizer):
                raise self._refused("hyperparameters are changed between backward() and step()")
            for unit in self._ahead:
                if unit.state is None or not unit.state.is_current(optimizer.state):
                    raise self._refused("state is replaced between backward() and step()")
                # Each has its own: a program may exchange them.
                if not all(it.grad is self._freed_gradient(it) for it in unit.ahead):
                    raise self._refused(
                        "gradients are set or dropped between backward() and step()"
                    )
        others = [unit.queued for unit in self._step.units.queued if not unit.ahead]
        for _, some in chain(self._step.units.in_line, *others):
            if any(is_freed(parameter.grad) for parameter in some):
                raise self._refused("step() takes a gradient that an earlier step has used")

    def step_ends(self) -> bool:
        """Behind a step. Returns whether units are updated in the backward pass from now on."""
        observer = self._observer
        if observer is None or observer.steps < _OBSERVED_STEPS:
            return False
        observer.close()
        self._observer = None
        self._layout = -1  # hooks count from the start
        return True

    def _end(self) -> None:
        self._call = None
        self._ahead.clear()
        self._waiting.clear()
        self._loaded.clear()

    # ------------------------------------------------------------------ the way out

    def observe_anew(self) -> None:
        """Behind the loading of all state: an error may have ended the step that was watched."""
        with self._step.lock:
            if self._observer is not None:
                self._observer.close()
                self._observer = StepObserver(self._lanes)

    def model_loads(
        self, model: nn.Module, state: Mapping[str, Any], prefix: str, *_: object
    ) -> None:
        """Before the state of the model is loaded: let it overwrite updated weights."""
        with self._step.lock:
            names = {id(p): f"{prefix}{name}" for name, p in model.named_parameters()}
            ahead = self._still_ahead()
            for unit in ahead:
                for parameter in unit.ahead:
                    value = state.get(names.get(id(parameter), ""))
                    if value is None or value.shape != parameter.shape:
                        raise self._refused(
                            f"the state that is loaded lacks weights of {unit.name}, which the "
                            "backward pass has updated"
                        )
            for unit in ahead:
                self._step.settle(unit)
            self._have_loaded("model")

    def optimizer_loads(self) -> None:
        """Behind the loading of the optimizer's state."""
        with self._step.lock:
            self._have_loaded("optimizer")

    def _still_ahead(self) -> list[StreamedUnit]:
        """Units that were updated; those too whose ``step()`` has begun and was interrupted."""
        return [it for it in self._step.units if it.ahead or it in self._ahead]

    def _have_loaded(self, what: str) -> None:
        ahead = self._still_ahead()
        if not ahead:
            return
        self._loaded.add(what)
        if len(self._loaded) == 2:
            for unit in ahead:
                unit.ahead = []
            self._end()

    def close(self, *, is_checked: bool = True) -> None:
        """Remove the hooks.

        Parameters
        ----------
        is_checked
            Raise ``PlanError`` between an update in the backward pass and ``step()``.
        """
        with self._step.lock:
            if is_checked and self._ahead:
                raise self._refused("umem's close() is called between backward() and step()")
            if self._observer is not None:
                self._observer.close()
            self._remove_hooks()
            self._step.units.move_into_backward(False)

    def gradient_was_used(self) -> None:
        """The program has used a gradient behind its step, which forbids to free it there."""
        if self._observer is not None:
            self._observer.note_use("a gradient is used behind step()")

    def _refused(self, reason: str) -> PlanError:
        text = f"step_in_backward: {reason}. {_REMEDY}"
        if self._ahead:
            text += (
                "; the backward pass has updated weights already, so load the state of the model "
                "and of the optimizer before the training goes on"
            )
        elif self._observer is not None:
            text += (
                "; or, behind an error in a backward pass, load the state of the model and of the "
                "optimizer"
            )
        return PlanError(text)


def has_numbers(state: Mapping[torch.Tensor, Mapping[str, Any]]) -> bool:
    """Whether state has numbers, which an update replaces and no guard protects."""
    return any(
        not (value is None or isinstance(value, torch.Tensor))
        for values in state.values()
        for value in values.values()
    )


@functools.cache
def _references() -> int:
    """What ``sys.getrefcount`` says of a gradient in a hook that nothing else refers to."""
    found: list[int] = []
    parameter = nn.Parameter(torch.ones(2))

    def count(it: torch.Tensor) -> None:
        gradients = [it.grad]
        found.extend(sys.getrefcount(gradient) for gradient in gradients)

    parameter.register_post_accumulate_grad_hook(count)
    with torch.enable_grad():
        (parameter * 2).sum().backward()
    return found[0]


def _check_not_distributed() -> None:
    if is_distributed():
        raise PlanError(
            "step_in_backward: torch.distributed is initialised, and DDP and FSDP reduce gradients "
            f"behind autograd. {_REMEDY}"
        )
