"""Sees what autograd saves for the backward pass, and when the backward pass asks for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch

from umem.runtime.torch_hooks import saved_tensors as saved_tensor_hooks
from umem.runtime.torch_hooks.saved_tensors import Hooks, Kept, keep, unpack_kept

__all__ = ["Save", "SaveLog", "SavedTensor", "SavedTensors"]


class SavedTensors:
    """torch's hooks on saved tensors, without getting into the way of anybody else's.

    Only the innermost hooks are called, so these keep out where others are: what a checkpoint or an
    offload packs away is not held by the graph. While a checkpoint computes again they are put
    before its hooks and call them.

    Parameters
    ----------
    on_save, on_use
        Called with each tensor that is saved, and with it again when it is needed.
    """

    def __init__(
        self, on_save: Callable[[torch.Tensor], None], on_use: Callable[[torch.Tensor], None]
    ) -> None:
        self._on_save = on_save
        self._on_use = on_use
        self._own: Hooks = (self._pack, self._unpack)
        # By thread: autograd's own ones have hooks of their own.
        self._pushed: defaultdict[int, list[Hooks]] = defaultdict(list)
        self._is_closed = False

    def push(self) -> None:
        """See what is saved from now on in this thread, unless somebody else's hooks do."""
        if not self._pushed[get_ident()] and saved_tensor_hooks.innermost() is None:
            self._push_own()

    def push_before_others(self) -> None:
        """See what is saved from now on in this thread, and pass it on to hooks that are there."""
        top = saved_tensor_hooks.innermost()
        if top is not None:
            self._push((self._packing_before(top[0]), top[1]))
        else:
            self._push_own()

    def pop(self) -> None:
        """Undo this thread's last push.

        Where a program has entered hooks since, a later call does it.
        """
        pushed = self._pushed[get_ident()]
        if pushed and saved_tensor_hooks.pop_if_innermost(pushed[-1]):
            pushed.pop()

    def close(self) -> None:
        """See nothing any more, of graphs that live on either.

        What other threads have pushed goes when it is called there.
        """
        self._is_closed = True
        self._pop_all()

    def _pop_all(self) -> None:
        pushed = self._pushed[get_ident()]
        while pushed and saved_tensor_hooks.pop_if_innermost(pushed[-1]):
            pushed.pop()

    def _push_own(self) -> None:
        if saved_tensor_hooks.are_allowed():
            self._push(self._own)

    def _push(self, hooks: Hooks) -> None:
        saved_tensor_hooks.push(hooks)
        self._pushed[get_ident()].append(hooks)

    def _note_save(self, tensor: torch.Tensor) -> None:
        if self._is_closed:
            self._pop_all()
        else:
            self._on_save(tensor)

    def _packing_before(self, pack: Callable[[torch.Tensor], Any]) -> Any:
        def pack_before(tensor: torch.Tensor) -> Any:
            self._note_save(tensor)
            return pack(tensor)

        return pack_before

    def _pack(self, tensor: torch.Tensor) -> Kept:
        self._note_save(tensor)
        return keep(tensor)

    def _unpack(self, packed: Kept) -> torch.Tensor:
        tensor = unpack_kept(packed)
        if not self._is_closed:
            self._on_use(tensor)
        return tensor


# What autograd saves in the forward calls of the model and its blocks, call by call.


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
