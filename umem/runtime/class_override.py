"""Gives tensors a class that the phase of the program does not give them.

A module of its own: what only names classes is imported also in a torch that lacks the private
names of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from umem.core.classes import TensorClass

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["class_override"]


@contextmanager
def class_override(allocator: Allocator, tensor_class: TensorClass) -> Iterator[None]:
    """Give every tensor allocated in the block a class, in any phase."""
    token = allocator.enter_class(tensor_class.number)
    try:
        yield
    finally:
        allocator.leave_class(token)
