"""The tensors in what modules take and return, and in what optimizers hold."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.core.errors import TraceError
from umem.io.problems import did_you_mean
from umem.runtime.model_parts import (
    find_chains,
    main_chain,
    members,
    optimizer_parameters,
    parameter_names,
)

__all__ = [
    "OUTSIDE",
    "Block",
    "Parameters",
    "computed_tensors",
    "find_blocks",
    "find_parameters",
]

_DEEPEST = 8
"""Containers within containers are looked into so far; one may hold itself."""

_SEQUENCES = (tuple, list)
_PLAIN = frozenset({type(None), bool, int, float, str})
"""Most of what modules are given beside tensors."""


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


# Which tensors a model and an optimizer have between steps, and which blocks have them.

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


def find_parameters(model: nn.Module, blocks: Iterable[Block], optimizer: Optimizer) -> Parameters:
    """Look up what there is now."""
    names = parameter_names(model.named_parameters(), optimizer_parameters(optimizer))
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


# Which modules a step is cut at.


class Block:
    """A module whose passes are phases of their own, and what these are called.

    Parameters
    ----------
    name
        The module's in the model.
    module
        Only a weak reference is kept: hooks on an optimizer, which may live longer, lead here.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.forward = f"forward {name}"
        self.backward = f"backward {name}"
        self.recompute = f"recompute {name}"
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises
        ------
        TraceError
            If nobody else has it any more.
        """
        module = self._module()
        if module is None:
            raise TraceError(f"{self.name} is gone: keep the model for as long as it is recorded")
        return module


def find_blocks(model: nn.Module, chosen: Iterable[str | nn.Module] | None) -> tuple[Block, ...]:
    """Cut a model into blocks that do not overlap.

    Parameters
    ----------
    model
        The model.
    chosen
        Modules, or their names in the model; a :class:`~torch.nn.ModuleList` stands for the modules
        in it. By default the modules of a chain, a list or a :class:`~torch.nn.Sequential` of two
        or more: of the one with the largest product of length and bytes of parameters, which are
        the layers of a transformer, and of every other one that is disjoint from it.

    Returns
    -------
    tuple of Block
        The chosen ones, and beside them the outermost modules with parameters that contain none of
        them: embeddings, the last norm, the head. In the order of the model.

    Raises
    ------
    TraceError
        For a name or module that the model does not have, or one inside another.
    """
    names = {module: name for name, module in model.named_modules()}
    parts = _default_parts(model) if chosen is None else _chosen_parts(model, names, chosen)
    parts.discard(model)  # the whole model is no part of it
    found = {module: names[module] for module in _cut(model, parts)}
    return tuple(
        Block(name, module) for module, name in names.items() if found.get(module) is not None
    )


def _default_parts(model: nn.Module) -> set[nn.Module]:
    main = main_chain(model)
    if main is None:
        return set(_children(model))
    picked = [main]
    for chain in find_chains(model):  # outermost first
        inside = set(chain.modules())
        if not any(chain in set(other.modules()) or other in inside for other in picked):
            picked.append(chain)
    return {member for chain in picked for member in members(chain)}


def _children(model: nn.Module) -> list[nn.Module]:
    """Children with parameters, of the outermost module that has more than one."""
    children = members(model)
    while len(children) == 1 and members(children[0]):
        children = members(children[0])
    return children


def _chosen_parts(
    model: nn.Module, names: dict[nn.Module, str], chosen: Iterable[str | nn.Module]
) -> set[nn.Module]:
    if isinstance(chosen, str | nn.Module):
        raise TraceError(f"blocks is a {type(chosen).__name__}: give a list of names or modules")
    modules = {name: module for module, name in names.items()}
    parts: dict[nn.Module, None] = {}
    for choice in chosen:
        module = modules.get(choice) if isinstance(choice, str) else choice
        if module is None:
            hint = did_you_mean(str(choice), modules) or "."
            raise TraceError(
                f"blocks: {type(model).__name__} has no module {choice!r}{hint} "
                "model.named_modules() lists them"
            )
        if module not in names:
            raise TraceError(
                f"blocks: a {type(module).__name__} is no module of {type(model).__name__}: give "
                "modules of the model that is recorded, or their names"
            )
        is_list = isinstance(module, nn.ModuleList)  # which is not called
        parts.update(dict.fromkeys(list(module.children()) if is_list else [module]))
    for part in parts:
        for inner in part.modules():
            if inner is not part and inner in parts:
                raise TraceError(
                    f"blocks: {names[inner]!r} lies inside {names[part]!r}: choose one of them"
                )
    return set(parts)


def _cut(module: nn.Module, parts: set[nn.Module], *, is_root: bool = True) -> Iterator[nn.Module]:
    """The parts, and the outermost modules with parameters that contain none."""
    if module in parts:
        yield module
    elif is_root or any(inner in parts for inner in module.modules()):
        for child in module.children():
            yield from _cut(child, parts, is_root=False)
    elif any(True for _ in module.parameters()):
        yield module
