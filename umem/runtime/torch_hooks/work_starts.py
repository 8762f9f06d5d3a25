"""Calls functions before work on tensors starts without an operator, and behind backward passes.

A guard of tensors sees operators. A CUDA graph reads and writes memory by address, and a graph of
autograd has saved tensors, perhaps before they were guarded. So what starts these is replaced while
something listens.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import MethodType
from typing import Any

from umem import patches
from umem.core.weakly import weakly

__all__ = ["CAPTURES", "STARTS", "after_backward", "before_work"]

CAPTURES = ("graph_capture_begin", "accelerator_graph_capture_begin")
"""The begins of captures into CUDA graphs, by the keys of :data:`umem.patches.PATCHES`."""

_PASSES = ("run_backward", "run_backward_of_graph")
"""Below backward() and grad(), which programs import by name."""

STARTS = (
    # Below torch.cuda.CUDAGraph, whose bound methods a program may have stored before. Graphed
    # callables and torch.cuda.graph call these too.
    *CAPTURES,
    "graph_replay",
    "accelerator_graph_replay",
    "scripted_method",
    *_PASSES,
)
"""All that is replaced."""

_listeners: dict[str, tuple[tuple[bool, Callable[[], None]], ...]] = {}
"""By start, in the order of calls: whether it is one of the last, and the function."""
_behind: tuple[Callable[[], None], ...] = ()
"""What is called behind backward passes."""


def before_work(
    listener: Callable[[], None], starts: Sequence[str] = STARTS, *, is_last: bool = False
) -> Callable[[], None]:
    """Call a function before each of some starts, in the thread that starts the work.

    The last ones are called behind all others, which wait for what is under way. The result ends
    that, as does the end of the object whose method it is; torch's functions are put back when
    nothing listens any more.
    """
    heard = weakly(listener) if isinstance(listener, MethodType) else listener
    for key in starts:
        some = (*_listeners.get(key, ()), (is_last, heard))
        _listeners[key] = tuple(sorted(some, key=itemgetter(0)))
        patches.wrap(key, functools.partial(_listening, key))

    def undo() -> None:
        for key in starts:
            _listeners[key] = tuple(it for it in _listeners[key] if it[1] is not heard)
        _undo(starts)

    if isinstance(listener, MethodType):
        weakref.finalize(listener.__self__, undo).atexit = False
    return undo


def after_backward(listener: Callable[[], None]) -> Callable[[], None]:
    """Call a function behind each backward pass, ``torch.autograd.grad`` included.

    Also behind one that an exception has ended, and behind passes within a pass. It must not raise.
    The result ends that.
    """
    global _behind
    _behind = (*_behind, listener)
    for key in _PASSES:
        patches.wrap(key, functools.partial(_listening, key))

    def undo() -> None:
        global _behind
        _behind = tuple(it for it in _behind if it is not listener)
        _undo(_PASSES)

    return undo


def _undo(starts: Sequence[str]) -> None:
    """Put back the starts that nothing listens to any more."""
    behind = _PASSES if _behind else ()
    patches.undo(*(key for key in starts if not _listeners.get(key) and key not in behind))


def _listening(key: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(*args: Any, **kwargs: Any) -> Any:
        for _, listener in _listeners.get(key, ()):
            listener()
        try:
            return original(*args, **kwargs)
        finally:
            if key in _PASSES:
                for behind in _behind:
                    behind()

    return start
