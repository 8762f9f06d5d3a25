"""Calls functions before work on tensors starts without an operator.

A guard of tensors sees operators. A CUDA graph reads and writes memory by address, and a graph of
autograd has saved tensors, perhaps before they were guarded. So what starts these is replaced while
something listens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from umem import patches

__all__ = ["STARTS", "before_work"]

STARTS = (
    # Below torch.cuda.CUDAGraph, whose bound methods a program may have stored before. Graphed
    # callables and torch.cuda.graph call these too.
    "graph_replay",
    "graph_capture_begin",
    "accelerator_graph_replay",
    "accelerator_graph_capture_begin",
    "scripted_method",
    # Below backward() and grad(), which programs import by name.
    "run_backward",
    "run_backward_of_graph",
)
"""All that is replaced, by the keys of :data:`umem.patches.PATCHES`."""

_listeners: tuple[Callable[[], None], ...] = ()


def before_work(listener: Callable[[], None]) -> Callable[[], None]:
    """Call a function before each start, in the thread that starts the work.

    The result ends that; torch's functions are put back when nothing listens any more.
    """
    global _listeners
    _listeners = (*_listeners, listener)
    for key in STARTS:
        patches.wrap(key, _listening)

    def undo() -> None:
        global _listeners
        _listeners = tuple(it for it in _listeners if it is not listener)
        if not _listeners:
            patches.undo(*STARTS)

    return undo


def _listening(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(*args: Any, **kwargs: Any) -> Any:
        for listener in _listeners:
            listener()
        return original(*args, **kwargs)

    return start
