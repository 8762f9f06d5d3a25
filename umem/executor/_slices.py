"""An optimizer's step in parts, so that pages can move between them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from umem.recorder import Block
from umem.trace import OPTIMIZER

__all__ = ["OptimizerSlices", "Part", "can_slice", "part_label", "part_name"]

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


class OptimizerSlices:
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
