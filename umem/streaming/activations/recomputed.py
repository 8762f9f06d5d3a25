"""Runs a block's call again in the backward pass, in place of what autograd saves of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from umem.runtime.model_parts import tensors_in
from umem.runtime.torch_hooks.saved_tensors import check_version
from umem.torch_compat import begin_checkpoint, version_counter

__all__ = ["RecomputedCall"]


class RecomputedCall:
    """A call of a block that torch's checkpoint runs again when its backward pass comes.

    Between both ends, autograd saves nothing of the call. umem's own hooks run the second time,
    too: the block's weights come as for any checkpoint.

    Parameters
    ----------
    module
        The block.
    args, kwargs
        Its arguments, which are kept.
    is_random
        Whether the states of torch's generators are restored.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_random: bool
    ) -> None:
        self._versions: list[tuple[torch.Tensor, int]] = []
        versions = self._versions

        def call(*_tensors: torch.Tensor) -> None:
            for tensor, version in versions:
                check_version(tensor, version)
            module(*args, **kwargs)

        self._tensors = [*tensors_in((args, kwargs))]
        self._ends = begin_checkpoint(call, self._tensors, is_random=is_random)

    def end(self) -> None:
        """The call returns: a change of an argument from now on is an error, as autograd's are."""
        self._versions += [(tensor, version_counter(tensor)) for tensor in self._tensors]
        next(self._ends, None)

    def abandon(self) -> None:
        """An exception has ended the call."""
        self._ends.close()
