"""transformers, as of 5.23: ``from_pretrained`` within a budget, and caches of keys.

https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/core_model_loading.py

Before it loads weights to a GPU, it allocates and frees as many bytes as the whole model has there,
so that torch's allocator caches them. For a model that is larger than the budget, umem would have
to page-lock so much host memory. Then it copies each weight from a mapped file to the GPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from umem import patches
from umem.adapters.interface import Adapter
from umem.runtime.model_loading import LoadingMemory, load_weight

__all__ = ["Transformers"]

_LOG = logging.getLogger("umem")

_CACHE = "transformers.cache_utils.Cache"


class Transformers(Adapter):
    """Its loading, without the warm-up and, with a memory for them, with weights by umem.

    And its caches, which models make and fill in a training, too, unless ``use_cache`` is off.
    """

    module = "transformers"

    def is_filled(self, value: object) -> bool:
        """Whether an argument is one of its caches."""
        kinds = type(value).__mro__
        return any(f"{it.__module__}.{it.__name__}" == _CACHE for it in kinds)

    def adapt_loading(self, memory: LoadingMemory | None) -> bool:
        """Replace two of its functions, once it has been imported."""
        # While the module is imported, its functions are still to come.
        if not patches.replace("transformers_warmup", _do_nothing):
            return False
        if memory is not None:
            patches.wrap("transformers_copy", functools.partial(_loading_by, memory))  # since 5
        return True


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """In the place of the warm-up, whose result nobody uses."""


def _loading_by(memory: LoadingMemory, theirs: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    has_failed = False

    @functools.wraps(theirs)
    def to_device(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        nonlocal has_failed
        if has_failed or device is None or torch.device(device).type != memory.device_type:
            return theirs(tensor, device, dtype)
        source = tensor[...]  # of a file: mapped, and not read yet
        try:
            loaded = load_weight(source, torch.device(device), dtype or source.dtype, memory)
        except Exception as error:
            loaded, has_failed = None, True
            _LOG.warning(
                "umem: weights are loaded as without umem: %s: %s", type(error).__name__, str(error)
            )
        return theirs(source, device, dtype) if loaded is None else loaded

    return to_device
