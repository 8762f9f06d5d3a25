"""What autograd saves in the forward calls of the model and its blocks, call by call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["Save", "SaveLog", "SavedTensor"]


@dataclass(frozen=True)
class SavedTensor:
    """An activation that autograd saves in a forward call of the model or a block.

    What is saved in a block's call counts there only. Who has hooks of its own on saved tensors
    around these calls, and counts in the same way, knows by `block`, `call` and `ordinal` which
    tensor of the trace it is given.

    Parameters
    ----------
    block
        Name of the block; empty for the model, outside of blocks. The inputs that a checkpoint
        keeps of a block are saved there.
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
    """Counts calls of the model and its blocks, and of the pack hook in them."""

    def __init__(self) -> None:
        self.saves: list[Save] = []
        self._calls: Counter[str] = Counter()
        self._open: list[_OpenCall] = []

    def begin_call(self, block: str) -> None:
        """A forward call begins, of the model or inside it."""
        self._open.append(_OpenCall(block, self._calls[block]))
        self._calls[block] += 1

    def end_call(self) -> None:
        """The last one that began and has not ended ends."""
        if self._open:
            self._open.pop()

    def note(self, storages: list[int]) -> None:
        """The pack hook is called for a tensor of these storages."""
        if not self._open:
            return
        at = self._open[-1]
        self.saves += [Save(at.block, at.call, at.ordinal, storage) for storage in storages]
        at.ordinal += 1


@dataclass(slots=True)
class _OpenCall:
    block: str
    call: int
    ordinal: int = 0
