"""Memory that is page-locked beside the program, before homes of tensors ask for it."""

from __future__ import annotations

import atexit
import contextlib
import functools
from typing import TYPE_CHECKING

import torch

from umem.core.classes import TensorClass
from umem.runtime.cuda_streams import CurrentStream

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["lock_ahead"]


def lock_ahead(allocator: Allocator, device: int, size_bytes: int) -> None:
    """Begin to lock as much for homes that a GPU's tensors will get on this stream."""
    if size_bytes <= 0:
        return
    _end_at_exit(allocator, device)
    # Without CUDA, in tests, there is the default stream alone.
    has_streams = torch.cuda.is_initialized()
    stream = CurrentStream(torch.device("cuda", device)).handle() if has_streams else 0
    with contextlib.suppress(RuntimeError):  # no more threads
        allocator.lock_ahead(device, size_bytes, stream, TensorClass.OPTIMIZER_STATE.number)


@functools.cache
def _end_at_exit(allocator: Allocator, device: int) -> None:
    """CUDA is gone soon after."""
    atexit.register(allocator.end_locking_ahead, device, gives_back=False)
