"""What autograd saves in the forward calls of blocks, call by call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["Save", "SaveLog", "SavedTensor"]


@dataclass(frozen=True)
class SavedTensor:
    """An activation that autograd saves in a block's forward call.

    Who has hooks of its own on saved tensors around the calls of blocks, and counts in the same
    way, knows by `block`, `call` and `ordinal` which tensor of the trace it is given.

    Parameters
    ----------
    block
        Name of the block.
    call
        Which of its forward calls in the step, from 0; those in which a checkpoint computes again
        do not count.
    ordinal
        Which call of the pack hook since that call began, from 0; every one counts, whatever it is
        for.
    tensor
        Index in the trace's tensors. Views of one storage are one tensor.
    nbytes
        Bytes of that storage.
    """

    block: str
    call: int
    ordinal: int
    tensor: int
    nbytes: int


@dataclass(frozen=True)
class Save:
    """A tensor that was saved, before the trace is made."""

    block: str
    call: int
    ordinal: int
    storage: int
    """Its number in the step."""


class SaveLog:
    """Counts calls of blocks, and of the pack hook in them."""

    def __init__(self) -> None:
        self.saves: list[Save] = []
        self._calls: Counter[str] = Counter()
        self._block: str | None = None
        self._ordinal = 0

    def begin_call(self, block: str) -> None:
        """A forward call of a block begins."""
        self._calls[block] += 1
        self._block = block
        self._ordinal = 0

    def end_call(self) -> None:
        """It ends."""
        self._block = None

    def note(self, storages: list[int]) -> None:
        """The pack hook is called for a tensor of these storages."""
        if self._block is None:
            return
        call = self._calls[self._block] - 1
        self.saves += [Save(self._block, call, self._ordinal, storage) for storage in storages]
        self._ordinal += 1
