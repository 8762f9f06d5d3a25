"""Slots that exist from the backward pass to the next forward pass, while activations are gone.

When the backward pass comes to a block that the plan names, buffers are made for pieces of state,
from the memory that activations have left, and are filled beside the rest of the pass. Others are
made when the step begins, if the memory is free only then: their pieces come while nothing leaves.
``step()`` updates the pieces there. They go home beside the next forward pass, which frees each
buffer before a block that needs the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from umem.capture.live import Block
from umem.offloading.store import in_backward_or_compiler
from umem.runtime.model_parts import tensors_in
from umem.runtime.torch_hooks.backward import nodes_of
from umem.runtime.torch_hooks.modules import HookErrors, Undo, hook_calls
from umem.streaming.step.units import StreamedUnits
from umem.torch_compat import current_graph_task_id

__all__ = ["TemporaryPlan", "TemporarySlots"]


@dataclass(frozen=True)
class TemporaryPlan:
    """When slots are made and freed."""

    made_in: tuple[str | None, ...] = ()
    """For each slot the block in whose backward pass it is made, in the order of these; None for
    the step."""
    freed_before: tuple[str | None, ...] = ()
    """For each slot the block before whose forward pass it is freed, in the order of these; None
    for the pass's end."""
    batches: int = 1
    """Backward passes in a step. Slots are made in the last one."""


class TemporarySlots:
    """Hooks on a model and its blocks that make and free the slots.

    Parameters
    ----------
    model
        The module that the training loop calls. Only a weak reference is kept.
    blocks
        Its blocks.
    units
        The optimizer's units, whose pieces have the slots.
    may_make
        Whether slots may be made now.
    on_error
        Called with an exception of a hook, which does not reach the training.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        units: StreamedUnits,
        may_make: Callable[[], bool],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.plan = TemporaryPlan()
        """The present plan."""
        self._model = weakref.ref(model)
        self._blocks = blocks
        self._units = units
        self._may_make = may_make
        self._guard = HookErrors(on_error)
        self._places = {it.name: place for place, it in enumerate(blocks)}
        self._passes = 0
        """Forward passes since the last step."""
        self._undo: list[Undo] = []

    def set_plan(self, plan: TemporaryPlan) -> None:
        """Make and free slots by a plan from now on. Not within a call of the model."""
        self.plan = plan
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._units.free_temporary()
        model = self._model()
        if plan.made_in and model is not None:
            fail = self._guard.on_error
            self._undo += hook_calls(model, self._begin, self._end, fail)
            for block in self._blocks:
                enter, leave = partial(self._enter, block.name), partial(self._leave, block.name)
                self._undo += hook_calls(block.module, enter, leave, fail)

    def step_begins(self) -> None:
        """The optimizer steps: the last slots are made, and batches are counted anew."""
        if None in self.plan.made_in:
            self._guard(self._make_all)()
        self._passes = 0

    def close(self) -> None:
        """Remove the hooks."""
        self.set_plan(TemporaryPlan())

    # ------------------------------------------------------------------ hooks

    def _begin(self, _args: object, _kwargs: object) -> None:
        """The model is called."""
        if torch.is_grad_enabled() and not in_backward_or_compiler():
            self._passes += 1
        self._free(lambda name: name is not None and name not in self._places)

    def _enter(self, name: str, _args: object, _kwargs: object) -> None:
        """A block is called, by the model or by a checkpoint."""
        if current_graph_task_id() != -1:
            self._reached(name)
        else:
            self._free(lambda before: before == name)

    def _leave(self, name: str, output: object, *, failed: bool) -> None:
        """A block's call ends."""
        if failed or not torch.is_grad_enabled() or in_backward_or_compiler():
            return
        reached = self._guard(partial(self._reached, name))
        for node in nodes_of(tensors_in(output)):
            node.register_prehook(reached)

    def _end(self, _output: object, *, failed: bool) -> None:
        """The model's call ends."""
        if not failed:
            self._free(lambda _: True)

    def _free(self, is_due: Callable[[str | None], bool]) -> None:
        """Free slots up to the last one that is due."""
        due = [number for number, name in enumerate(self.plan.freed_before) if is_due(name)]
        if due and not in_backward_or_compiler():
            self._units.free_temporary(due[-1] + 1)

    def _reached(self, name: str, *_: object) -> None:
        """The backward pass comes to a block."""
        if self._is_due():
            place = self._places[name]
            made_in = [self._places.get(it, -1) for it in self.plan.made_in if it is not None]
            self._units.make_temporary(sum(it >= place for it in made_in))

    def _make_all(self) -> None:
        """The step begins."""
        if self._is_due():
            self._units.make_temporary(len(self.plan.made_in))

    def _is_due(self) -> bool:
        """Whether this is the last batch of a step that may have slots."""
        return self._passes >= self.plan.batches and self._may_make()
