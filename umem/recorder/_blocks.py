"""Which modules a step is cut at."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

from torch import nn

from umem.config import did_you_mean
from umem.errors import TraceError
from umem.layer_chains import find_chains, main_chain, members

__all__ = ["Block", "find_blocks"]


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
