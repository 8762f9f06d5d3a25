"""The tensors that autograd saves for the backward pass: hooks that see them, and their numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch

from umem.core.interrupts import call_all
from umem.runtime.torch_hooks import saved_tensors as torch_hooks
from umem.runtime.torch_hooks.saved_tensors import Hooks, Kept, keep, unpack_kept
from umem.torch_compat import push_saved_tensor_hooks, saved_tensor_hooks_enabled

__all__ = ["SaveLog", "SavedTensor", "SavedTensorHooks", "StorageSave"]


class SavedTensorHooks:
    """torch's hooks on saved tensors, which leave the hooks of others in effect.

    torch calls the innermost hooks only. So these are not pushed inside of others; while a
    checkpoint recomputes, they are pushed on top of its hooks and call them. `on_save` is called
    with each tensor when it is saved, `on_use` when the backward pass needs it.
    """

    def __init__(
        self, on_save: Callable[[torch.Tensor], None], on_use: Callable[[torch.Tensor], None]
    ) -> None:
        self._on_save = on_save
        self._on_use = on_use
        # By thread: each of autograd's has hooks of its own.
        self._pushed: defaultdict[int, list[Hooks]] = defaultdict(list)
        self._is_closed = False

    def push(self) -> None:
        """See what this thread saves from now on, unless there are hooks already."""
        if not self._pushed[get_ident()] and torch_hooks.innermost() is None:
            self.push_alone()

    def push_before_others(self) -> None:
        """See what this thread saves from now on, and pass it on to hooks that are there."""
        top = torch_hooks.innermost()
        if top is None:
            self.push_alone()
            return
        pack, unpack = top

        def pack_before(tensor: torch.Tensor) -> Any:
            self._note_save(tensor)
            return pack(tensor)

        self._push((pack_before, unpack))

    def push_alone(self) -> None:
        """See what this thread saves from now on; hooks that are there see nothing of it."""
        if saved_tensor_hooks_enabled():
            self._push((self._pack, self._unpack))

    def pop(self) -> bool:
        """Undo this thread's last push, and tell whether that was possible.

        It is not where the program has pushed hooks since; a later call then does it.
        """
        pushed = self._pushed[get_ident()]
        return bool(pushed) and torch_hooks.pop_if_innermost(pushed[-1], pushed.pop)

    def close(self) -> None:
        """See nothing any more, in graphs that are still alive either.

        What other threads have pushed goes when it is called there.
        """
        self._is_closed = True
        self._pop_all()

    def _pop_all(self) -> None:
        while self.pop():
            pass

    def _push(self, hooks: Hooks) -> None:
        torch_hooks.give_way_to_transforms()
        pushed = self._pushed[get_ident()]
        call_all(partial(push_saved_tensor_hooks, *hooks), partial(pushed.append, hooks))

    def _note_save(self, tensor: torch.Tensor) -> None:
        if self._is_closed:
            self._pop_all()
        else:
            self._on_save(tensor)

    def _pack(self, tensor: torch.Tensor) -> Kept:
        self._note_save(tensor)
        return keep(tensor)

    def _unpack(self, packed: Kept) -> torch.Tensor:
        tensor = unpack_kept(packed)
        if not self._is_closed:
            self._on_use(tensor)
        return tensor


@dataclass(frozen=True)
class SavedTensor:
    """An activation that autograd saves in a forward call of the model or a block.

    A tensor saved in a block's call counts for the block only. Other hooks around these calls that
    count in the same way find by `block`, `call` and `ordinal` the trace's tensor that they pack.
    """

    block: str
    """Name of the block; empty for the model, outside of blocks. The inputs that a checkpoint keeps
    for a block are saved there."""
    call: int
    """Index of the block's forward call in the step, without those in which a checkpoint
    recomputes."""
    ordinal: int
    """Index of the pack hook's call since the forward call began; calls for other tensors, such as
    weights, count too."""
    tensor: int
    """Index in the trace's tensors. Views of one storage are one tensor."""
    nbytes: int
    """Bytes of that storage."""


@dataclass(frozen=True)
class StorageSave:
    """A :class:`SavedTensor` before there is a trace, with the number of its storage."""

    block: str
    call: int
    ordinal: int
    storage: int


class SaveLog:
    """Counts the forward calls of the model and its blocks, and the pack hook's calls in them."""

    def __init__(self) -> None:
        self.saves: list[StorageSave] = []
        self._calls: Counter[str] = Counter()
        # The calls that run: block, index of the call, and the next ordinal.
        self._running: list[tuple[str, int, int]] = []

    def begin_call(self, block: str) -> None:
        """A forward call begins, of the model or inside it."""
        self._running.append((block, self._calls[block], 0))
        self._calls[block] += 1

    def end_call(self) -> None:
        """The innermost forward call ends."""
        if self._running:
            self._running.pop()

    def note(self, storages: list[int]) -> None:
        """The pack hook is called for a tensor with these storages."""
        if self._running:
            block, call, ordinal = self._running[-1]
            self.saves += [StorageSave(block, call, ordinal, storage) for storage in storages]
            self._running[-1] = (block, call, ordinal + 1)
