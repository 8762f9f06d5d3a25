"""What one call of a block saves for the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch

from umem.activations._entry import Entry, Handle
from umem.saved_tensor_hooks import Kept, keep

__all__ = ["Group"]


class Group:
    """The saved tensors of one call, by their ordinals.

    Held by the handles of its tensors, so it is gone when the graph is.

    Parameters
    ----------
    chosen
        Ordinals of the tensors that may leave; None for all.
    stream
        What the call's work is ordered by.
    admit
        Gives the handle of a tensor that may leave, and None for one that stays.
    """

    def __init__(
        self,
        chosen: Container[int] | None,
        stream: Any,
        admit: Callable[[Group, torch.Tensor], Handle | None],
    ) -> None:
        self.stream = stream
        self.reference = weakref.ref(self)
        self._chosen = chosen
        self._admit = admit
        self._count = 0
        # Weak: each entry goes with its last handle, while the block's backward pass goes on.
        self._entries: dict[int, weakref.ref[Entry]] = {}

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        """Autograd saves a tensor."""
        ordinal = self._count
        self._count = ordinal + 1
        # Parameters are subclasses, and so is all that does more than hold numbers.
        if type(tensor) is torch.Tensor and (self._chosen is None or ordinal in self._chosen):
            handle = self._admit(self, tensor)
            if handle is not None:
                self._entries[ordinal] = weakref.ref(handle.entry)
                return handle
        return keep(tensor)

    def entries(self, ordinals: Iterable[int] | None) -> Iterator[Entry]:
        """The storages that are still held, each once, in the order in which they were saved."""
        seen = set()
        for ordinal in sorted(self._entries if ordinals is None else ordinals):
            reference = self._entries.get(ordinal)
            entry = None if reference is None else reference()
            if entry is not None and entry not in seen:
                seen.add(entry)
                yield entry
