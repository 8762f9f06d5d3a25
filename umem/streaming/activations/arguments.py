"""Arguments of a block's call, apart from the tensors in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Arguments"]


class Arguments:
    """Plain arguments, in whose places other tensors can be.

    One that is there several times, as in attention to itself, is so again: functions ask for that.

    Parameters
    ----------
    args, kwargs
        Tensors, numbers and the like, and containers of these.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tensors: list[torch.Tensor] = []
        self._given = self._without_tensors((args, kwargs))

    def take_tensors(self) -> list[torch.Tensor]:
        """The tensors, each once, which this object no longer holds."""
        taken, self._tensors = self._tensors, []
        return taken

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """The arguments with tensors in the places of those that were taken, in their order."""
        args, kwargs = _with_tensors(self._given, tensors)
        return args, kwargs

    def _without_tensors(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for number, tensor in enumerate(self._tensors):
                if tensor is value:
                    return _Place(number)
            self._tensors.append(value)
            return _Place(len(self._tensors) - 1)
        if type(value) in (tuple, list):
            return type(value)(map(self._without_tensors, value))
        if type(value) is dict:
            return {name: self._without_tensors(it) for name, it in value.items()}
        return value


class _Place(int):
    """The number of a tensor that was there."""


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if type(value) in (tuple, list):
        return type(value)(_with_tensors(it, tensors) for it in value)
    if type(value) is dict:
        return {name: _with_tensors(it, tensors) for name, it in value.items()}
    return value
