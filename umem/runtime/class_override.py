"""Gives tensors a class that the phase of the program does not give them.

A module of its own: what only names classes is imported also in a torch that lacks the private
names of the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.classes import TensorClass

if TYPE_CHECKING:
    from umem.runtime._native import Allocator, ClassOverride

__all__ = ["class_override"]


def class_override(allocator: Allocator, tensor_class: TensorClass) -> ClassOverride:
    """Give every tensor allocated in a ``with`` block a class, in any phase."""
    return allocator.class_override(tensor_class.number)
