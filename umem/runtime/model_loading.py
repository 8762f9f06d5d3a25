"""Loading models of `transformers` within a budget.

Before `from_pretrained` loads weights to a GPU, it allocates and frees as many bytes as the whole
model has there, so that torch's allocator caches them. For a model that is larger than the budget,
umem would have to page-lock so much host memory.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["skip_warmup"]

_MODULE, _FUNCTION = "transformers.modeling_utils", "caching_allocator_warmup"


def skip_warmup() -> bool:
    """Leave out the warm-up, once `transformers` has one; returns whether that is done."""
    module = sys.modules.get(_MODULE)
    # While the module is imported, its functions are still to come.
    if module is None or not hasattr(module, _FUNCTION):
        return False
    setattr(module, _FUNCTION, _do_nothing)
    return True


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """In the place of the warm-up, whose result nobody uses."""
