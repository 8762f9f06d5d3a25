"""Asks for memory of a class, which the host, the device or a limit may refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from umem.core.classes import TensorClass
from umem.torch_compat import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["unless_refused"]

_T = TypeVar("_T")

_REFUSALS = ("CUDA out of memory.", "DefaultCPUAllocator: can't allocate memory")
"""What errors say where an allocator has no more. One of a swapped allocator is a ``RuntimeError``
from torch, and a ``MemoryError`` where the allocator is asked itself."""


def unless_refused(allocator: Allocator, born: TensorClass, make: Callable[[], _T]) -> _T | None:
    """What a function makes of memory as a class gets it; None if that is refused."""
    phase = allocator.phase()
    try:
        with DisableTorchFunctionSubclass(), allocator.class_override(born.number):
            return make()
    except (RuntimeError, MemoryError) as error:
        if not any(text in str(error) for text in _REFUSALS):
            raise
        allocator.set_phase(phase)  # it ends a step by which it lets the error out
        return None
