"""Finds the other tensors on the memory of optimizer state, such as views that a library keeps.

DeepSpeed's ZeRO has a view of its flat state for each parameter. If every tensor on the memory is
known, each of them gets the guard of the state. Then the state may be on its way to or from a slot
between steps, as state of which there is no view.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable

import torch

from umem.runtime.aliases import are_all_on_memory, has_alias
from umem.runtime.guard import PLAIN_CLASSES
from umem.runtime.model_parts import tensors_in
from umem.runtime.unguarded import Unguarded
from umem.torch_compat import storage_address

__all__ = ["StateViews"]


class StateViews:
    """Looks among all objects of Python: once, if any state has a view.

    That takes about 0.1 s where there are some 100,000.

    Parameters
    ----------
    state
        All tensors of the optimizer's state: none is a view of another one.
    """

    def __init__(self, state: Iterable[torch.Tensor]) -> None:
        self._state = frozenset(map(id, state))
        self._tensors: dict[int, list[torch.Tensor]] | None = None
        """All of them, by address of their memory."""
        self._wrapped: set[int] = set()
        """Tensors in attributes of one of another class, by ``id``: its operators use them where
        torch asks no guard."""

    def of(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor] | None:
        """The others on the memory of some state tensors, each of which has memory of its own.

        None where something may use the memory that a guard of these would not see.
        """
        views: list[torch.Tensor] = []
        for tensor in tensors:
            if not has_alias((tensor,)):
                continue
            every = self._on_memory_of(tensor)
            others = [it for it in every if it is not tensor]
            if len(others) == len(every) or not are_all_on_memory(every):
                return None
            if any(type(it) is not torch.Tensor or id(it) in self._state for it in others):
                return None
            if not self._wrapped.isdisjoint(map(id, others)):
                return None
            views += others
        return views

    def _on_memory_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self._tensors is None:
            self._tensors = defaultdict(list)
            with Unguarded():
                for it in gc.get_objects():
                    # Not `isinstance`, for which a proxy may answer with another class.
                    if issubclass(type(it), torch.Tensor):
                        if type(it) not in PLAIN_CLASSES:
                            self._wrapped.update(map(id, tensors_in(vars(it))))
                        try:
                            self._tensors[storage_address(it)].append(it)
                        except (NotImplementedError, RuntimeError):  # it has no storage
                            continue
        return self._tensors.get(storage_address(tensor), [])
