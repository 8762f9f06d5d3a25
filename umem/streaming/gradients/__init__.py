"""Gradients that move to the host, are clipped there, or are freed in the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.gradients.clipped_gradients import ClippedGradients
    from umem.streaming.gradients.copied_gradients import CopiedGradients
    from umem.streaming.gradients.freed_gradient import is_freed

__all__ = ["ClippedGradients", "CopiedGradients", "is_freed"]

__getattr__ = lazy_names(
    __name__,
    {
        "clipped_gradients": "ClippedGradients",
        "copied_gradients": "CopiedGradients",
        "freed_gradient": "is_freed",
    },
)
