"""Holds the tensors that are used while a CUDA graph is captured: replays read their addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from umem.runtime.guard import Guard
from umem.runtime.held_memory import note_export

__all__ = ["CapturedReads"]


class CapturedReads(Guard):
    """Guards tensors from the beginning of a capture on, and holds each one that it uses.

    Parameters
    ----------
    is_capturing
        Whether the calling thread's stream is captured.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        super().__init__(lambda: None)
        self._is_capturing = is_capturing
        self._thread: int | None = None
        """In which a capture has begun."""

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look at the uses of tensors that nothing else guards, until :meth:`end`."""
        self._thread = threading.get_ident()
        self.watch(tensors)

    def end(self) -> None:
        """Guard nothing any more, if this thread has begun a capture and it is over."""
        if self._thread == threading.get_ident() and not self._is_capturing():
            self._thread = None
            self.release()

    def use(self, tensor: torch.Tensor) -> None:
        """Leave a tensor where it is for as long as it exists, if a capture uses it."""
        if self._is_capturing():
            self.give_back([tensor])
            note_export(tensor)
