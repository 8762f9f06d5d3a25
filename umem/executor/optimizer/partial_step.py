"""Runs an optimizer's step block by block, so that pages can move between the parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from umem.capture.live import Block
from umem.trace import OPTIMIZER

__all__ = [
    "PER_PARAMETER_OPTIMIZERS",
    "Part",
    "PartialOptimizerStep",
    "PerBlockStepHook",
    "can_slice",
    "part_label",
    "plain_step",
]

Part = list[list[torch.Tensor]]
"""Parameters of an optimizer, by parameter group."""

PER_PARAMETER_OPTIMIZERS = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers that update each parameter from its own gradient and state alone, so that a step in
parts gives the same bits."""


def part_label(name: str) -> str:
    """Label of a part's phase. `name` is its block's, or empty for parameters outside of blocks."""
    return f"{OPTIMIZER} {name}".rstrip()


def can_slice(optimizer: Optimizer) -> bool:
    """Whether a step may run in parts: only for torch's own classes, not for subclasses."""
    return type(optimizer) in PER_PARAMETER_OPTIMIZERS


class PartialOptimizerStep:
    """Runs an optimizer's step block by block, before the step that the program calls.

    The program's own step then finds no parameters. If a part raises, the optimizer gets its
    parameters back, and the error reaches the program as an error of its step would.

    Parameters
    ----------
    optimizer
        One for which :func:`can_slice` holds. Only a weak reference is kept.
    blocks
        The parameters of each block make one part; all others make one part together.
    """

    def __init__(self, optimizer: Optimizer, blocks: Iterable[Block]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._owner = WeakIdKeyDictionary()
        for block in blocks:
            for parameter in block.module.parameters():
                self._owner.setdefault(parameter, block.name)
        self._whole: Part | None = None

    def parts(self, is_wanted: Callable[[torch.Tensor], bool]) -> dict[str, Part]:
        """The parts of a step by block name; the empty name has parameters outside of blocks.

        Parameters
        ----------
        is_wanted
            Returns whether a parameter takes part.
        """
        groups = self._known().param_groups
        parts: dict[str, Part] = {}
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if is_wanted(parameter):
                    name = self._owner.get(parameter, "")
                    parts.setdefault(name, [[] for _ in groups])[number].append(parameter)
        return parts

    def run(self, begin: Callable[[str], None]) -> None:
        """Run the step part by part.

        Parameters
        ----------
        begin
            Called before each part with its block's name. Must not raise.
        """
        groups = self._known().param_groups
        parts = self.parts(lambda parameter: parameter.grad is not None)
        self._whole = [group["params"] for group in groups]
        try:
            for name, part in parts.items():
                begin(name)
                self._step(part)
            _set_parameters(groups, [[] for _ in groups])
        except BaseException:  # an interrupt too
            self.restore()
            raise

    def run_part(self, part: Part) -> None:
        """Run the step for one part, and leave the optimizer unchanged."""
        groups = self._known().param_groups
        whole = [group["params"] for group in groups]
        try:
            self._step(part)
        finally:
            _set_parameters(groups, whole)

    def _known(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _step(self, part: Part) -> None:
        optimizer = self._known()
        _set_parameters(optimizer.param_groups, part)
        plain_step(optimizer)(optimizer)

    def restore(self) -> None:
        """Give the optimizer its parameters back, if it lacks them."""
        optimizer, whole = self._optimizer(), self._whole
        if optimizer is not None and whole is not None:
            _set_parameters(optimizer.param_groups, whole)
        self._whole = None


def _set_parameters(groups: list[dict[str, Any]], part: Part) -> None:
    for group, parameters in zip(groups, part, strict=True):
        group["params"] = parameters


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The step without torch's hooks around it, which run once for the whole step."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    plain: Callable[[Optimizer], Any] = step
    return plain


_MOST_REFUSED = 3
"""Consecutive steps that could not run in parts, after which plans in parts are given up."""


class PerBlockStepHook:
    """Runs the optimizer's steps in parts if the plan wants it and the program's call allows it.

    A step with a closure computes gradients inside the step, and a later hook could change
    gradients after the parts have run: such steps are left whole.

    Parameters
    ----------
    slices
        Runs the parts; None if the optimizer cannot step in parts.
    begin
        Called before each part with its name. Must not raise.
    """

    def __init__(self, slices: PartialOptimizerStep | None, begin: Callable[[str], None]) -> None:
        self.is_possible = False
        """Whether the last step could run in parts."""
        self._slices = slices
        self._begin = begin
        self._hook: RemovableHandle | None = None
        self._is_due = False
        self._refused = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether too many steps in a row could not run in parts."""
        return self._refused >= _MOST_REFUSED

    def set_hook(self, handle: RemovableHandle) -> None:
        """Set the pre-step hook that calls :meth:`run`."""
        self._hook = handle

    def _hooks(self) -> dict[int, Any]:
        """The optimizer's pre-step hooks, in their order."""
        found = None if self._hook is None else self._hook.hooks_dict_ref()
        return found or {}

    def stay_last(self) -> None:
        """Move the hook behind those of the program, which may change gradients before the step.

        Do not call it from a hook of the optimizer.
        """
        hooks = self._hooks()
        if self._hook is not None and self._hook.id in hooks:
            hooks[self._hook.id] = hooks.pop(self._hook.id)

    def look(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_wanted: bool,
    ) -> None:
        """At the start of a step, decide whether it runs in parts.

        Parameters
        ----------
        optimizer, args, kwargs
            The arguments of the pre-step hook.
        is_wanted
            Whether the plan has work to do between the parts.
        """
        self.is_possible = (
            self._slices is not None
            and len(args) == 1  # the optimizer itself
            and not any(value is not None for value in kwargs.values())  # no closure
            and self._hook is not None
            and next(reversed(self._hooks()), None) == self._hook.id
        )
        self._is_due = is_wanted and self.is_possible
        if is_wanted:
            self._refused = 0 if self.is_possible else self._refused + 1

    def run(self) -> None:
        """Run the step in parts if :meth:`look` decided so.

        An error of a part reaches the program, as an error of its own step would.
        """
        is_due, self._is_due = self._is_due, False
        if is_due and self._slices is not None:
            self._slices.run(self._begin)

    def restore(self) -> None:
        """Give the optimizer its parameters back, if it lacks them."""
        self._is_due = False
        if self._slices is not None:
            self._slices.restore()

    def start_over(self) -> None:
        """Forget the steps so far that could not run in parts."""
        self._refused = 0
