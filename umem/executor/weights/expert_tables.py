"""Mixtures of experts: which weights hold all experts of a layer, and which calls use few of them.

`transformers` keeps the experts of a layer stacked in a few parameters. With few tokens its kernels
read the chosen experts only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["ExpertTables", "find_expert_tables"]

_CHOSEN = ("top_k", "num_experts_per_tok", "top_k_experts")
"""Attributes of a module that tell how many experts each token chooses."""

_CHOSEN_IN_CONFIG = _CHOSEN[1:]
"""The same of a configuration, whose ``top_k`` would be that of sampling."""


@dataclass(frozen=True)
class ExpertTables:
    """Parameters of a block that hold one expert per row."""

    ids: frozenset[int] = frozenset()
    """By ``id``."""
    few_rows: int = 0
    """With at most so many rows, a call of the block cannot choose all experts; 0 for no tables."""


def find_expert_tables(block: nn.Module) -> ExpertTables:
    """The tables of experts in a block; none where it is unknown how many a token chooses."""
    ids: list[int] = []
    few_rows: list[int] = []
    for owner in block.modules():
        experts = getattr(owner, "num_experts", -1)
        own = owner.parameters(recurse=False)
        tables = [id(it) for it in own if it.ndim == 3 and it.shape[0] == experts]
        if tables and _is_told_which(owner):
            chosen = max(_chosen(block, owner), default=experts)
            if 0 < chosen < experts:
                ids += tables
                few_rows.append((experts - 1) // chosen)
    return ExpertTables(frozenset(ids), min(few_rows, default=0))


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
