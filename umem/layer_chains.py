"""The layers of a model: modules in a list that run one after another."""

from __future__ import annotations

from torch import nn

__all__ = ["find_chains", "main_chain", "members"]


def members(module: nn.Module) -> list[nn.Module]:
    """A module's children that have parameters, each once."""
    return [child for child in module.children() if any(True for _ in child.parameters())]


def find_chains(model: nn.Module) -> list[nn.Module]:
    """Every :class:`~torch.nn.ModuleList` and :class:`~torch.nn.Sequential` of two members or more.

    Outermost first; the model itself may be one.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(members(module)) > 1
    ]


def main_chain(model: nn.Module) -> nn.Module | None:
    """The chain with the largest product of length and bytes: the layers of a transformer."""
    return max(find_chains(model), key=_weight, default=None)


def _weight(chain: nn.Module) -> int:
    return len(members(chain)) * sum(parameter.nbytes for parameter in chain.parameters())
