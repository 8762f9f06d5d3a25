"""Values of buffers that a block's call changes, such as averages of BatchNorm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from umem.runtime.model_parts import lies_in_memory, parts_of
from umem.torch_compat import flatten_tensors, unflatten_tensors

__all__ = ["BufferValues", "have_equal_bits"]

_ALIGNED_BYTES = 16
"""The kernels of cuDNN may read so many bytes at a time."""


class BufferValues:
    """Values of buffers at one moment, with which a call can run that leaves the buffers alone.

    Those of one type are in one tensor: to copy each by itself takes the processor longer than some
    blocks take it.

    Parameters
    ----------
    buffers
        The buffers.
    values
        The value of each; those of now by default.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.buffers, values = buffers, buffers if values is None else values
        kinds: defaultdict[object, list[int]] = defaultdict(list)
        for number, it in enumerate(values):
            kinds[(it.dtype, it.device) if _is_packed(it) else number].append(number)
        with torch.no_grad():
            self._packs = [(its, _pack([values[it] for it in its])) for its in kinds.values()]

    @contextmanager
    def in_place_of_buffers(self, module: nn.Module) -> Iterator[list[torch.Tensor]]:
        """Have a module find copies of these values where its buffers are, in their order."""
        copies = list(self.buffers)
        with torch.no_grad():
            for its, pack in self._packs:
                like = [self.buffers[it] for it in its]
                parts = unflatten_tensors(pack.clone(), like) if len(its) > 1 else [pack.clone()]
                for number, copy in zip(its, parts, strict=True):
                    copies[number] = copy
        copy_of = {id(it): copy for it, copy in zip(self.buffers, copies, strict=True)}
        places = [
            (own, name, it)
            for part in parts_of(module)
            for own in [vars(part)["_buffers"]]
            for name, it in own.items()
            if id(it) in copy_of
        ]
        try:
            for own, name, it in places:
                own[name] = copy_of[id(it)]
            yield copies
        finally:
            for own, name, it in places:
                own[name] = it


def _is_packed(buffer: torch.Tensor) -> bool:
    """Whether others may lie behind a buffer in a tensor of its type."""
    is_aligned = buffer.dim() == 0 or not buffer.nbytes % _ALIGNED_BYTES
    return lies_in_memory(buffer) and is_aligned and buffer.is_contiguous()


def _pack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return flatten_tensors(values) if len(values) > 1 else values[0].clone()


def have_equal_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type have the same contents, NaN and signs included."""
    some = (it.detach().resolve_conj().resolve_neg().contiguous() for it in (tensor, other))
    return torch.equal(*(it.view(-1).view(torch.uint8) for it in some))
