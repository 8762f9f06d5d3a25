"""Runs a block's call again in the backward pass, in place of what autograd saves of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from umem.streaming.activations.buffer_values import BufferValues
from umem.torch_compat import begin_checkpoint

__all__ = ["RecomputedCall"]


class RecomputedCall:
    """A call of a block that torch's checkpoint runs again when its backward pass comes.

    Between both ends, autograd saves nothing of the call but the tensors in its arguments: a change
    of these from now on is autograd's error, and they may leave the device. umem's own hooks run
    the second time, too: the block's weights come as for any checkpoint.

    Parameters
    ----------
    module
        The block.
    args, kwargs
        Its arguments.
    is_random
        Whether the states of torch's generators are restored.
    buffers
        Those that a call changes: the second one begins with the values of the first, and changes
        none.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_random: bool,
        buffers: Iterable[torch.Tensor] = (),
    ) -> None:
        tensors: list[torch.Tensor] = []
        given = _without_tensors((args, kwargs), tensors)
        before = BufferValues.of(buffers)

        def call(*tensors: torch.Tensor) -> None:
            args, kwargs = _with_tensors(given, tensors)
            with BufferValues.of(before.buffers).put_back_at_end():
                before.put_back()
                module(*args, **kwargs)

        self._ends = begin_checkpoint(call, tensors, is_random=is_random)

    def end(self) -> None:
        """The call returns."""
        next(self._ends, None)

    def abandon(self) -> None:
        """An exception has ended the call."""
        self._ends.close()


class _Place(int):
    """The number of a tensor that was there."""


def _without_tensors(value: Any, found: list[torch.Tensor]) -> Any:
    """Plain arguments with their tensors taken out into a list."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _Place(len(found) - 1)
    if type(value) in (tuple, list):
        return type(value)(_without_tensors(it, found) for it in value)
    if type(value) is dict:
        return {name: _without_tensors(it, found) for name, it in value.items()}
    return value


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The arguments with tensors in the same places."""
    if isinstance(value, _Place):
        return tensors[value]
    if type(value) in (tuple, list):
        return type(value)(_with_tensors(it, tensors) for it in value)
    if type(value) is dict:
        return {name: _with_tensors(it, tensors) for name, it in value.items()}
    return value
