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
    global _original
    if not _listeners and _original is None:
        _original = torch.autograd.backward
        torch.autograd.backward = _telling(_original)
    listener = _Listener(begins, ends)
    _listeners.append(listener)

    def leave() -> None:
        global _original
        _listeners.remove(listener)
        # Where somebody else has put a function around this one, it stays and only passes on.
        if not _listeners and getattr(torch.autograd.backward, "_original", None) is _original:
            assert _original is not None
            torch.autograd.backward = _original
            _original = None

    return leave


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        told = list(_listeners)
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

    backward._original = original  # type: ignore[attr-defined]
    return backward
