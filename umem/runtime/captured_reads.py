"""Holds the tensors that are used while a CUDA graph is captured: replays read their addresses."""

from __future__ import annotations

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
        self._is_begun = False

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look at the uses of tensors that nothing else guards, until :meth:`end`."""
        self._is_begun = True
        self.watch(tensors)

    def end(self) -> None:
        """Guard nothing any more, if there is no capture."""
        if self._is_begun and not self._is_capturing():
            self._is_begun = False
            self.release()

    def use(self, tensor: torch.Tensor) -> None:
        """Leave a tensor where it is for as long as it exists, if a capture uses it."""
        if self._is_capturing():
            self.give_back([tensor])
            note_export(tensor)
