"""torch's saved-tensor hooks of this thread, without getting into the way of anybody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from umem.activations._errors import OffloadError

__all__ = ["HookStack", "in_backward_or_compiler"]

_autograd: Any = torch._C._autograd

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class HookStack(threading.local):
    """Pairs of hooks that are in place in this thread, the innermost last.

    Each `push` or `stay_out` is undone by one `pop`.
    """

    def __init__(self) -> None:
        self._pushed: list[_Hooks | None] = []
        # Of pairs that are undone but could not be taken away, as others are on top of them.
        self._left: list[_Hooks] = []

    def may_push(self) -> bool:
        """Whether hooks pushed now see what autograd saves, and take nothing from other hooks."""
        self._take_left()
        if (
            in_backward_or_compiler()
            or not torch.is_grad_enabled()
            or not _autograd._saved_tensors_hooks_is_enabled()
        ):
            return False
        top = _top_pack()
        own = self._pushed[-1] if self._pushed else None
        return top is None or (own is not None and top is own[0])

    def push(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        """Put a pair in place."""
        hooks = (pack, unpack)
        _autograd._push_saved_tensors_default_hooks(*hooks)
        self._pushed.append(hooks)

    def stay_out(self) -> None:
        """Put nothing in place."""
        self._pushed.append(None)

    def pop(self) -> None:
        """Undo the last one.

        Raises
        ------
        OffloadError
            If there is none.
        """
        if not self._pushed:
            raise OffloadError("close_group without an open_group before it in this thread")
        hooks = self._pushed.pop()
        if hooks is not None:
            self._left.append(hooks)
            self._take_left()

    def _take_left(self) -> None:
        while self._left and _top_pack() is self._left[-1][0]:
            _autograd._pop_saved_tensors_default_hooks()
            self._left.pop()


def in_backward_or_compiler() -> bool:
    """Whether a compiler traces, or a backward pass runs: a checkpoint's second forward pass."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1


def _top_pack() -> Any:
    """The innermost pack hook of this thread, or None."""
    hooks: Any = _autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
