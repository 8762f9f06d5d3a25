"""Ways to a tensor's memory past torch's operators: each waits for what works on it.

Python reads addresses by ``data_ptr``, and so do Triton and ``__cuda_array_interface__``. Files,
pickles, copies of optimizers and shared memory begin with ``untyped_storage``. Memory that a tensor
gives up for another one by ``data`` must not be an update's any more. Kernels that TorchScript has
fused take the addresses of a function's arguments. All these are replaced while tensors are
guarded, and no longer. What hands memory to other libraries is replaced for good: programs import
some of it by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from umem.torch_compat import tree_leaves

__all__ = ["on_export", "wait_at_attributes", "watch_exports"]

_DATA: Any = torch.Tensor.data
_ALL_METHODS = ("data_ptr", "const_data_ptr", "untyped_storage")  # the second is a newer torch's
_METHODS = [name for name in _ALL_METHODS if hasattr(torch.Tensor, name)]
_INTERFACE = "__cuda_array_interface__"
_DLPACK = ((torch.Tensor, "__dlpack__"), (torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack"))

_wait: Callable[[Any], None] | None = None
_replaced: list[tuple[Any, str, Any]] = []
"""Attributes to put back: a class, a name, and what it had itself; None if it had nothing."""
_listeners: list[Callable[[torch.Tensor], None]] = []


def wait_at_attributes(wait: Callable[[Any], None] | None) -> None:
    """Call a function with each tensor whose memory is taken; None for no function any more."""
    global _wait
    if wait is _wait:
        return
    _wait = wait
    while _replaced:
        owner, name, before = _replaced.pop()
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    if wait is not None:
        watch_exports()
        for name in _METHODS:
            _replace(torch.Tensor, name, _behind(wait, getattr(torch.Tensor, name)))
        _replace(torch.Tensor, "data", _waiting_data(wait))
        scripted: Any = torch.jit.ScriptFunction
        _replace(scripted, "__call__", _behind_arguments(wait, scripted.__call__))


def _replace(owner: Any, name: str, by: Any) -> None:
    _replaced.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, by)


def _behind(before: Callable[[Any], None], function: Any) -> Any:
    @functools.wraps(function)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        before(tensor)
        return function(tensor, *args, **kwargs)

    return call


def _behind_arguments(wait: Callable[[Any], None], function: Any) -> Any:
    @functools.wraps(function)
    def call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        for value in tree_leaves((args, kwargs)):
            wait(value)
        return function(scripted, *args, **kwargs)

    return call


def _waiting_data(wait: Callable[[Any], None]) -> property:
    def get(tensor: Any) -> Any:
        wait(tensor)
        return _DATA.__get__(tensor)

    def put(tensor: Any, value: Any) -> None:
        wait(tensor)
        _DATA.__set__(tensor, value)

    return property(get, put, doc=_DATA.__doc__)


def on_export(listener: Callable[[torch.Tensor], None]) -> None:
    """Call a function with each tensor whose memory another library gets, for good."""
    _listeners.append(listener)
    watch_exports()


@functools.cache
def watch_exports() -> None:
    """See memory that leaves by DLPack or ``__cuda_array_interface__``, until the process ends."""
    for owner, name in _DLPACK:
        if hasattr(owner, name):  # the last one is not in all versions
            setattr(owner, name, _behind(_export, getattr(owner, name)))
    interface: Any = vars(torch.Tensor)[_INTERFACE]

    def get(tensor: Any) -> Any:
        _export(tensor)
        return interface.__get__(tensor)

    setattr(torch.Tensor, _INTERFACE, property(get, doc=interface.__doc__))


def _export(tensor: Any) -> None:
    if _wait is not None:
        _wait(tensor)
    if isinstance(tensor, torch.Tensor):
        for listener in _listeners:
            listener(tensor)
