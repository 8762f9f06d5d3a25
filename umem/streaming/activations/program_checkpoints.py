"""The program's own checkpoints, which can be left out where there is room for what they free.

torch's checkpoint has a generator act before and behind the function that it calls. Where one is
left out, the generator does nothing: autograd saves what it saves without a checkpoint, and the
backward pass runs nothing again. Reentrant checkpoints have no such generator, and stay.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from umem import patches
from umem.runtime.torch_hooks.passes import running_pass

__all__ = ["Chooser", "ProgramCheckpoint", "innermost", "leaving_out", "listen", "noting"]


class ProgramCheckpoint(NamedTuple):
    """A call of torch's checkpoint in a forward pass."""

    module: nn.Module | None
    """Whose call it is around; None for other functions."""
    restores_random: bool
    """Whether the second call begins with the states of torch's generators that the first had."""
    has_contexts: bool
    """Whether the program has context managers around both calls, such as selective ones."""
    arguments: tuple[object, ...]
    """Of the call: by position and by name, and those by name that a ``functools.partial`` adds."""


class Chooser(Protocol):
    """A training, which knows what to leave out."""

    def leaves_out(self, checkpoint: ProgramCheckpoint) -> bool:
        """Whether a call of torch's checkpoint that begins in this thread does nothing."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[ProgramCheckpoint] = []
        self.noted: list[ProgramCheckpoint] | None = None
        self.leaves_out = False


_thread = _Thread()
_choosers: weakref.WeakSet[Chooser] = weakref.WeakSet()


def listen(chooser: Chooser) -> None:
    """Ask a training about each checkpoint from now on, as long as it lives."""
    _choosers.add(chooser)
    patches.wrap("program_checkpoints", _with_choice)


def innermost() -> ProgramCheckpoint | None:
    """The checkpoint whose function this thread runs; None where there is none."""
    return _thread.running[-1] if _thread.running else None


@contextmanager
def noting() -> Iterator[list[ProgramCheckpoint]]:
    """Note the checkpoints that begin in this thread meanwhile."""
    noted: list[ProgramCheckpoint] = []
    before, _thread.noted = _thread.noted, noted
    try:
        yield noted
    finally:
        _thread.noted = before


@contextmanager
def leaving_out() -> Iterator[None]:
    """Leave all checkpoints of this thread out meanwhile."""
    before, _thread.leaves_out = _thread.leaves_out, True
    try:
        yield
    finally:
        _thread.leaves_out = before


def _with_choice(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what acts around the function of a checkpoint, or does nothing."""
    signature = inspect.signature(original)

    @wraps(original)
    def begin(*given: Any, **kwargs: Any) -> Generator[None, None, None]:
        around: Generator[None, None, None] = original(*given, **kwargs)
        if not running_pass().is_training:
            return around
        bound = signature.bind(*given, **kwargs)
        bound.apply_defaults()
        known = bound.arguments
        checkpoint = ProgramCheckpoint(
            _module_of(known["fn"]),
            bool(known["preserve_rng_state"]),
            known["context_fn"] is not torch.utils.checkpoint.noop_context_fn,
            (known["args"], known["kwargs"], getattr(known["fn"], "keywords", None)),
        )
        return _around(around, checkpoint)

    return begin


def _around(
    around: Generator[None, None, None], checkpoint: ProgramCheckpoint
) -> Generator[None, None, None]:
    if _thread.leaves_out or any(it.leaves_out(checkpoint) for it in tuple(_choosers)):
        yield
        return
    if _thread.noted is not None:
        _thread.noted.append(checkpoint._replace(arguments=()))
    running = _thread.running
    running.append(checkpoint)
    try:
        yield from around
    finally:
        # An exception may end it late, in any order.
        running[:] = (it for it in running if it is not checkpoint)


def _module_of(function: Any) -> nn.Module | None:
    """The module that a function is the call of."""
    while isinstance(function, partial) and not function.args:
        function = function.func
    if isinstance(function, nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    is_call = getattr(function, "__func__", None) is nn.Module.__call__
    return owner if is_call and isinstance(owner, nn.Module) else None
