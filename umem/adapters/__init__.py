"""Libraries of which umem has to know more than torch's classes tell: one file for each.

The rest of umem asks by :data:`ADAPTERS`, or by the class of what it meets (:func:`adapter_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from umem.adapters.bitsandbytes import Bitsandbytes
from umem.adapters.deepspeed import DeepSpeed
from umem.adapters.fsdp import FSDP
from umem.adapters.interface import Adapter, GatheredParameters
from umem.adapters.torchao import TorchAO
from umem.adapters.transformers import Transformers
from umem.runtime.model_loading import LoadingMemory
from umem.runtime.model_parts import plain_tensors

__all__ = [
    "ADAPTERS",
    "adapt_loading",
    "adapter_of",
    "find_gathering",
    "is_filled",
    "weight_parts",
]

ADAPTERS: tuple[Adapter, ...] = (Bitsandbytes(), DeepSpeed(), FSDP(), TorchAO(), Transformers())

_BY_MODULE = {it.module: it for it in ADAPTERS}


def adapter_of(kind: type) -> Adapter | None:
    """The adapter of the library that has defined a class, or the first of its bases that one has.

    None for torch's own classes, those of the program, and those of any other library.
    """
    for base in kind.__mro__:
        found = _BY_MODULE.get(base.__module__.partition(".")[0])
        if found is not None:
            return found
    return None


def weight_parts(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of a weight or buffer, each with a storage, and those of its attributes."""
    yield from plain_tensors(weight)
    adapter = adapter_of(type(weight))
    for tensor in () if adapter is None else adapter.more_tensors(weight):
        yield from plain_tensors(tensor)


def is_filled(value: object) -> bool:
    """Whether an argument is a library's store that a block's call fills for later ones."""
    adapter = adapter_of(type(value))
    return adapter is not None and adapter.is_filled(value)


def adapt_loading(memory: LoadingMemory | None) -> bool:
    """Adapt the loaders of libraries that the program has imported; whether that is all of them."""
    done = [it.adapt_loading(memory) for it in ADAPTERS]
    return all(done)


def find_gathering(model: nn.Module) -> Callable[[], GatheredParameters]:
    """What tells what parameters of a model are gathered from now."""
    found = (it.find_gathering(model) for it in ADAPTERS)
    return next(filter(None, found), GatheredParameters)
