"""Holds the tensors that are used while a CUDA graph is captured: replays read their addresses."""

from __future__ import annotations

import torch

from umem.runtime.guard import Guard
from umem.runtime.held_memory import note_export

__all__ = ["CapturedReads"]


class CapturedReads(Guard):
    """Guards tensors from before a capture until `release`, and holds each one that is used."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def use(self, tensor: torch.Tensor) -> None:
        """Leave a tensor where it is for as long as it exists."""
        self.give_back([tensor])
        note_export(tensor)
