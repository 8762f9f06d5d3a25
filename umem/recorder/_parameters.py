"""Which tensors a model and an optimizer have between steps, and which blocks have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.recorder._blocks import Block

__all__ = ["OUTSIDE", "Parameters", "find_parameters", "parameter_names"]

OUTSIDE = ""
"""The block of what belongs to none."""


@dataclass(frozen=True, eq=False)
class Parameters:
    """What is looked up once, between two steps.

    Within a step a module may have others: those of a sharded model are gathered for it.

    Parameters
    ----------
    names
        Of the parameters.
    buffers
        The buffers' names.
    owner
        The block of each of both; the first one, where several have it.
    held
        Parameters and buffers of each block. What belongs to none is :data:`OUTSIDE`'s.
    """

    names: Mapping[torch.Tensor, str]
    buffers: Mapping[torch.Tensor, str]
    owner: Mapping[torch.Tensor, str]
    held: Mapping[str, Sequence[torch.Tensor]]


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[torch.Tensor, str]:
    """What parameters are called: ``parameter N`` where only the optimizer has them."""
    names: dict[torch.Tensor, str] = {it: name for name, it in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names.setdefault(parameter, f"parameter {len(names)}")
    return names


def find_parameters(model: nn.Module, blocks: Iterable[Block], optimizer: Optimizer) -> Parameters:
    """Look up what there is now."""
    names = parameter_names(model, optimizer)
    buffers = {it: name for name, it in model.named_buffers()}
    owner: dict[torch.Tensor, str] = {}
    held: dict[str, list[torch.Tensor]] = {OUTSIDE: []}
    for block in blocks:
        held[block.name] = [*block.module.parameters(), *block.module.buffers()]
        for tensor in held[block.name]:
            owner.setdefault(tensor, block.name)
    for tensor in (*buffers, *names):
        if tensor not in owner:
            owner[tensor] = OUTSIDE
            held[OUTSIDE].append(tensor)
    return Parameters(names, buffers, owner, held)
