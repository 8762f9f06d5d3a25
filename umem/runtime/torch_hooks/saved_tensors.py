"""torch's hooks on saved tensors, which see what autograd keeps for the backward pass.

Only the innermost pair of a thread is called. Where there is one, autograd leaves the check for
modifications in place to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from umem.torch_compat import (
    pop_saved_tensor_hooks,
    top_saved_tensor_hooks,
    version_counter,
    view_base,
)

__all__ = [
    "Hooks",
    "Kept",
    "check_version",
    "innermost",
    "keep",
    "may_leave",
    "pop_if_innermost",
    "unpack_kept",
]

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What packs a tensor that is saved, and what unpacks it when it is needed."""

Kept = tuple[torch.Tensor, int]
"""A saved tensor that stays where it is, and its version."""


def innermost() -> Hooks | None:
    """The pair that sees what this thread saves."""
    hooks: Hooks | None = top_saved_tensor_hooks(True)
    return hooks


def pop_if_innermost(hooks: Hooks) -> bool:
    """Take a pair away, unless a program has pushed others since."""
    top = innermost()
    if top is None or top[0] is not hooks[0]:
        return False
    pop_saved_tensor_hooks()
    return True


def may_leave(tensor: torch.Tensor) -> bool:
    """Whether something else may stand for a saved tensor, so that its memory can go meanwhile.

    Not for a leaf that gradients are taken of, which the program has in its hands: a parameter, or
    an input. Nor for kinds of tensors that bytes alone do not make up.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    base = view_base(tensor)
    base = tensor if base is None else base
    return type(base) is torch.Tensor and not (base.is_leaf and base.requires_grad)


def keep(tensor: torch.Tensor) -> Kept:
    """Pack a tensor that stays where it is."""
    # What a node saves of its own results would keep the node alive, and the node this.
    return tensor if tensor.is_leaf else tensor.detach(), version_counter(tensor)


def unpack_kept(kept: Kept) -> torch.Tensor:
    """Unpack what `keep` packed; raises as `check_version` does."""
    tensor, version = kept
    check_version(tensor, version)
    return tensor


def check_version(tensor: torch.Tensor, version: int, size: torch.Size | None = None) -> None:
    """Raise autograd's ``RuntimeError`` if a saved tensor was modified in place.

    `tensor` may be another one that shares its version counter; `size` is the saved tensor's then.
    """
    if version_counter(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.size() if size is None else size)}] is at "
            f"version {version_counter(tensor)}; expected version {version} instead."
        )
