"""Activations that leave between their forward and backward pass, and losses in slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.activations.copied_activations import CopiedActivations
    from umem.streaming.activations.sliced_loss import SlicedLosses

__all__ = ["CopiedActivations", "SlicedLosses"]

__getattr__ = lazy_names(
    __name__,
    {
        "copied_activations": "CopiedActivations",
        "sliced_loss": "SlicedLosses",
    },
)
