"""Mixtures of experts: which weights are the experts' of a layer, and which calls use few of them.

`transformers` keeps the experts of a layer stacked in a few parameters. With few tokens its kernels
read the chosen experts only. Others, and `transformers` before 5, have a module for each expert,
of which the chosen ones are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["Experts", "find_experts"]

_CHOSEN = ("top_k", "num_experts_per_tok", "top_k_experts")
"""Attributes of a module that tell how many experts each token chooses."""

_CHOSEN_IN_CONFIG = _CHOSEN[1:]
"""The same of a configuration, whose ``top_k`` would be that of sampling."""


@dataclass(frozen=True)
class Experts:
    """The weights of a block of which calls with few tokens use some."""

    ids: frozenset[int] = frozenset()
    """By ``id``."""
    tables: frozenset[int] = frozenset()
    """Those of them that hold one expert per row."""
    few_rows: int = 0
    """With at most so many rows, a call of the block cannot choose all experts; 0 for none."""


def find_experts(block: nn.Module) -> Experts:
    """The experts in a block; none where it is unknown how many a token chooses."""
    ids: list[int] = []
    tables: list[int] = []
    few_rows: list[int] = []
    for owner in block.modules():
        stacked = _stacked(owner)
        weights, count = stacked or _of_modules(owner)
        chosen = max(_chosen(block, owner), default=count)
        if 0 < chosen < count:
            ids += map(id, weights)
            tables += map(id, weights if stacked else ())
            few_rows.append((count - 1) // chosen)
    return Experts(frozenset(ids), frozenset(tables), min(few_rows, default=0))


_WeightsAndCount = tuple[list[nn.Parameter], int]


def _stacked(owner: nn.Module) -> _WeightsAndCount | None:
    """Parameters with an expert in each row, and how many these are."""
    count = getattr(owner, "num_experts", -1)
    own = owner.parameters(recurse=False)
    found = [it for it in own if it.ndim == 3 and it.shape[0] == count]
    return (found, len(found[0])) if found and _is_told_which(owner) else None


def _of_modules(owner: nn.Module) -> _WeightsAndCount:
    """The weights of a list of experts, each a module of the same class, and how many these are."""
    experts = getattr(owner, "experts", None)
    if not isinstance(experts, nn.ModuleList) or len(set(map(type, experts))) != 1:
        return [], 0
    return list(experts.parameters()), len(experts)


def _is_told_which(owner: nn.Module) -> bool:
    """Whether experts are called with the chosen ones. Llama 4's are not, and all compute."""
    return len(inspect.signature(owner.forward).parameters) > 1


def _chosen(block: nn.Module, owner: nn.Module) -> Iterator[int]:
    places: list[tuple[object, tuple[str, ...]]] = [(it, _CHOSEN) for it in block.modules()]
    places.append((getattr(owner, "config", None), _CHOSEN_IN_CONFIG))
    for place, names in places:
        for name in names:
            count = getattr(place, name, None)
            if type(count) is int and count > 0:
                yield count
