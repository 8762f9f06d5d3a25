"""Modules that the program has captured with ``torch.cuda.make_graphed_callables``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from umem import patches
from umem.runtime.torch_hooks.hidden import uncalled

__all__ = ["graphed_tensors", "watch_graphing"]

_graphed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def graphed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a model that a graph reads at the addresses they have now."""
    parts = [part for part in model.modules() if part in _graphed]
    return [it for part in parts for it in _tensors(part)]


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def watch_graphing(before: Callable[[Sequence[nn.Module]], None]) -> Callable[[], None]:
    """Call a function with the modules before torch captures them; returns what ends that.

    torch runs the modules a few times, and captures one run. Hooks of umem are left out of these:
    what they would move, or wait for, must not become a part of the graph. The modules count as
    graphed then, whatever becomes of the capture.
    """
    theirs = torch.cuda.make_graphed_callables

    @functools.wraps(theirs)
    def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
        every = callables if isinstance(callables, tuple) else (callables,)
        modules = [it for it in every if isinstance(it, nn.Module)]
        _graphed.update(modules)
        before(modules)
        with uncalled():
            return theirs(callables, *args, **kwargs)

    places = "cuda_graphed_callables", "graphed_callables"
    for place in places:
        patches.replace(place, make_graphed_callables)
    return functools.partial(patches.undo, *places)
