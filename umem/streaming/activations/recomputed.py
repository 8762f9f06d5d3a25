"""Runs a block's call again in the backward pass, in place of what autograd saves of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from umem.runtime.model_parts import tensors_in
from umem.streaming.activations.arguments import Arguments
from umem.streaming.activations.buffer_values import BufferValues
from umem.streaming.activations.random_states import RandomStates
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
        random = RandomStates(tensors_in((args, kwargs))) if is_random else None
        given = Arguments(args, kwargs)
        before = BufferValues.of(buffers)

        def call(*tensors: torch.Tensor) -> None:
            args, kwargs = given.with_tensors(tensors)
            with (
                BufferValues.of(before.buffers).put_back_at_end(),
                random.put_back() if random is not None else nullcontext(),
            ):
                before.put_back()
                module(*args, **kwargs)

        self._ends = begin_checkpoint(call, given.take_tensors())

    def end(self) -> None:
        """The call returns."""
        next(self._ends, None)

    def abandon(self) -> None:
        """An exception has ended the call."""
        self._ends.close()
