"""Tensors whose update runs when a guard sees the first use of one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from umem.runtime.guard import Guard
from umem.runtime.unguarded import PastGuards


class LateUpdate(Guard):
    """Adds 1 to each tensor before the first use of one.

    Parameters
    ----------
    tensors
        The tensors.
    keeps
        Whether they stay guarded.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, keeps: bool = False) -> None:
        super().__init__(self._update)
        self.uses = 0
        self._keeps = keeps
        self._late = list(tensors)
        self._lock = threading.Lock()
        self.hold(tensors)

    def _update(self) -> None:
        with self._lock, PastGuards(), torch._C._DisableFuncTorch(), torch.no_grad():
            self.uses += 1
            while self._late:
                self._late.pop().add_(1)
        if not self._keeps:
            self.release()
