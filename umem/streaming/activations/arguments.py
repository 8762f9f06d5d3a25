"""Arguments of a block's call, apart from the tensors in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from umem.adapters import is_filled

__all__ = ["Arguments", "told_of_filled"]


class Arguments:
    """Plain arguments, in whose places other tensors can be.

    One that is there several times, as in attention to itself, is so again: functions ask for that.
    An object that calls fill, such as a cache of keys, is a copy of what it is now, without its
    tensors: what a second call puts there nobody else sees.

    Parameters
    ----------
    args, kwargs
        Tensors, numbers and the like, containers of these, and what calls fill.
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
        return _Emptied(_emptied(value)) if is_filled(value) else value


class _Place(int):
    """The number of a tensor that was there."""


class _Emptied(NamedTuple):
    """What a call fills, without its tensors."""

    value: object


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if type(value) in (tuple, list):
        return type(value)(_with_tensors(it, tensors) for it in value)
    if type(value) is dict:
        return {name: _with_tensors(it, tensors) for name, it in value.items()}
    return _emptied(value.value) if isinstance(value, _Emptied) else value


def _emptied(value: Any) -> Any:
    """A copy of an object and all that it holds, with None in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return None
    if type(value) in (tuple, list):
        return type(value)(map(_emptied, value))
    if type(value) is dict:
        return {name: _emptied(it) for name, it in value.items()}
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return value
    copy = object.__new__(type(value))
    vars(copy).update(_emptied(vars(value)))
    return copy


def told_of_filled(
    value: Any, tensors: list[torch.Tensor], *, is_within: bool = False
) -> tuple[object, ...]:
    """What there is in arguments that calls fill: all but the tensors, which are added to these."""
    if isinstance(value, torch.Tensor):
        tensors += [value] * is_within
        return ()
    is_within = is_within or is_filled(value)
    parts: Iterable[Any] = ()
    if isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, dict):
        parts = chain.from_iterable(value.items())
    elif is_within and hasattr(value, "__dict__") and not isinstance(value, type):
        parts = [vars(value)]
    own = (
        (type(value), value if isinstance(value, int | float | str) else None) if is_within else ()
    )
    found = (told_of_filled(it, tensors, is_within=is_within) for it in parts)
    return *own, *(it for it in found if is_within or it)
