"""Ways past the guard of tensors, for what umem itself does to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from umem.runtime.native_guard import native_guard
from umem.torch_compat import DisableTorchFunctionSubclass

__all__ = ["PastGuards", "Unguarded", "addresses_of", "allowed"]

_native: Any = native_guard()

PastGuards: Any = nullcontext if _native is None else _native.PastGuards
"""A context in which no guard sees what this thread does to tensors."""

Unguarded: Any = DisableTorchFunctionSubclass if _native is None else _native.Unguarded
"""The same, in which subclasses see nothing either."""


def addresses_of(tensors: Collection[torch.Tensor]) -> list[int]:
    """Where tensors begin in memory. No guard sees that: nothing is read."""
    if _native is None:
        return list(map(torch.Tensor.data_ptr, tensors))
    addresses: list[int] = _native.addresses_of(tensors)
    return addresses


@contextmanager
def allowed(tensors: Collection[torch.Tensor]) -> Iterator[None]:
    """Let torch's operators, past guards, take the memory of tensors whose update is under way."""
    if _native is None:
        yield
        return
    _native.allow(tensors, True)
    try:
        yield
    finally:
        _native.allow(tensors, False)
