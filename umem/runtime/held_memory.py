"""The memory that a program may reach past its tensors, and that has to stay where it is.

A program may keep the address of a tensor's memory: in an array of another library, in a table of
pointers for a kernel, in an object of the storage. The address is stale once the tensor has other
memory. So such memory is recorded here, and whatever moves memory asks first. An update of held
memory runs in place or is written back, and ``step()`` waits for the update.

The record has a weak reference to each storage, by which no memory is kept alive. As long as the
reference exists, no other storage gets the storage's own address (which is not that of its memory).
So an entry never stands for another storage.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, ValuesView
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer

from umem.core.arguments import check_argument
from umem.runtime.model_parts import buffers_of, optimizer_parameters, plain_tensors, tensors_in
from umem.runtime.torch_hooks.memory_access import original_storage, watch_lent
from umem.runtime.unguarded import Unguarded
from umem.torch_compat import storage_address, storage_key

__all__ = [
    "Hold",
    "Lender",
    "any_held",
    "are_kept",
    "before_hold",
    "hold",
    "is_held",
    "is_storage_held",
    "lend_memory",
    "note_export",
]

_REMEDY = (
    "give tensors, modules, optimizers, or lists of these. For an address, a storage or an array "
    "of another library give the tensor whose memory that is; gradients exist after backward()"
)

_FIRST_PRUNING = 256
"""Entries before those of storages that are gone are looked for; later at twice what was left."""


@dataclass(slots=True)
class _Held:
    storage: StorageWeakRef
    holds: int = 0
    """Calls of :func:`hold` that are not released."""
    is_exported: bool = False
    """Whether another library may have the address, for as long as the storage exists."""


_lock = threading.RLock()  # a finaliser of the program may export, amid a call of this thread
_held: dict[int, _Held] = {}
"""By the address of the storage."""
_prune_at = _FIRST_PRUNING
_listeners: list[Callable[[], None]] = []


class Lender(Protocol):
    """Lends a storage to tensors for a time."""

    def give_home(self, tensor: torch.Tensor) -> None:
        """Give a tensor on the storage memory of its own, which it keeps from then on."""

    def note_alias(self, alias: torch.Tensor) -> None:
        """Note a further tensor on the storage, by which the program may change values unseen."""


_lent: dict[int, weakref.ref[Lender]] = {}
"""By the address of the storage."""


class Hold(AbstractContextManager["Hold"]):
    """Memory that stays where it is until :meth:`release`, or the end of a ``with`` block.

    Parameters
    ----------
    storages
        The storages of the tensors.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        with _lock:
            self._entries = [_entry_of(it) for it in storages]
            for entry in self._entries:
                entry.holds += 1

    def release(self) -> None:
        """Let the memory move again, from the next step on. A second call does nothing."""
        with _lock:
            entries, self._entries = self._entries, []
            for entry in entries:
                entry.holds -= 1
                if not entry.holds and not entry.is_exported:
                    _held.pop(entry.storage.cdata, None)

    def __exit__(self, *_: object) -> None:
        self.release()


def hold(tensors: Any) -> Hold:
    """Keep tensors at their addresses, for a program that uses these past torch.

    From this call on, the memory of the tensors stays where it is, and their values are right there
    after each ``step()``, for work of the current stream. They are right when the call returns,
    too. That costs what umem gains otherwise: ``step()`` waits for the updates of these tensors.

    Parameters
    ----------
    tensors
        A tensor, a module (its parameters and buffers), an optimizer (its parameters, and the
        gradients and state that they have now), or lists, tuples, sets, dictionaries or iterators
        of these. A gradient that a later backward pass makes is another tensor.

    Returns
    -------
    Hold
        Its ``release()`` ends the hold, as does the end of a ``with`` block of it. Without either
        the memory is held for as long as it exists. To drop the object ends nothing.

    Raises
    ------
    TypeError
        For anything else.
    PlanError
        Between an update in the backward pass (``step_in_backward``) and ``step()``.

    Examples
    --------
    >>> table = torch.tensor([p.data_ptr() for p in model.parameters()])  # doctest: +SKIP
    >>> umem.hold(model)  # doctest: +SKIP
    """
    found = list(_tensors_of(tensors))
    for listener in _listeners:
        listener()
    return Hold(_own_storages(found))


