"""Values of tensors for as long as these live, with no weak reference in a program's way.

``torch.utils.swap_tensors`` refuses a tensor that has a weak reference. ``Module.to`` calls it for
wrapper subclasses, and for all parameters where the program asks for that. So the values are put
aside meanwhile. They stay with the object, which modules and optimizers go on to use. So do umem's
hooks on gradients, which torch would leave with the other contents, and the object without any
later hook of the program.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from umem import patches
from umem.runtime.guard import settle
from umem.torch_compat import accumulation_hooks, set_accumulation_hooks

__all__ = ["KnownTensors", "hook_accumulation"]

_Value = TypeVar("_Value")


class KnownTensors(Generic[_Value]):
    """Values by tensor, as the object that it is. Holds no tensor."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()
        _every.append(weakref.ref(self, _every.remove))
        _see_swaps()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._values

    def __setitem__(self, tensor: torch.Tensor, value: _Value) -> None:
        self._values[tensor] = value

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._values[tensor]

    def get(self, tensor: torch.Tensor) -> _Value | None:
        """The value of a tensor; None if nothing is known of it."""
        found: _Value | None = self._values.get(tensor)
        return found


def hook_accumulation(
    parameter: torch.Tensor, hook: Callable[[torch.Tensor], object]
) -> RemovableHandle:
    """Call a function when autograd has added to a parameter's gradient, until it is removed."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooked = _hooked()
    hooked[parameter] = (hooked.get(parameter) or frozenset()) | {handle.id}
    return handle


_every: list[weakref.ref[KnownTensors[Any]]] = []


@functools.cache
def _hooked() -> KnownTensors[frozenset[int]]:
    """Numbers of umem's own hooks, and of those that were removed."""
    return KnownTensors()


@functools.cache
def _see_swaps() -> None:
    """See what is swapped until the process ends: programs import the function by its name."""
    patches.wrap("swap_tensors", _swapping)


def _swapping(swap: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(swap)
    def swap_tensors(t1: Any, t2: Any) -> None:
        pair = [it for it in (t1, t2) if isinstance(it, torch.Tensor)]
        settle(pair)  # not once nothing is known: a gradient may have a factor to come
        every = [known for it in list(_every) if (known := it()) is not None]
        hooks = [(it, *_take_hooks(it)) for it in pair]
        aside = [(known, it, known.get(it)) for known in every for it in pair if it in known]
        for known, tensor, _ in aside:
            del known[tensor]
        try:
            swap(t1, t2)
        finally:
            for known, tensor, value in aside:
                known[tensor] = value
            for tensor, held, own in hooks:
                _put_hooks(tensor, held, own)

    return swap_tensors


_Hooks = dict[int, Any]


def _take_hooks(tensor: torch.Tensor) -> tuple[_Hooks | None, _Hooks]:
    """Take umem's hooks from a tensor. Returns what held them, and them."""
    held, numbers = accumulation_hooks(tensor), _hooked().get(tensor) or ()
    own = {it: held.pop(it) for it in numbers if it in held} if held else {}
    if own and not held:  # as if there had been none
        set_accumulation_hooks(tensor, None)
    return held, own


def _put_hooks(tensor: torch.Tensor, held: _Hooks | None, own: _Hooks) -> None:
    """Put them back, where no hook of the program has gone with the other contents."""
    if own and held is not None:
        held.update(own)
        if accumulation_hooks(tensor) is None:
            set_accumulation_hooks(tensor, held)
