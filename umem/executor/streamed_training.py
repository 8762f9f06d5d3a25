"""Streams the optimizer state of a training, and defers its steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from umem.capture.live import NO_BLOCK, find_blocks
from umem.core.errors import PlanError
from umem.executor.optimizer.lanes import Lanes
from umem.executor.optimizer.partial_step import can_slice
from umem.executor.optimizer.state_staging import StateMemory
from umem.executor.optimizer.streamed_step import StepCounts, StreamedStep
from umem.runtime.torch_hooks.modules import Hook
from umem.torch_compat import compiled_call, current_graph_task_id

__all__ = ["StreamedTraining", "join", "streamed_trainings"]

_trainings: weakref.WeakSet[StreamedTraining] = weakref.WeakSet()


def streamed_trainings() -> list[StreamedTraining]:
    """All trainings of the process whose state is streamed."""
    return [training for training in _trainings if not training.is_closed]


def join() -> None:
    """Let the current stream wait for all optimizer updates that are under way.

    Programs need not call it: whatever uses a parameter, a gradient or optimizer state through
    torch waits by itself. Call it before code that reads such memory past torch, as an extension
    does that takes tensors outside of a module's forward pass.
    """
    for training in streamed_trainings():
        training.join()


class StreamedTraining:
    """The hooks on a model and an optimizer that stream its state.

    Parameters
    ----------
    model
        The module that the training loop calls.
    optimizer
        Its optimizer: one of torch's own that update each parameter by itself.
    lanes
        Where the work runs.
    memory
        Homes and buffers of the state.
    slots
        Most buffers on the device.

    Raises
    ------
    PlanError
        For another optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        lanes: Lanes,
        memory: StateMemory,
        slots: int = 3,
    ) -> None:
        if not can_slice(optimizer):
            raise PlanError(
                f"the state of {type(optimizer).__name__} cannot be streamed: it may look at "
                "several parameters at once. Take one of torch's own optimizers, and neither LBFGS "
                "nor a subclass"
            )
        blocks = find_blocks(model, None)
        owner = WeakIdKeyDictionary()
        for block in blocks:
            for parameter in block.module.parameters():
                owner.setdefault(parameter, block.name)
        self._step = StreamedStep(lambda it: owner.get(it, NO_BLOCK), lanes, memory, slots)
        self._step.may_defer = not any(map(_is_compiled, model.modules()))
        self._undo: list[Callable[[], None]] = []
        for block in blocks:
            wait = Hook(functools.partial(self._before_block, block.name))
            self._undo.append(block.module.register_forward_pre_hook(wait, prepend=True).remove)
        begins = Hook(functools.partial(self._before_block, NO_BLOCK))
        self._undo.append(model.register_forward_pre_hook(begins, prepend=True).remove)
        self._undo.append(model.register_forward_hook(Hook(self._after_model)).remove)
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        self._undo.append(self._handle.remove)
        self._undo.append(
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._step.join()).remove
        )
        weakref.finalize(model, _close, weakref.ref(self)).atexit = False
        _trainings.add(self)

    @property
    def counts(self) -> StepCounts:
        """What became of the steps so far."""
        return self._step.counts

    @property
    def step(self) -> StreamedStep:
        """The step that is streamed."""
        return self._step

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._undo

    def join(self) -> None:
        """Let the current stream wait for all updates that are under way."""
        self._step.join()

    def close(self) -> None:
        """Wait for all updates, and leave later steps to the optimizer alone."""
        self._step.forget()
        for undo in self._undo:
            undo()
        self._undo.clear()

    # ------------------------------------------------------------------ hooks

    def _before_block(self, name: str, _module: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling():
            # Compiled code checks the classes of its parameters before it runs.
            self._step.may_defer = False
            return
        if name == NO_BLOCK:
            self._move_last()
        self._step.wait(name)

    def _after_model(self, _module: nn.Module, _args: object, _result: object) -> None:
        is_recomputed = current_graph_task_id() != -1
        if torch.is_grad_enabled() and not is_recomputed and not torch.compiler.is_compiling():
            self._step.fetch_ahead()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        has_closure = len(args) > 1 or any(value is not None for value in kwargs.values())
        if has_closure or not self._comes_last() or torch.compiler.is_compiling():
            self._leave_to_optimizer()
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._leave_to_optimizer()
            return None
        empty = self._step.step(optimizer)
        # torch runs the step's own function on what a hook returns: here on no parameters.
        return None if empty is None else ((empty,), dict(kwargs))

    def _leave_to_optimizer(self) -> None:
        self._step.join()
        self._step.counts.in_line += 1

    def _comes_last(self) -> bool:
        """Whether no later hook of the program can change gradients before the step."""
        return next(reversed(self._hooks()), None) == self._handle.id

    def _move_last(self) -> None:
        """Not from a hook of the optimizer, which iterates over the dictionary."""
        hooks = self._hooks()
        if not self._comes_last() and self._handle.id in hooks:
            hooks[self._handle.id] = hooks.pop(self._handle.id)

    def _hooks(self) -> dict[int, Any]:
        """The optimizer's hooks before a step, in their order."""
        return self._handle.hooks_dict_ref() or {}


def _close(reference: weakref.ref[StreamedTraining]) -> None:
    training = reference()
    if training is not None and not training.is_closed:
        training.close()


def _is_compiled(module: nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or compiled_call(module) is not None
        or type(module).__name__ == "OptimizedModule"
    )
