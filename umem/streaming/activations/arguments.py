"""Arguments of a block's call, apart from the tensors in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from umem.adapters import is_filled

__all__ = ["Arguments", "filled_tensors", "told_of_filled"]


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


class _Emptied:
    """What a call fills, without its tensors."""

    def __init__(self, value: object) -> None:
        self.value = value


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if type(value) in (tuple, list):
        return type(value)(_with_tensors(it, tensors) for it in value)
    if type(value) is dict:
        return {name: _with_tensors(it, tensors) for name, it in value.items()}
    return _emptied(value.value) if isinstance(value, _Emptied) else value


def _emptied(value: Any) -> Any:
    """A copy of an object and all that it holds, with None for each tensor."""
    if isinstance(value, torch.Tensor):
        return None
    if type(value) in (tuple, list):
        return type(value)(map(_emptied, value))
    if type(value) is dict:
        return {name: _emptied(it) for name, it in value.items()}
    if not _has_attributes(value):
        return value
    copy = object.__new__(type(value))
    vars(copy).update({name: _emptied(it) for name, it in vars(value).items()})
    return copy


def _has_attributes(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type)


def told_of_filled(value: Any) -> tuple[object, ...]:
    """What there is in arguments that calls fill, but for the contents of tensors."""
    found = (() if isinstance(it, torch.Tensor) else it for it in _held_by_filled(value))
    return tuple((type(it), it if isinstance(it, _TOLD) else None) for it in found)


def filled_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in arguments that calls fill."""
    return [it for it in _held_by_filled(value) if isinstance(it, torch.Tensor)]


_TOLD = (bool, int, str)


def _held_by_filled(value: Any, *, is_within: bool = False) -> Iterator[object]:
    is_within = is_within or is_filled(value)
    if is_within:
        yield value
    if isinstance(value, tuple | list):
        parts: Any = value
    elif isinstance(value, dict):
        parts = (it for pair in value.items() for it in pair)
    else:
        parts = vars(value).values() if is_within and _has_attributes(value) else ()
    for part in parts:
        if not isinstance(part, torch.Tensor):
            yield from _held_by_filled(part, is_within=is_within)
        elif is_within:
            yield part
