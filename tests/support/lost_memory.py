"""Memory that a GPU's program would have given away: tensors that only queued work refers to.

A GPU's lane launches work and forgets it, and the allocator hands out what only that work referred
to, before the device has begun. Lanes that run work late on the CPU have to keep the work, and so
all that it refers to. They overwrite what would be gone.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from operator import methodcaller
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from umem.runtime.unguarded import Unguarded
from umem.torch_compat import storage_address, storage_use_count

_use_count: Callable[[torch.Tensor], int] = methodcaller("_use_count")

_CONTAINERS = {tuple, list, dict, set, frozenset, CellType, MethodType, functools.partial}


def lose_memory(works: Iterable[object]) -> None:
    """Overwrite tensors that only these objects lead to: NaN as any floating point number.

    Parameters
    ----------
    works
        Functions, and containers of tensors. The caller refers to each once. Of what they refer
        to, containers, closures and umem's own objects are looked through.
    """
    with _without_collections():
        _overwrite(_found(works))


@contextmanager
def _without_collections() -> Iterator[None]:
    """A GPU's lanes make no objects here, so Python collects no garbage, whose ends may do much."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _found(works: Iterable[object]) -> dict[int, Any]:
    """What only these objects lead to, by ``id``."""
    found, known = _reach(works)
    # As Python's collector of cycles: whatever has a reference from outside stays, and its parts.
    counts = zip(found, map(sys.getrefcount, found.values()), strict=True)
    staying = [key for key, count in counts if count > known[key] + _OWN]
    while staying:
        parts = _parts([it for key in staying if (it := found.pop(key, None)) is not None])
        staying = [*map(id, parts)]
    return found


def _overwrite(found: dict[int, Any]) -> None:
    by_storage = defaultdict(list)
    with Unguarded():
        for it in found.values():
            # With more than Python's object it is a parameter's gradient, or saved by a graph.
            if _is_memory(it) and _use_count(it) == 1:
                by_storage[storage_address(it)].append(it)
        for address, tensors in by_storage.items():
            if storage_use_count(address) == len(tensors):
                storage = tensors[0].untyped_storage()
                with suppress(RuntimeError):  # a freed gradient has none
                    ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())


def _is_memory(it: object) -> bool:
    return isinstance(it, torch.Tensor) and it.is_cpu and it.layout is torch.strided


def _reach(works: Iterable[object]) -> tuple[dict[int, Any], Counter[int]]:
    """What objects lead to, by ``id``, and how many references to each are theirs."""
    found: dict[int, Any] = {}
    known: Counter[int] = Counter()
    parts = [*works]
    while parts:  # many at a time: to ask for those of each takes twice as long
        known.update(map(id, parts))
        new = {id(it): it for it in parts if id(it) not in found}
        found |= new
        parts = _parts(new.values())
    return found, known


def _parts(objects: Iterable[Any]) -> list[Any]:
    """What objects refer to themselves, once for each reference."""
    closures, holders = [], []
    for it in objects:
        kind: Any = type(it)
        if kind is FunctionType:
            if it.__closure__ is not None:
                closures.append(it.__closure__)
        elif _LEADS[kind]:
            holders.append(it)
    return closures + [it for it in gc.get_referents(*holders) if _IS_KNOWN[type(it)]]


class _OfKinds(dict[Any, bool]):
    """An answer for each type, asked once: faster to look up than a function is to call."""

    def __init__(self, ask: Callable[[Any], bool]) -> None:
        self._ask = ask

    def __missing__(self, kind: Any) -> bool:
        self[kind] = answer = self._ask(kind)
        return answer


_LEADS = _OfKinds(lambda kind: kind in _CONTAINERS or kind.__module__.startswith("umem."))
_IS_KNOWN = _OfKinds(
    lambda kind: kind is FunctionType or _LEADS[kind] or issubclass(kind, torch.Tensor)
)

_OWN = next(map(sys.getrefcount, {0: object()}.values()))
"""References of :func:`lose_memory` itself to what it looks at."""
