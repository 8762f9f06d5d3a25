"""When slots exist from the backward pass to the next forward pass, while activations are gone.

When the backward pass comes to a block that the plan names, buffers are made for pieces of state,
from the memory that activations have left, and are filled beside the rest of the pass. Others are
made when the step begins, if the memory is free only then: their pieces come while nothing leaves.
``step()`` updates the pieces there. They go home beside the next forward pass, which frees each
buffer before a block that needs the memory; where other batches follow, also beside the backward
pass, whose gradients need it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from umem.capture.live import Block
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.modules import HookErrors
from umem.runtime.torch_hooks.passes import Pass
from umem.streaming.stage.ring import Ring

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
    freed_in_backward: tuple[str, ...] = ()
    """For each slot behind these the block before whose backward pass it is, in the first of
    several batches."""
    batches: int = 1
    """Backward passes in a step. Slots are made in the last one."""


class TemporarySlots(Listener):
    """What makes and frees the slots, in the passes of a model.

    Parameters
    ----------
    model
        The module that the training loop calls. Only a weak reference is kept.
    blocks
        Its blocks.
    ring
        Makes and frees the slots, for the optimizer's pieces of state.
    may_make
        Whether slots may be made now.
    on_error
        Called with an exception of a hook, which does not reach the training.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        ring: Ring,
        may_make: Callable[[], bool],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.plan = TemporaryPlan()
        """The present plan."""
        self._model = weakref.ref(model)
        self._blocks = blocks
        self._ring = ring
        self._may_make = may_make
        self._errors = HookErrors(on_error)
        self._places = {it.name: place for place, it in enumerate(blocks)}
        self._passes = 0
        """Forward passes since the last step."""
        self._hearing: Hearing | None = None

    def set_plan(self, plan: TemporaryPlan) -> None:
        """Make and free slots by a plan from now on. Not within a call of the model."""
        self.plan = plan
        if self._hearing is not None:
            self._hearing.close()
            self._hearing = None
        self._ring.free_temporary()
        model = self._model()
        if plan.made_in and model is not None:
            blocks = {it.name: it.module for it in self._blocks}
            self._hearing = Hearing(self, Order.TEMPORARY, self._errors.on_error, model, blocks)

    def step_begins(self) -> None:
        """The optimizer steps: the last slots are made, and batches are counted anew."""
        if None in self.plan.made_in:
            self._errors(self._make)(len(self.plan.made_in))
        self._passes = 0

    def close(self) -> None:
        """Remove the hooks."""
        self.set_plan(TemporaryPlan())

    # ------------------------------------------------------------------ passes

    def pass_begins(self, now: Pass, _args: object, _kwargs: object) -> None:
        """Count a batch, and free slots that no block is named for."""
        self._passes += now.is_training
        if self._passes > 1:
            self._ring.free_temporary()
        self._free(now, lambda name: name is not None and name not in self._places)

    def block_begins(self, name: str, now: Pass, _args: object, _kwargs: object) -> None:
        """Free the slots whose memory the block needs, or make some for a checkpoint's."""
        if now.is_second:
            self.block_reached(name)
        else:
            self._free(now, lambda before: before == name)

    def pass_ends(self, now: Pass, _output: object, *, failed: bool) -> None:
        """Free all slots that the backward pass does not free."""
        if not failed:
            self._free(now, lambda _: True)
            if not now.is_training:
                self._ring.free_temporary()

    def _free(self, now: Pass, is_due: Callable[[str | None], bool]) -> None:
        """Free slots up to the last one that is due."""
        due = [number for number, name in enumerate(self.plan.freed_before) if is_due(name)]
        if due and now.is_forward:
            self._ring.free_temporary(due[-1] + 1)

    def block_reached(self, name: str) -> None:
        """Make the slots that are due, from what the block behind has saved, or free some."""
        place = self._places[name]
        due = sum(self._places.get(it, 0) >= place for it in self.plan.freed_in_backward)
        if due and self._passes == 1 < self.plan.batches:
            self._ring.free_temporary(len(self.plan.freed_before) + due)
        made_in = [self._places.get(it, -1) for it in self.plan.made_in if it is not None]
        self._make(sum(it >= place for it in made_in))

    def _make(self, count: int) -> None:
        """Make so many in the last batch of a step that may have slots."""
        if self._passes >= self.plan.batches and self._may_make():
            self._ring.make_temporary(count)
