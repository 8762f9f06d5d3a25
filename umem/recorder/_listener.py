"""What a follower of steps tells."""

from __future__ import annotations

from typing import Protocol

from umem.recorder._blocks import Block
from umem.recorder._memory import StepMemory
from umem.recorder._windows import Window

__all__ = ["StepListener"]


class StepListener(Protocol):
    """Told of the steps of a training while they run.

    A phase is told of in the thread that runs it: the one that calls the model, or autograd's. Only
    one of them runs at a time. What a listener raises ends the following through the guard, never
    the training.
    """

    def step_begins(self) -> StepMemory | Window | None:
        """The model is called for the first time in a step.

        Returns
        -------
        StepMemory, Window or None
            What is to follow the step's memory, which is slow; or the only part of the step that
            is to be told of. None in a step that is told of as a whole.
        """

    def phase_begins(self, label: str) -> None:
        """A phase begins, and the one before it ends. The GPU may be far behind."""

    def block_begins(self, block: Block, is_recomputed: bool) -> None:
        """The forward pass of the model or of a block begins, in the phase that was told of last.

        Parameters
        ----------
        block
            The model first, then, inside its pass, its blocks.
        is_recomputed
            Whether a checkpoint calls it, within the backward pass.
        """

    def block_ends(self, block: Block) -> None:
        """It ends, by an exception too; told of before the phase that follows.

        Where an interrupt has ended it (``KeyboardInterrupt``), told of when the next step begins.
        """

    def step_ends(self, is_broken: bool) -> None:
        """The optimizer has stepped.

        Parameters
        ----------
        is_broken
            Whether an exception or an interrupt came into its way: its phases are not those of a
            whole step.
        """
