"""Follows the memory of one step that is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import _C

from umem.module_hooks import Undo, hook_calls
from umem.recorder._blocks import Block
from umem.recorder._guard import Guard
from umem.recorder._memory import StepMemory
from umem.recorder._parameters import OUTSIDE
from umem.recorder._saved import SavedTensors

__all__ = ["Look"]


class Look:
    """All that a follower does only in a step that is looked at.

    Parameters
    ----------
    memory
        Told of the tensors that are made, used and saved.
    blocks
        The modules inside of them are hooked too: a checkpoint within a block's own forward
        computes again without calling the block.
    guard
        Makes hooks.
    is_running
        Whether a call of the model or a block is under way.
    """

    def __init__(
        self,
        memory: StepMemory,
        blocks: Iterable[Block],
        guard: Guard,
        is_running: Callable[[], bool],
    ) -> None:
        self.memory = memory
        self._saved = SavedTensors(guard(memory.on_save), guard(memory.on_use))
        self._is_running = is_running
        # Modules inside a block that run while a checkpoint computes again.
        self._inner = 0
        self._hooks: list[Undo] = []
        for block in blocks:
            enter, leave = partial(self._enter_inner, block), self._leave_inner
            for module in block.module.modules():
                if module is not block.module:
                    self._hooks += hook_calls(module, enter, leave, guard.on_error)

    def close(self) -> None:
        """Take its hooks away, and forget the memory."""
        for undo in self._hooks:
            undo()
        self._hooks.clear()
        self._saved.close()
        self.memory.close()

    # ------------------------------------------------------------------ calls

    def call_begins(self, args: object, kwargs: object, *, is_outermost: bool) -> None:
        """The model or a block is called; its phase has not begun."""
        if is_outermost:
            self._saved.push()
        else:
            self.hand_on((args, kwargs), "result")

    def call_runs(
        self,
        name: str | None,
        args: object,
        kwargs: object,
        *,
        is_outermost: bool,
        recomputed_for: str,
    ) -> None:
        """Its phase has begun.

        Parameters
        ----------
        name
            Of the block; None for the model.
        args, kwargs
            Of the call.
        is_outermost
            Whether it is no part of another call.
        recomputed_for
            The backward phase for which a checkpoint calls it, or "".
        """
        if is_outermost:
            self.memory.call_inputs(args, kwargs)
            self.memory.enter_block(OUTSIDE)
        else:
            self.take((args, kwargs))
        if name is not None:
            self.memory.enter_block(name)
        if not recomputed_for:
            self.memory.saves.begin_call(OUTSIDE if name is None else name)
        if recomputed_for:
            self.memory.set_recomputing(recomputed_for)
            self._saved.push_before_others()

    def call_ends(
        self, name: str | None, output: object, *, is_recomputed: bool, is_abandoned: bool
    ) -> None:
        """It returns, or an exception has gone through it.

        Parameters
        ----------
        name
            Of the block; None for the model.
        output
            What it returns.
        is_recomputed
            Whether a checkpoint has called it.
        is_abandoned
            Whether an exception leaves the outermost call.
        """
        if not is_recomputed:
            self.memory.saves.end_call()
        self.hand_on(output, "result")
        self.memory.leave_block(OUTSIDE if name is None else name)
        if is_recomputed:
            self.memory.set_recomputing("")
        if is_recomputed or is_abandoned:
            self._saved.pop()

    def _enter_inner(self, block: Block, *_: object) -> None:
        """A module inside a block is called; outside of the block's call, by a checkpoint."""
        if self._is_running() or _C._current_graph_task_id() == -1:
            return
        self._inner += 1
        if self._inner == 1:
            self.memory.enter_block(block.name)
            self._saved.push_before_others()

    def _leave_inner(self, *_: object, **__: object) -> None:
        if self._inner == 0:
            return
        self._inner -= 1
        if self._inner == 0:
            self._saved.pop()

    # ------------------------------------------------------------------ phases

    def hand_on(self, value: object, what: str) -> None:
        """The phase that ends has made this, if it is not known."""
        self.memory.see_made(value, what)

    def take(self, value: object) -> None:
        """The phase that has begun uses this."""
        self.memory.see_used(value)

    def forward_ends(self, roots: object) -> None:
        """A backward pass is about to begin from these tensors."""
        self.hand_on(roots, "loss")
        self._saved.pop()
