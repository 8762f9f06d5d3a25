"""Tensor classes: the roles of memory in a training step, as policies and reports name them."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["TensorClass"]


class TensorClass(StrEnum):
    """Role of a tensor in a training step.

    The order of the members is the order of the native library's class numbers
    (``allocators/core/types.hpp``); :attr:`number` is it.
    """

    WEIGHTS = "weights"
    FROZEN_WEIGHTS = "frozen_weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    OTHER = "other"

    @property
    def number(self) -> int:
        """The native library's number for this class, 0 to 5."""
        return _INDEX[self]


_INDEX = {member: number for number, member in enumerate(TensorClass)}
