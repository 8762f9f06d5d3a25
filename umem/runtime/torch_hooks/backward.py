"""Hooks on the begin and end of backward passes, for which torch has none; and nodes to hook."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from umem import patches

__all__ = ["hook_backward", "nodes_of"]


@dataclass(frozen=True, eq=False)
class _Listener:
    begins: Callable[[object], None]
    ends: Callable[[bool], None]


_listeners: list[_Listener] = []
_wrapper: Callable[..., Any] | None = None
"""The latest replacement of ``torch.autograd.backward``. Earlier ones, which other wrappers may
still call, only call what they replaced."""


def nodes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The nodes of the graph that have made some tensors, each once. A node holds its hooks."""
    nodes = {id(node): node for it in tensors if (node := it.grad_fn) is not None}
    return list(nodes.values())


def hook_backward(
    begins: Callable[[object], None], ends: Callable[[bool], None]
) -> Callable[[], None]:
    """Call functions at both ends of every backward pass of the process.

    `begins` is called with the tensors that the pass starts from, in the thread that asked for it,
    and `ends` with whether an exception has ended the pass. Neither must raise.
    ``torch.autograd.backward``, which ``Tensor.backward`` calls, is replaced while there are
    listeners. The result removes the hooks.
    """
    patches.wrap("backward", _wrap)
    listener = _Listener(begins, ends)
    _listeners.append(listener)

    def undo() -> None:
        _listeners.remove(listener)
        if not _listeners:
            patches.undo("backward")

    return undo


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    global _wrapper

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        listeners = list(_listeners) if backward is _wrapper else []
        failed = True
        try:
            for listener in listeners:
                listener.begins(args[0] if args else kwargs.get("tensors"))
            result = original(*args, **kwargs)
            failed = False
        finally:
            for listener in listeners:
                listener.ends(failed)
        return result

    _wrapper = backward
    return backward
