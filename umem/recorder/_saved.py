"""Sees what autograd saves for the backward pass, and when the backward pass asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["SavedTensors"]

_autograd: Any = torch._C._autograd

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


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
        self._own: _Hooks = (self._pack, self._unpack)
        self._pushed: list[_Hooks] = []

    def push(self) -> None:
        """See what is saved from now on in this thread, unless somebody else's hooks do."""
        if not self._pushed and _autograd._saved_tensors_hooks_is_enabled() and _top() is None:
            self._push(self._own)

    def push_before_others(self) -> None:
        """See what is saved from now on in this thread, and pass it on to hooks that are there."""
        top = _top()
        if top is not None:
            self._push((self._packing_before(top[0]), top[1]))
        elif _autograd._saved_tensors_hooks_is_enabled():
            self._push(self._own)

    def pop(self) -> None:
        """Undo the last push. Where a program has entered hooks since, a later call does it."""
        top = _top()
        if self._pushed and top is not None and top[0] is self._pushed[-1][0]:
            _autograd._pop_saved_tensors_default_hooks()
            self._pushed.pop()

    def _push(self, hooks: _Hooks) -> None:
        _autograd._push_saved_tensors_default_hooks(*hooks)
        self._pushed.append(hooks)

    def _packing_before(self, pack: Callable[[torch.Tensor], Any]) -> Any:
        def pack_before(tensor: torch.Tensor) -> Any:
            self._on_save(tensor)
            return pack(tensor)

        return pack_before

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        self._on_save(tensor)
        # What a node saves of its own results would keep the node alive, and the node this.
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def _unpack(self, packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, version = packed
        # Where there are hooks, autograd leaves this check to them.
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is at "
                f"version {tensor._version}; expected version {version} instead."
            )
        self._on_use(tensor)
        return tensor


def _top() -> _Hooks | None:
    hooks: _Hooks | None = _autograd._top_saved_tensors_default_hooks(True)
    return hooks
