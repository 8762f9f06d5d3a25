"""The memory behind a tensor, of which a wrapper around others has none of its own.

Such wrappers are the parts of a sharded model (DTensor), or quantised weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["named_parts", "plain_tensors", "storage_addresses", "unwrapped", "wrapped_tensors"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def wrapped_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that a tensor subclass wraps; None for a tensor that wraps none.

    What else it is made of is left out: a DTensor names its mesh of devices too.
    """
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return None
    parts = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, torch.Tensor)]


def unwrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that wrap none behind a tensor subclass; such a tensor itself."""
    wrapped = None if type(tensor) in _PLAIN else wrapped_tensors(tensor)  # nearly all are plain
    if wrapped is None:
        yield tensor
        return
    for part in wrapped:
        yield from unwrapped(part)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Those of them that have memory, as sparse ones have not."""
    return (part for part in unwrapped(tensor) if part.layout is torch.strided)


def named_parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The plain tensors behind a tensor of this name; several are told by their numbers."""
    parts = list(plain_tensors(tensor))
    if len(parts) == 1:
        return [(name, parts[0])]
    return [(f"{name}[{number}]", part) for number, part in enumerate(parts)]


def storage_addresses(tensor: torch.Tensor) -> list[int]:
    """Where the storages behind a tensor begin; none of those without memory."""
    addresses = (part.untyped_storage().data_ptr() for part in plain_tensors(tensor))
    return [address for address in addresses if address]
