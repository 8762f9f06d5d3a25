"""torch's hooks on saved tensors, which see what autograd keeps for the backward pass.

Only the innermost pair of a thread is called. Where there is one, autograd leaves the check for
modifications in place to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from umem import patches
from umem.core.interrupts import call_all
from umem.runtime.model_parts import lies_in_memory
from umem.runtime.torch_hooks.memory_access import original_data
from umem.torch_compat import (
    InferenceMode,
    is_own,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    storage_address,
    storage_key,
    top_saved_tensor_hooks,
    version_counter,
    view_base,
)

__all__ = [
    "Find",
    "Hooks",
    "Kept",
    "check_version",
    "find_lent",
    "give_way_to_transforms",
    "innermost",
    "is_any_lent",
    "is_lent",
    "keep",
    "lend",
    "let_go_of_memory",
    "may_leave",
    "pop_if_innermost",
    "probe_of",
    "unpack_kept",
]

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What packs a tensor that is saved, and what unpacks it when it is needed."""

Find = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""For a view of lent memory, returns how to find the same contents later."""

_lent: dict[int, Find] = {}
"""By the key of a storage that its tensors have for a time only."""


_nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
"""Tensors without memory, which all probes of a type share."""


class _Lent(NamedTuple):
    """A saved view of lent memory."""

    find: Callable[[], torch.Tensor]
    probe: torch.Tensor
    """Shares the saved tensor's counter of in-place modifications, and none of its memory."""
    version: int
    size: torch.Size


class _Stays(NamedTuple):
    """A saved tensor that stays where it is."""

    tensor: torch.Tensor
    version: int


Kept = _Lent | _Stays
"""What `keep` packs."""


def innermost() -> Hooks | None:
    """The pair that sees what this thread saves."""
    hooks: Hooks | None = top_saved_tensor_hooks(True)
    return hooks


def give_way_to_transforms() -> None:
    """From now on have transforms of ``torch.func``, which refuse pairs, find none of umem's."""
    patches.wrap("disabled_saved_tensors", _giving_way)


def _giving_way(original: Callable[[str], Any]) -> Callable[[str], Any]:
    @wraps(original)
    def disabled(message: str) -> Any:
        return original(message) if is_compiling() else _without_own(original(message))

    return disabled


@contextmanager
def _without_own(disabled: AbstractContextManager[None]) -> Iterator[None]:
    taken: list[Hooks] = []
    while (top := innermost()) is not None and is_own(top[0]):
        call_all(pop_saved_tensor_hooks, partial(taken.append, top))
    try:
        with disabled:
            yield
    finally:
        for hooks in reversed(taken):
            push_saved_tensor_hooks(*hooks)


def pop_if_innermost(hooks: Hooks, forget: Callable[[], object] = bool) -> bool:
    """Take a pair away, unless a program has pushed others since.

    `forget`, a function of C, is called where that is done: no interrupt comes between. The default
    does nothing.
    """
    top = innermost()
    if top is None or top[0] is not hooks[0]:
        return False
    call_all(pop_saved_tensor_hooks, forget)
    return True


def may_leave(tensor: torch.Tensor) -> bool:
    """Whether something else may stand for a saved tensor, so that its memory can go meanwhile.

    Not for a leaf that gradients are taken of, which the program has in its hands: a parameter, or
    an input. Nor for kinds of tensors that bytes alone do not make up.
    """
    if not lies_in_memory(tensor):
        return False
    base = view_base(tensor)
    base = tensor if base is None else base
    return type(base) is torch.Tensor and not (base.is_leaf and base.requires_grad)


def lend(storage: torch.UntypedStorage, find: Find) -> Callable[[], None]:
    """Have `keep` save no reference to a storage, whose memory other contents will have.

    The result ends that.
    """
    key = storage_key(storage)
    _lent[key] = find

    def undo() -> None:
        if _lent.get(key) is find:
            del _lent[key]

    return undo


def is_any_lent() -> bool:
    """Whether there is lent memory, so that what is saved has to go through `keep`."""
    return bool(_lent)


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of lent memory."""
    return find_lent(tensor) is not None


def find_lent(tensor: torch.Tensor) -> Find | None:
    """How to find the contents of a view later; None if it is of no lent memory."""
    if not _lent or tensor.layout is not torch.strided:
        return None
    try:
        return _lent.get(storage_address(tensor))
    except (NotImplementedError, RuntimeError):  # there is no storage
        return None


def keep(tensor: torch.Tensor) -> Kept:
    """Pack a tensor that stays where it is, or that is a view of lent memory."""
    find = find_lent(tensor)
    version = version_counter(tensor)
    if find is not None:
        return _Lent(find(tensor), probe_of(tensor), version, tensor.size())
    # What a node saves of its own results would keep the node alive, and the node this.
    return _Stays(tensor if tensor.is_leaf else tensor.detach(), version)


def probe_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares a tensor's counter of in-place modifications, and none of its memory."""
    probe = tensor.detach()
    let_go_of_memory(probe)
    return probe


def let_go_of_memory(tensor: torch.Tensor) -> None:
    """Have a tensor of our own no memory, but its counter still."""
    kind = tensor.dtype, tensor.device
    nothing = _nothing.get(kind)
    if nothing is None:
        with InferenceMode(False):
            nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if type(nothing) is torch.Tensor:  # and not one of a mode that ends
            _nothing[kind] = nothing
    original_data.__set__(tensor, nothing)


def unpack_kept(kept: Kept) -> torch.Tensor:
    """Unpack what `keep` packed; raises as `check_version` does."""
    if isinstance(kept, _Lent):
        check_version(kept.probe, kept.version, kept.size)
        return kept.find()
    check_version(kept.tensor, kept.version)
    return kept.tensor


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
