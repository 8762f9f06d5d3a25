"""Sees uses of weights of any class while a copy of them waits for its use.

Quantised weights are of other classes than parameters: a subclass of ``Parameter``, such as
bitsandbytes' ``Params4bit``, or plain tensors inside of a wrapper, such as torchao's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import nn

from umem.executor.optimizer.access_guard import (
    TensorGuard,
    WatchedParameterGuard,
    is_guardable,
)

__all__ = ["WeightGuard"]


class _SubclassGuard(WatchedParameterGuard):
    """Guards parameters of a class that is not torch's own.

    Libraries tell such weights by their class's name, too: it stays.
    """

    def __init__(self, kind: type[nn.Parameter], settle: Callable[[], None]) -> None:
        guarded: Any = WatchedParameterGuard._guarded
        names = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        self._guarded = type(guarded)(kind.__name__, (guarded, kind), names)  # type: ignore[misc]
        self._plain = kind  # type: ignore[misc]
        super().__init__(settle)


class WeightGuard:
    """Guards weights until the first use of one of them.

    Parameters
    ----------
    settle
        Called before a use, in the thread that uses a weight. It releases all.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._guards: dict[int, TensorGuard] = {}
        """By ``id`` of the weights' class: a guarded class equals the plain one."""

    def hold(self, weights: Sequence[torch.Tensor]) -> None:
        """Guard weights that nothing guards yet, and keep them alive."""
        kinds = list(map(id, map(type, weights)))
        for key in set(kinds):
            some = list(compress(weights, map(key.__eq__, kinds)))
            guard = self._guards.get(key)
            if guard is None:
                guard = self._new_guard(type(some[0]))
                if guard is None:
                    continue
                self._guards[key] = guard
            guard.hold(some)

    def _new_guard(self, kind: type[torch.Tensor]) -> TensorGuard | None:
        if kind is nn.Parameter:
            return WatchedParameterGuard(self._settle)  # gradients are no part of a copy
        if kind is torch.Tensor:
            return TensorGuard(self._settle)
        # Weights that an optimizer's guard has are not plain until their update is over.
        if is_guardable(kind) or not issubclass(kind, nn.Parameter):
            return None
        return _SubclassGuard(kind, self._settle)

    def release(self) -> None:
        """Guard nothing any more. What an interrupt cuts short, another call completes."""
        for guard in self._guards.values():
            guard.release()
