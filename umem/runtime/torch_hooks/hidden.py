"""Hooks on modules and optimizers that torch calls, and that nothing else finds.

A hook of umem in torch's own dictionary would be pickled by ``torch.save(model)``, copied by
``copy.deepcopy``, compiled by ``torch.jit.script`` and traced into graphs;
``torch.cuda.make_graphed_callables`` refuses a module with hooks, and ``nn.TransformerEncoder``
takes another path, with other bits. So umem's hooks are beside the dictionary's entries, in the
dictionary's own attributes. Only the one method by which torch walks through the hooks shows them.

It has to be the same dictionary: a handle that the program holds has a weak reference to it. So
its class is changed, which Python allows for classes that are written in Python alone. The new
class adds no field to an OrderedDict, so the change is what an assignment to ``__class__`` does.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any, Literal

from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from umem.torch_compat import fx_is_tracing, tracing_state

__all__ = ["HookPlace", "Undo", "are_called", "hidden_in", "hide", "uncalled"]

Undo = Callable[[], None]
HookPlace = Literal["first", "in order", "last"]

_lock = RLock()
"""Reentrant: garbage that is collected meanwhile may remove a hook."""

_uncalled: list[int] = []
"""The threads that leave umem's hooks out, once for each :func:`uncalled`."""


def are_called() -> bool:
    """Whether umem's hooks on calls of modules are called now: not where a call is traced."""
    return not (
        is_compiling()
        or tracing_state() is not None
        or fx_is_tracing()
        or (_uncalled and get_ident() in _uncalled)
    )


@contextmanager
def uncalled() -> Iterator[None]:
    """Leave umem's hooks on calls of modules out, in this thread."""
    thread = get_ident()
    _uncalled.append(thread)
    try:
        yield
    finally:
        _uncalled.remove(thread)


@dataclass(slots=True)
class _Own:
    """What umem has in one dictionary."""

    first: dict[int, Any] = field(default_factory=dict)
    amid: dict[int, Any] = field(default_factory=dict)
    last: dict[int, Any] = field(default_factory=dict)

    def __contains__(self, key: object) -> bool:
        return key in self.first or key in self.amid or key in self.last

    def __len__(self) -> int:
        return len(self.first) + len(self.amid) + len(self.last)

    def among(self, entries: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """The program's entries with umem's: numbers of hooks grow as they are registered."""
        for number, hook in self.amid.items():
            place = len(entries)
            while place and entries[place - 1][0] > number:
                place -= 1
            entries.insert(place, (number, hook))
        return [*self.first.items(), *entries, *self.last.items()]


_NOTHING = _Own()


class _Hooks(OrderedDict[int, Any]):
    """A dictionary of torch with the program's entries, and with umem's in an attribute.

    Garbage that is collected within a method may remove the last hook, and with it this class.
    """

    __slots__ = ()

    def copy(self) -> Any:
        return OrderedDict(OrderedDict.items(self))

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(OrderedDict.items(self))

    def __repr__(self) -> str:
        return repr(self.copy())


class _CallHooks(_Hooks):
    """Hooks on a module's call, whose items torch asks for there alone; or numbers of such hooks.

    While these are asked for, a call goes the way of one with hooks.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: object) -> bool:
        own = getattr(self, "own", _NOTHING)
        return key in own or dict.__contains__(self, key)

    def items(self) -> Any:
        if not are_called():
            return OrderedDict.items(self)
        own = getattr(self, "own", _NOTHING)
        return own.among([*OrderedDict.items(self)])


class _ListedHooks(_Hooks):
    """Hooks on loading, or on an optimizer's step, whose values torch asks for."""

    __slots__ = ()

    def values(self) -> Any:
        own = getattr(self, "own", _NOTHING)
        return [hook for _, hook in own.among([*OrderedDict.items(self)])]


def hide(handle: RemovableHandle, place: HookPlace = "in order") -> Undo:
    """Let nothing but torch's call of a hook find the hook, which was just registered.

    It is called first of all, where it was registered, or behind all hooks of the program, also
    those that the program adds later. The result removes the hook.
    """
    # Hooks on a call have dictionaries beside theirs, which say how they are called.
    kind = _CallHooks if handle.extra_dict_ref else _ListedHooks
    found = [ref() for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    every = [hooks for hooks in found if hooks is not None and handle.id in hooks]
    if not all(type(hooks) in (OrderedDict, kind) for hooks in every) or not _can_change():
        return handle.remove
    with _lock:
        for hooks in every:
            own: _Own = vars(hooks).get("own", _Own())
            value = hooks.pop(handle.id)
            if place == "first":
                own.first = {handle.id: value, **own.first}
            else:
                (own.last if place == "last" else own.amid)[handle.id] = value
            vars(hooks)["own"] = own
            if type(hooks) is OrderedDict:
                _change_class(hooks, kind)
    return functools.partial(_remove, handle.id, list(map(weakref.ref, every)))


def hidden_in(hooks: Any) -> int:
    """The number of umem's hooks in one of torch's dictionaries."""
    own: _Own | None = vars(hooks).get("own")
    return 0 if own is None else len(own)


def _remove(number: int, every: list[weakref.ref[OrderedDict[int, Any]]]) -> None:
    with _lock:
        while every:
            hooks = every.pop()()
            if hooks is None:
                continue
            own: _Own = vars(hooks)["own"]
            for some in (own.first, own.amid, own.last):
                some.pop(number, None)
            if not own:
                _change_class(hooks, OrderedDict)
                del vars(hooks)["own"]


_OWNED = (_CallHooks, _ListedHooks)
_CLASS_OFFSET = object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p)
"""Of the pointer to its class in an object of CPython: the last field that all objects have."""


def _change_class(hooks: OrderedDict[int, Any], kind: type[OrderedDict[int, Any]]) -> None:
    """Assign to ``__class__``: objects of classes written in Python alone own a reference to it."""
    before = type(hooks)
    if kind in _OWNED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kind))
    ctypes.c_void_p.from_address(id(hooks) + _CLASS_OFFSET).value = id(kind)
    if before in _OWNED:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(before))


@functools.cache
def _can_change() -> bool:
    """Whether objects of this Python have their class where :func:`_change_class` writes it."""
    if sys.implementation.name != "cpython" or hasattr(sys, "getobjects"):
        return False
    sample: OrderedDict[int, Any] = OrderedDict()
    place = ctypes.c_void_p.from_address(id(sample) + _CLASS_OFFSET)
    sizes = {kind.__basicsize__ for kind in (OrderedDict, *_OWNED)}
    return place.value == id(OrderedDict) and len(sizes) == 1
