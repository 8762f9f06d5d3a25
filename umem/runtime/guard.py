"""Orders every use of a tensor behind work on it that still runs on other streams.

A deferred optimizer step returns while its updates are under way. Until a block's next forward
pass has waited for them, anything else may look at the block's parameters, gradients or optimizer
state: an average of weights, a checkpoint, a logged norm, another thread, a scripted function. A
guard gives these tensors a key at torch's dispatcher, which hands each operator on them to the
guard first, in every thread (``guard/guard.cpp``). Their class, attributes and addresses stay.

What takes a tensor's memory without an operator asks the guard, too (``memory_access.py``). An
object of another tensor on the same memory would not be seen. So what has such an alias is not
deferred (``aliases.py``), unless all tensors on the memory are known and guarded.

In a torch for which umem has no native guard nothing can be guarded: steps wait for their updates.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from umem.runtime.native_guard import native_guard
from umem.runtime.torch_hooks.memory_access import wait_at_attributes
from umem.torch_compat import let_pass_higher_order_operators

__all__ = [
    "PLAIN_CLASSES",
    "Guard",
    "are_plain",
    "can_guard",
    "guard_of",
    "has_guard",
    "settle",
]

_native: Any = native_guard()
PLAIN_CLASSES = frozenset((torch.Tensor, nn.Parameter))
"""torch's own classes of tensors, but for DTensor."""

if _native is not None:
    let_pass_higher_order_operators(_native.KEY)


def has_guard() -> bool:
    """Whether tensors can be guarded in this torch."""
    return _native is not None


class Guard(object if _native is None else _native.Guard):  # type: ignore[misc]
    """Guards tensors that are updated, or copied, together.

    `settle` is called before each use, in the thread that uses a tensor. It may :meth:`release`
    them.
    """

    functions: ClassVar[tuple[str, ...]] = ()
    """Operators that :meth:`run` may run, such as ``aten::index``. Any other one is a use."""

    def __init__(self, settle: Callable[[], None]) -> None:
        if _native is not None:
            super().__init__(list(self.functions))
        self.settle = settle
        self._tensors: list[torch.Tensor] = []

    @property
    def is_on(self) -> bool:
        """Whether any tensors are guarded."""
        return bool(self._tensors)

    def use(self, tensor: torch.Tensor) -> None:
        """Settle all, before a use of one."""
        self.settle()

    def run(self, function: str, args: list[Any]) -> Any:
        """Run one of `functions` on these tensors, and others that this guard does not know.

        NotImplemented where it is a use after all. No guard sees what happens here.
        """
        raise NotImplementedError

    def hold(
        self,
        tensors: Iterable[torch.Tensor],
        events: Collection[tuple[int, int]] | None = None,
        *,
        is_on_host: bool = False,
    ) -> None:
        """Guard tensors, but those that another guard has, and keep them alive.

        `events` are handles of CUDA events, each with its device's number. To wait for them is
        enough for a thread that does not hold the interpreter's lock, which must not ask for it;
        `was_used` tells of that. None where it is not. With events, and `is_on_host`, code that
        takes a tensor's memory and asks nobody gets an error.
        """
        some = list(tensors)
        if some:
            _guards.add(self)
            _see_attributes()
            own = None if events is None else list(events)
            super().hold(some, own, self._tensors, is_on_host)

    def watch(self, tensors: Iterable[torch.Tensor], *, has_memory: bool = True) -> None:
        """Guard tensors for as long as something else keeps them alive.

        Without memory, code that takes a tensor's memory and asks nobody gets an error.
        """
        some = list(tensors)
        if some:
            _guards.add(self)
            _see_attributes()
            super().hold(some, None, None, not has_memory)

    def release(self) -> None:
        """Guard nothing any more. What an interrupt cuts short, another call completes."""
        if self in _guards:
            super().release()
            self._tensors = []
            _guards.discard(self)
            _see_attributes()


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
"""Those that guard something, or are about to."""
_lock = threading.RLock()


def _see_attributes() -> None:
    """See uses that are no operators while there is a guard."""
    with _lock:
        wait_at_attributes(_native.wait_for_use if _guards else None, _let_go)


def guard_of(tensor: torch.Tensor) -> Guard | None:
    """The guard of a tensor; None if it has none."""
    return None if _native is None else _native.guard_of(tensor)


def _let_go(value: Any) -> None:
    """Guard a tensor no more, which has waited."""
    if isinstance(value, torch.Tensor) and (guard := guard_of(value)) is not None:
        guard.give_back([value])


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Settle what is guarded of some tensors, from where no guard sees their use."""
    for tensor in tensors:
        asked: Guard | None = None
        while (guard := guard_of(tensor)) not in (None, asked):
            asked = guard
            guard.use(tensor)  # which may hand the tensor to another guard


def can_guard(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own classes."""
    return type(tensor) in PLAIN_CLASSES


def are_plain(tensors: Collection[torch.Tensor]) -> bool:
    """Whether tensors are of torch's own classes, and can be guarded: nothing guards them yet."""
    return _native is not None and _native.are_plain(tensors)
