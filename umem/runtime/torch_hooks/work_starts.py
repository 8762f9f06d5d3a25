"""Calls functions before work on tensors starts without an operator.

A guard of tensors sees operators. A CUDA graph reads and writes memory by address, and a graph of
autograd has saved tensors, perhaps before they were guarded. So what starts these is replaced while
something listens.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from umem.torch_compat import PRIVATE_NAMES

__all__ = ["STARTS", "Start", "before_work"]


@dataclass(frozen=True)
class Start:
    """A function of torch that is replaced while something listens."""

    path: str
    """``module:attribute``, as in an entry point. A torch may lack it."""
    without: str
    """What is lost without the replacement."""


def _private(key: str, attribute: str = "") -> Start:
    entry = PRIVATE_NAMES[key]
    return Start(f"{entry.path}{attribute}", entry.without)


STARTS = (
    # Below torch.cuda.CUDAGraph, whose bound methods a program may have stored before. Graphed
    # callables and torch.cuda.graph call these too.
    _private("graph_replay"),
    _private("graph_capture_begin"),
    Start("torch.accelerator:Graph.replay", "the same as for a replay by torch.cuda"),
    Start("torch.accelerator:Graph.capture_begin", "the same as for a capture by torch.cuda"),
    _private("scripted_method", ".__call__"),
    # Below backward() and grad(), which programs import by name.
    _private("run_backward"),
    _private("run_backward_of_graph"),
)
"""All that is replaced."""

_listeners: tuple[Callable[[], None], ...] = ()
_undo: list[Callable[[], None]] = []
"""Each puts a function of torch back."""
_replacements: list[Any] = []


def before_work(listener: Callable[[], None]) -> Callable[[], None]:
    """Call a function before each start, in the thread that starts the work.

    The result ends that; torch's functions are put back when nothing listens any more.
    """
    global _listeners
    _listeners = (*_listeners, listener)
    for start in STARTS:
        _replace(start.path)

    def undo() -> None:
        global _listeners
        _listeners = tuple(it for it in _listeners if it is not listener)
        while not _listeners and _undo:
            _undo.pop()()

    return undo


def _replace(path: str) -> None:
    """Replace a function, unless this torch lacks it, or it is replaced already."""
    module, _, attributes = path.partition(":")
    *parents, name = attributes.split(".")
    try:
        owner = pkgutil.resolve_name(f"{module}:{'.'.join(parents)}")
        original = vars(owner)[name]  # not what an access makes of it: this is put back
    except (AttributeError, ImportError, KeyError):
        return
    if any(original is it for it in _replacements):
        return
    start = _listening(getattr(owner, name))
    _replacements.append(start)
    setattr(owner, name, start)

    def undo() -> None:
        _replacements.remove(start)
        # Where another function has replaced this one since, both stay.
        if vars(owner)[name] is start:
            setattr(owner, name, original)

    _undo.append(undo)


def _listening(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(*args: Any, **kwargs: Any) -> Any:
        for listener in _listeners:
            listener()
        return original(*args, **kwargs)

    return start
