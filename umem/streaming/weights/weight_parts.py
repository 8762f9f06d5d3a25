"""The tensors that a weight is made of, quantised or not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from umem.adapters import adapter_of
from umem.runtime.model_parts import plain_tensors

__all__ = ["weight_parts"]


def weight_parts(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of a weight or buffer, each with a storage.

    Also those that a library keeps in attributes of it, such as the scales of a quantised one.
    """
    yield from plain_tensors(weight)
    adapter = adapter_of(type(weight))
    for tensor in () if adapter is None else adapter.more_tensors(weight):
        yield from plain_tensors(tensor)
