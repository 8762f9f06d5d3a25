"""Activations of blocks that are copied to the host between their forward and backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.activations.copied_activations import CopiedActivations

__all__ = ["CopiedActivations"]

__getattr__ = lazy_names(
    __name__,
    {
        "copied_activations": "CopiedActivations",
    },
)
