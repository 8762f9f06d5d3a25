"""Whether an optimizer's steps can be done in parts, as the program calls them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim.optimizer import Optimizer

from umem.executor._slices import OptimizerSlices

__all__ = ["StepInParts"]

_MOST_REFUSED = 3
"""Steps in a row that a plan wants in parts and that are not: the next ones will not be either."""


class StepInParts:
    """Does the optimizer's steps in parts where a plan wants it and the program's call allows it.

    A closure makes gradients inside of the step, and what hooks that run after the parts do to
    gradients would come too late: such a step is left whole.

    Parameters
    ----------
    optimizer
        Whose steps they are. Only a weak reference is kept.
    slices
        Does the parts; None where the optimizer has none.
    begin
        Called before each part with its name. Must not raise.
    """

    def __init__(
        self, optimizer: Optimizer, slices: OptimizerSlices | None, begin: Callable[[str], None]
    ) -> None:
        self.is_possible = False
        """Whether the last step that began could be done in parts."""
        self._optimizer = weakref.ref(optimizer)
        self._slices = slices
        self._begin = begin
        self._hook = -1
        self._is_due = False
        self._refused = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether plans with parts are in vain."""
        return self._refused >= _MOST_REFUSED

    def set_hook(self, number: int) -> None:
        """Number of the hook before the optimizer's step that calls :meth:`run`."""
        self._hook = number

    def stay_last(self) -> None:
        """Let hooks that the program has added see the whole step, and change gradients before it.

        Not from inside of the optimizer's hooks.
        """
        optimizer = self._optimizer()
        hooks: dict[int, Any] = {} if optimizer is None else optimizer._optimizer_step_pre_hooks
        if self._hook in hooks and next(reversed(hooks)) != self._hook:
            hooks[self._hook] = hooks.pop(self._hook)

    def look(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_wanted: bool,
    ) -> None:
        """A step begins: see whether it can be done in parts.

        Parameters
        ----------
        optimizer, args, kwargs
            What its hook is given.
        is_wanted
            Whether the plan has something to do between the parts.
        """
        self.is_possible = (
            self._slices is not None
            and len(args) == 1  # the optimizer itself
            and not any(value is not None for value in kwargs.values())  # no closure
            and next(reversed(optimizer._optimizer_step_pre_hooks)) == self._hook
        )
        self._is_due = is_wanted and self.is_possible
        if is_wanted:
            self._refused = 0 if self.is_possible else self._refused + 1

    def run(self) -> None:
        """Do the step that :meth:`look` was told of, if it is to be in parts.

        What a part raises is the program's, as it is of the step that the program calls.
        """
        is_due, self._is_due = self._is_due, False
        if is_due and self._slices is not None:
            self._slices.run(self._begin)

    def restore(self) -> None:
        """Give the optimizer its parameters back. Does nothing where it has them."""
        self._is_due = False
        if self._slices is not None:
            self._slices.restore()

    def start_over(self) -> None:
        """Plans are made without regard to the steps so far."""
        self._refused = 0
