"""When backward passes begin and end, which no hook of torch tells."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["follow_backward"]


@dataclass(frozen=True, eq=False)
class _Listener:
    begins: Callable[[object], None]
    ends: Callable[[bool], None]


_listeners: list[_Listener] = []
_original: Callable[..., Any] | None = None
_wrapper: Callable[..., Any] | None = None
"""What was put in place of it last. One before that, which somebody else's function around it may
still call, only passes on."""


def follow_backward(
    begins: Callable[[object], None], ends: Callable[[bool], None]
) -> Callable[[], None]:
    """Call functions at both ends of every backward pass of the process.

    ``torch.autograd.backward``, which ``Tensor.backward`` calls, is replaced for as long as
    somebody listens.

    Parameters
    ----------
    begins
        Called with the tensors that the pass begins from, in the thread that asked for it. Must not
        raise.
    ends
        Called with whether an exception has ended it. Must not raise.

    Returns
    -------
    callable
        Ends it.
    """
    global _original, _wrapper
    if _wrapper is None or torch.autograd.backward is not _wrapper:
        _original = torch.autograd.backward
        torch.autograd.backward = _wrapper = _telling(_original)
    listener = _Listener(begins, ends)
    _listeners.append(listener)

    def leave() -> None:
        global _original, _wrapper
        _listeners.remove(listener)
        if _listeners:
            return
        # Where somebody else has put a function around this one, both stay.
        if torch.autograd.backward is _wrapper:
            assert _original is not None
            torch.autograd.backward = _original
            _original = _wrapper = None

    return leave


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        told = list(_listeners) if backward is _wrapper else []
        for listener in told:
            listener.begins(args[0] if args else kwargs.get("tensors"))
        failed = True
        try:
            result = original(*args, **kwargs)
            failed = False
        finally:
            for listener in told:
                listener.ends(failed)
        return result

    return backward
