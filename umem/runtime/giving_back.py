"""Memory that umem holds beside the program's tensors goes before the program gives memory back.

``torch.cuda.empty_cache`` and ``umem.pause`` call :func:`let_go` first: staging buffers, and what
refers to tensors that the program has replaced, are no use until the next step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["before_giving_back", "let_go"]

_holders: list[Callable[[torch.device | None], None]] = []


def before_giving_back(holder: Callable[[torch.device | None], None]) -> None:
    """Have a function called by each :func:`let_go`, for the rest of the process."""
    if holder not in _holders:
        _holders.append(holder)


def let_go(device: torch.device | None = None) -> None:
    """Hold nothing for trainings and models of a GPU until their next pass.

    None for those of all GPUs that the program has moved elsewhere.
    """
    for holder in _holders:
        holder(device)
