"""Saved-tensor hooks of this thread, without getting into the way of anybody else's."""

from __future__ import annotations

import threading

import torch

from umem import saved_tensor_hooks
from umem.errors import OffloadError
from umem.saved_tensor_hooks import Hooks

__all__ = ["HookStack", "in_backward_or_compiler"]


class HookStack(threading.local):
    """Pairs of hooks that are in place in this thread, the innermost last.

    Each `push` or `stay_out` is undone by one `pop`.
    """

    def __init__(self) -> None:
        self._pushed: list[Hooks | None] = []
        # Of pairs that are undone but could not be taken away, as others are on top of them.
        self._left: list[Hooks] = []

    def may_push(self) -> bool:
        """Whether hooks pushed now see what autograd saves, and take nothing from other hooks."""
        self._take_left()
        if (
            in_backward_or_compiler()
            or not torch.is_grad_enabled()
            or not saved_tensor_hooks.are_allowed()
        ):
            return False
        top = saved_tensor_hooks.innermost()
        own = self._pushed[-1] if self._pushed else None
        return top is None or (own is not None and top[0] is own[0])

    def push(self, hooks: Hooks) -> None:
        """Put a pair in place."""
        saved_tensor_hooks.push(hooks)
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
        while self._left and saved_tensor_hooks.pop_if_innermost(self._left[-1]):
            self._left.pop()


def in_backward_or_compiler() -> bool:
    """Whether a compiler traces, or a backward pass runs: a checkpoint's second forward pass."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1
