"""What a block's call can reach in Python, noted so that a change of it shows.

From the block's modules on: their attributes, classes and forward functions, what these name and
close over, and what all of it holds in turn. Nothing tells whether an iterator or a file has moved:
where there is one, nothing can be said. Objects of torch and of Python's library are taken as they
are, but for containers, modules, tensors and generators; so are functions of installed packages
that only others name.
"""

from __future__ import annotations

import io
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from umem.torch_compat import version_counter

__all__ = ["Reachable", "ReachableBeside"]

_MOST_OBJECTS = 20_000
"""To look at so many takes some 20 ms."""

_MOST_ARRAY_BYTES = 1 << 16
_ENTRIES = ("_parameters", "_buffers", "_modules")
_VALUES = (type(None), bool, int, str, bytes, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_UNTOLD = (Iterator, io.IOBase, random.Random, np.random.Generator, np.random.RandomState)
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "umem"))
_INSTALLED = ("site-packages", "dist-packages")


class Reachable:
    """A state of all that some objects lead to, which two looks can be compared by.

    Parameters
    ----------
    roots
        Where to begin.
    but
        Tensors whose contents do not count.

    Raises
    ------
    ValueError
        If it holds what cannot be compared, or too much.
    """

    def __init__(self, roots: Iterable[object], but: Iterable[torch.Tensor] = ()) -> None:
        self._noted: list[object] = []
        self._but = frozenset(map(id, but))
        self._seen: dict[int, object] = {}  # holds them: a number is one object's meanwhile
        queue = deque(roots)
        while queue:
            value = queue.popleft()
            if isinstance(value, _VALUES):
                self._noted.append(value)
            elif isinstance(value, (float, complex)):
                self._noted.append(repr(value))  # tells zeros and numbers that are none apart
            else:
                self._noted.append(id(value))
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    queue.extend(self._look_into(value))
            if len(self._seen) > _MOST_OBJECTS:
                raise ValueError("a block's call can reach too much")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reachable) and self._noted == other._noted

    __hash__ = None  # type: ignore[assignment]

    def _look_into(self, value: Any) -> Iterable[object]:
        """Note the state that an object has by itself, and return what it leads to."""
        if isinstance(value, torch.Tensor):
            is_counted = not (value.is_inference() or id(value) in self._but)
            self._noted.append(version_counter(value) if is_counted else None)
        elif isinstance(value, torch.Generator):
            self._noted.append(bytes(value.get_state().numpy()))
        elif isinstance(value, np.ndarray):
            if value.nbytes > _MOST_ARRAY_BYTES or value.dtype.hasobject:
                raise ValueError("an array is large")
            self._noted.append(value.tobytes())
        elif isinstance(value, dict):
            self._noted.append(len(value))
            return chain.from_iterable(value.items())
        elif isinstance(value, _CONTAINERS):
            self._noted.append(len(value))
            return value
        elif isinstance(value, _UNTOLD):
            raise ValueError(f"nothing tells whether a {type(value).__name__} has moved")
        elif isinstance(value, nn.Module):
            # The signature of a call tells of hooks.
            own = (it for it in vars(value).items() if not it[0].endswith("_hooks"))
            return chain(chain.from_iterable(own), _methods(type(value)))
        else:
            return _held(value)
        return ()


class ReachableBeside:
    """What a module's call reads beside its attributes and weights, whose values are noted now.

    That is what attributes hold in turn, as a configuration does, and what functions name and close
    over, such as globals.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kinds = {type(it) for it in module.modules()}
        self._but = [*module.parameters(), *module.buffers()]
        self._held = [
            value
            for part in module.modules()
            for name, value in vars(part).items()
            if not (name in _ENTRIES or name.endswith("_hooks"))
        ]
        self._noted = self._look()

    def is_unchanged(self) -> bool:
        """Whether all of it is as it was; False where nothing tells."""
        return self._noted is not None and self._noted == self._look()

    def _look(self) -> Reachable | None:
        named = chain.from_iterable(map(_methods, self._kinds))
        try:
            return Reachable([*self._held, *named], self._but)
        except ValueError:
            return None


def _held(value: Any) -> Iterable[object]:
    """What other objects lead to."""
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
        is_followed = not any(it in file for it in _INSTALLED)
        is_own = not _is_of_library(value.__globals__.get("__name__"))
        return _named(value) if is_followed and is_own else ()
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, ModuleType):
        return ()
    if isinstance(value, type):
        named = () if _is_of_library(value.__module__) else vars(value).items()
        return [it for name, it in named if name[:2] != "__" and not callable(it)]
    kind = type(value)
    if _is_of_library(kind.__module__) and kind is not SimpleNamespace:
        return ()
    slots = (name for base in kind.__mro__ for name in vars(base).get("__slots__", ()))
    own: dict[str, object] = getattr(value, "__dict__", {})
    return *chain.from_iterable(own.items()), *(getattr(value, it, None) for it in slots)


def _methods(kind: type) -> Iterator[object]:
    """What the classes of a module have, and what their functions name."""
    for base in kind.__mro__:
        if not _is_of_library(base.__module__):
            for name, it in vars(base).items():
                function = getattr(it, "__func__", getattr(it, "fget", it))
                if isinstance(function, FunctionType):
                    yield from _named(function)
                elif name[:2] != "__":
                    yield it


def _named(function: FunctionType) -> Iterator[object]:
    """What a function names, closes over, and has by default."""
    yield function.__code__
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    everything = function.__globals__
    yield from (everything[name] for name in sorted(names & everything.keys()))
    yield from function.__defaults__ or ()
    yield function.__kwdefaults__
    yield vars(function)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            yield None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for it in code.co_consts:
        if isinstance(it, CodeType):
            yield from _codes(it)


def _is_of_library(module: object) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES
