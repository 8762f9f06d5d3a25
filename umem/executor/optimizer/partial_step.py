"""An optimizer's step in parts, so that pages can move between them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from umem.capture.live import Block
from umem.trace import OPTIMIZER

__all__ = [
    "Part",
    "PartialOptimizerStep",
    "PerBlockStepHook",
    "can_slice",
    "part_label",
    "part_name",
]

Part = list[list[torch.Tensor]]
"""Some of an optimizer's parameters, by its groups."""

_EACH_BY_ITSELF = (
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
"""Optimizers that update each parameter from its own gradient and state alone: the order and the
company of the others make no difference to a bit."""


def part_label(name: str) -> str:
    """Label of a part's phase, from the name of its block; empty for what belongs to none."""
    return f"{OPTIMIZER} {name}".rstrip()


def part_name(label: str) -> str:
    """The name of a part's block, from the label of its phase."""
    return label.removeprefix(OPTIMIZER).lstrip()


def can_slice(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step may be done in parts: exactly one of torch's own kinds."""
    return type(optimizer) in _EACH_BY_ITSELF


class PartialOptimizerStep:
    """Does an optimizer's step block by block, ahead of the step that the program calls.

    That one then finds no parameters. Where a part raises, the optimizer has its parameters again,
    and the error is the program's, as that of the step would be.

    Parameters
    ----------
    optimizer
        For which :func:`can_slice` holds. Only a weak reference is kept.
    blocks
        Whose parameters make a part each; all others are a part together.
    """

    def __init__(self, optimizer: Optimizer, blocks: Iterable[Block]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._owner = WeakIdKeyDictionary()
        for block in blocks:
            for parameter in block.module.parameters():
                self._owner.setdefault(parameter, block.name)
        self._whole: Part | None = None

    def parts(self, is_wanted: Callable[[torch.Tensor], bool]) -> dict[str, Part]:
        """The parts of a step by the name of the block; empty for what belongs to none.

        Parameters
        ----------
        is_wanted
            Tells which of the optimizer's parameters take part in it.
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
        """Do the step, part by part.

        Parameters
        ----------
        begin
            Called before each part with its block's name; empty for what belongs to no block. Must
            not raise.
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
        """Do the step for one part, and leave the optimizer as it was."""
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
        _plain_step(optimizer)(optimizer)

    def restore(self) -> None:
        """Give the optimizer its parameters back. Does nothing where it has them."""
        optimizer, whole = self._optimizer(), self._whole
        if optimizer is not None and whole is not None:
            _set_parameters(optimizer.param_groups, whole)
        self._whole = None


def _set_parameters(groups: list[dict[str, Any]], part: Part) -> None:
    for group, parameters in zip(groups, part, strict=True):
        group["params"] = parameters


def _plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The step without the hooks that torch puts around it: they run once, for the whole step."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    plain: Callable[[Optimizer], Any] = step
    return plain


# Whether an optimizer's steps can be done in parts, as the program calls them.

_MOST_REFUSED = 3
"""Steps in a row that a plan wants in parts and that are not: the next ones will not be either."""


class PerBlockStepHook:
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
        self,
        optimizer: Optimizer,
        slices: PartialOptimizerStep | None,
        begin: Callable[[str], None],
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