def note_export(tensors: Any) -> None:
    """Note that something past torch is about to get the addresses of tensors for good.

    To be called for ``__cuda_array_interface__`` and DLPack, whose user keeps the tensor and not
    its storage, so that the storage's use count tells nothing, and for a capture into a CUDA graph.
    The memory is held for as long as it exists. Call it after the wait for the tensors' updates and
    copies, which may give them other memory. `tensors` are as for :func:`hold`.
    """
    storages = _own_storages(_tensors_of(tensors))
    with _lock:
        for storage in storages:
            _entry_of(storage).is_exported = True


def is_held(tensor: torch.Tensor) -> bool:
    """Whether the memory of a plain tensor has to stay where it is."""
    return any_held((tensor,))


def is_storage_held(storage: torch.UntypedStorage) -> bool:
    """The same for a storage."""
    return bool(_held) and storage_key(storage) in _held


def any_held(tensors: Collection[torch.Tensor]) -> bool:
    """Whether that holds for any of some plain tensors. Those without a storage are not held."""
    if not _held:
        return False
    try:
        return not _held.keys().isdisjoint(map(storage_address, tensors))
    except (NotImplementedError, RuntimeError):
        return any(map(any_held, zip(tensors))) if len(tensors) > 1 else False


def are_kept(storages: Collection[torch.UntypedStorage]) -> bool:
    """Whether a program keeps an object of any of these storages.

    There is one such object for each storage, which the storage's use count does not tell from an
    object that nothing refers to any more. The list has the only references of the caller, from
    ``Tensor.untyped_storage``, and each storage belongs to a tensor that is alive.
    """
    return not _references().issuperset(map(sys.getrefcount, storages))


@functools.cache
def _references() -> frozenset[int]:
    """The reference count of an object that nobody keeps, which differs between torch versions."""
    tensor = torch.empty(1, device="cpu")
    return frozenset(map(sys.getrefcount, list(map(original_storage, [tensor]))))


def before_hold(listener: Callable[[], None]) -> None:
    """Have a function called before each :func:`hold`, for the rest of the process.

    It has all tensors get their values at the addresses that they are to keep.
    """
    if listener not in _listeners:
        _listeners.append(listener)


def lend_memory(storage: torch.UntypedStorage, lender: Lender) -> Callable[[], None]:
    """Say that tensors have a storage for a time only; the result ends that.

    Whoever takes the storage, or hands it to another library, gets the tensor's own instead.
    """
    key = storage_key(storage)
    _lent[key] = weakref.ref(lender)
    watch_lent(_give_home, _note_alias)

    def undo() -> None:
        _lent.pop(key, None)
        if not _lent:
            watch_lent(None, None)

    return undo


def _lender_of(tensor: torch.Tensor) -> Lender | None:
    try:
        reference = _lent.get(storage_address(tensor))
    except (NotImplementedError, RuntimeError):  # there is no storage
        return None
    return None if reference is None else reference()


def _give_home(tensor: torch.Tensor) -> None:
    lender = _lender_of(tensor)
    if lender is not None:
        lender.give_home(tensor)


def _note_alias(alias: torch.Tensor) -> None:
    lender = _lender_of(alias)
    if lender is not None:
        lender.note_alias(alias)


def _own_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors, each of which has its own memory from now on, and no lent one."""
    with Unguarded():
        parts = [part for it in tensors for part in plain_tensors(it)]
        for part in parts:
            _give_home(part)
        return list(map(original_storage, parts))


def _entry_of(storage: torch.UntypedStorage) -> _Held:
    """The entry of a storage, which is made if there is none. Under the lock."""
    global _prune_at
    reference = StorageWeakRef(storage)
    entry = _held.get(reference.cdata)
    if entry is None:
        if len(_held) >= _prune_at:
            for key in [key for key, it in _held.items() if it.storage.expired()]:
                del _held[key]
            _prune_at = max(_FIRST_PRUNING, 2 * len(_held))
        entry = _held[reference.cdata] = _Held(reference)
    return entry


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from buffers_of(value)
    elif isinstance(value, Optimizer):
        for parameter in optimizer_parameters(value):
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from tensors_in(list(value.state.values()))
    elif isinstance(value, Mapping):
        yield from _tensors_of(value.values())
    elif isinstance(value, list | tuple | set | frozenset | ValuesView | Iterator):
        for it in value:
            yield from _tensors_of(it)
    else:
        check_argument("tensors", value, torch.Tensor, _REMEDY)
