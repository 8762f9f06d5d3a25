"""The tensors in what modules take and return, and in what optimizers hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["computed_tensors", "named_tensors"]

_DEEPEST = 8
"""Containers within containers are looked into so far; one may hold itself."""

_SEQUENCES = (tuple, list)
_PLAIN = frozenset({type(None), bool, int, float, str})
"""Most of what modules are given beside tensors."""


def named_tensors(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in mappings, sequences and dataclasses, by where they are: ``batch.labels``.

    Parameters
    ----------
    value
        A tensor, or what may hold some.
    name
        Of the value itself.
    """
    return _named_tensors(value, name, 0)


def _named_tensors(value: object, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    parts: Any
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).items()
    else:
        return
    if depth < _DEEPEST:
        for key, part in parts:
            yield from _named_tensors(part, f"{name}.{key}" if name else str(key), depth + 1)


def computed_tensors(value: object) -> list[tuple[torch.Tensor, Any]]:
    """Tensors that autograd can go back from, and the nodes that have made them.

    Without names, as it runs in every step.

    Parameters
    ----------
    value
        As for :func:`named_tensors`.
    """
    found: list[tuple[torch.Tensor, Any]] = []
    _add_computed((value,), found, 0)
    return found


def _add_computed(
    values: Iterable[object], found: list[tuple[torch.Tensor, Any]], depth: int
) -> None:
    value: Any
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or isinstance(value, torch.Tensor):
            node = value.grad_fn
            if node is not None:
                found.append((value, node))
        elif kind in _PLAIN or depth == _DEEPEST:
            continue
        elif isinstance(value, _SEQUENCES):
            _add_computed(value, found, depth + 1)
        elif isinstance(value, dict | Mapping):  # a dictionary is told sooner
            _add_computed(value.values(), found, depth + 1)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            _add_computed(vars(value).values(), found, depth + 1)
