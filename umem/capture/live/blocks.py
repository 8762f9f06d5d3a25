"""The blocks that a model is cut into, and the parameters and buffers that each of them holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.core.errors import TraceError
from umem.runtime.model_parts import (
    buffers_of,
    find_chains,
    main_chain,
    members,
    optimizer_parameters,
    parameter_names,
)

__all__ = ["NO_BLOCK", "Block", "Parameters", "find_blocks", "find_parameters"]

NO_BLOCK = ""
"""Name that stands for the model outside of its blocks."""


class Block:
    """A module whose forward and backward passes are phases, and the labels of these.

    The module is kept by a weak reference only: hooks of an optimizer, which may outlive it, lead
    here.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.forward = f"forward {name}"
        self.backward = f"backward {name}"
        self.recompute = f"recompute {name}"
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module; raises ``TraceError`` if it has been freed."""
        module = self._module()
        if module is None:
            raise TraceError(f"{self.name} is gone: keep the model for as long as it is recorded")
        return module


@dataclass(frozen=True, eq=False)
class Parameters:
    """Parameters and buffers by name, looked up between two steps.

    Within a step a module may have others: those of a sharded model are gathered for it.
    """

    names: Mapping[torch.Tensor, str]
    buffers: Mapping[torch.Tensor, str]
    owner: Mapping[torch.Tensor, str]
    """Name of the first block that holds each of them."""
    held: Mapping[str, Sequence[torch.Tensor]]
    """All of them by name of the block; :data:`NO_BLOCK` has those that are in no block."""


def find_parameters(model: nn.Module, blocks: Iterable[Block], optimizer: Optimizer) -> Parameters:
    """Look up the parameters and buffers that there are now."""
    names = parameter_names(model.named_parameters(), optimizer_parameters(optimizer))
    buffers = {buffer: name for name, buffer in model.named_buffers()}
    owner: dict[torch.Tensor, str] = {}
    held: dict[str, list[torch.Tensor]] = {NO_BLOCK: []}
    for block in blocks:
        held[block.name] = [*block.module.parameters(), *buffers_of(block.module)]
        for tensor in held[block.name]:
            owner.setdefault(tensor, block.name)
    for tensor in (*buffers, *names):
        if tensor not in owner:
            owner[tensor] = NO_BLOCK
            held[NO_BLOCK].append(tensor)
    return Parameters(names, buffers, owner, held)


def find_blocks(model: nn.Module) -> tuple[Block, ...]:
    """Cut a model into blocks that do not overlap, in the order of the model.

    They are the members of the main chain, the layers of a transformer: of all lists and
    :class:`~torch.nn.Sequential` of two or more, that with the largest product of length and bytes.
    Also those of every chain that is disjoint from it, and the outermost modules with parameters
    that contain none of these: embeddings, the last norm, the head.
    """
    found = set(_cut(model, _parts(model) - {model}))
    return tuple(Block(name, module) for name, module in model.named_modules() if module in found)


def _parts(model: nn.Module) -> set[nn.Module]:
    main = main_chain(model)
    if main is None:  # the children of the outermost module that has more than one
        children = members(model)
        while len(children) == 1 and members(children[0]):
            children = members(children[0])
        return set(children)
    picked = [main]
    for chain in find_chains(model):
        inside = set(chain.modules())
        if not any(chain in set(other.modules()) or other in inside for other in picked):
            picked.append(chain)
    return {member for chain in picked for member in members(chain)}


def _cut(module: nn.Module, parts: set[nn.Module], *, is_root: bool = True) -> Iterator[nn.Module]:
    """The parts, and the outermost modules with parameters that contain none of them."""
    if module in parts:
        yield module
    elif is_root or any(inner in parts for inner in module.modules()):
        for child in module.children():
            yield from _cut(child, parts, is_root=False)
    elif any(True for _ in module.parameters()):
        yield module
