"""Lent memory that autograd functions of a program keep as attributes of their nodes.

torch's hooks on saved tensors see what a function saves with ``save_for_backward``. bitsandbytes'
product with weights of 4 bits keeps them past it, as ``ctx.tensors = (None, weight)``, until its
backward pass. A walk through a graph finds such functions, each of which is watched from then on:
a block's graph has a hundred nodes or more, and to make Python's objects of them takes longer than
all else that is done for the block.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from umem import patches
from umem.runtime.torch_hooks.passes import is_forward_pass
from umem.runtime.torch_hooks.saved_tensors import find_lent
from umem.torch_compat import forward_class

__all__ = ["let_go_of_lent"]


class _Found(tuple[Any, ...]):
    """Values of which some are looked for each time that they are asked for."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return map(_found, super().__iter__())

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]


class _Lent:
    """In the place of a view of lent memory."""

    __slots__ = ("find",)

    def __init__(self, find: Callable[[], torch.Tensor]) -> None:
        self.find = find


def _found(value: Any) -> Any:
    return value.find() if isinstance(value, _Lent) else value


_watched: weakref.WeakSet[type[torch.autograd.Function]] = weakref.WeakSet()


def let_go_of_lent(outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Have functions find views of lent memory when they need them, in place of keeping them.

    From then on their classes do so by themselves, for the rest of the process. `outputs` are nodes
    of a graph (:func:`umem.runtime.torch_hooks.backward.nodes_of`), `inputs` those to stop at.
    """
    seen = set(map(id, inputs))
    waiting = list(outputs)
    kept = []  # an `id` is a node's only while there is an object of it
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        kept.append(node)
        if isinstance(node, BackwardCFunction) and _let_go(node):
            _watch(forward_class(node))
        waiting += (function for function, _ in node.next_functions)


def _let_go(node: Any) -> bool:
    """Replace a node's attributes; returns whether one had lent memory."""
    has_lent = False
    for name, values in list(vars(node).items()):
        if not isinstance(values, tuple | list):
            continue
        finds = [find_lent(it) if isinstance(it, torch.Tensor) else None for it in values]
        if any(finds):
            both = zip(values, finds, strict=True)
            found = _Found(it if find is None else _Lent(find(it)) for it, find in both)
            setattr(node, name, found)
            has_lent = True
    return has_lent


def _watch(function: type[torch.autograd.Function]) -> None:
    if function in _watched or function.setup_context is not torch.autograd.Function.setup_context:
        return
    _watched.add(function)
    original = function.forward

    @functools.wraps(original)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(ctx, *args, **kwargs)
        # What a checkpoint computes again is needed at once.
        if is_forward_pass():
            _let_go(ctx)
        return result

    patches.replace("function_forward", staticmethod(forward), owner=function)
