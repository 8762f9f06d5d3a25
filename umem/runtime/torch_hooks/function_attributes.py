"""Lent memory that autograd functions of a program keep as attributes of their nodes.

torch's hooks on saved tensors see what a function saves with ``save_for_backward``. bitsandbytes'
product with weights of 4 bits keeps them past it, as ``ctx.tensors = (None, weight)``, until its
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from umem.runtime.torch_hooks.saved_tensors import find_lent

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


def let_go_of_lent(outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Have functions find views of lent memory when they need them, in place of keeping them.

    Parameters
    ----------
    outputs
        Nodes of a graph, as :func:`umem.runtime.torch_hooks.backward.nodes_of` returns them.
    inputs
        Nodes of the same graph to stop at.
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
        if isinstance(node, BackwardCFunction):
            for name, value in list(vars(node).items()):
                if isinstance(value, tuple | list) and any(map(_is_lent, value)):
                    setattr(node, name, _Found(map(_without_memory, value)))
        waiting += (function for function, _ in node.next_functions)


def _is_lent(value: object) -> bool:
    return isinstance(value, torch.Tensor) and find_lent(value) is not None


def _without_memory(value: Any) -> Any:
    find = find_lent(value) if isinstance(value, torch.Tensor) else None
    return value if find is None else _Lent(find(value))
