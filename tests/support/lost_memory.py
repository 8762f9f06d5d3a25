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
from collections.abc import Callable, Iterable
from contextlib import suppress
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
    found, known = _reach(works)
    # As Python's collector of cycles: whatever has a reference from outside stays, and its parts.
    counts = zip(found, map(sys.getrefcount, found.values()), strict=True)
    staying = [key for key, count in counts if count > known[key] + _OWN]
    while staying:
        held = found.pop(staying.pop(), None)
        staying += map(id, _parts(held))
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
    """What objects lead to, by ``id``, and how many references of these lead to each."""
    found: dict[int, Any] = {}
    left = [*works]
    known = Counter(map(id, left))
    while left:
        it = left.pop()
        if id(it) not in found:
            found[id(it)] = it
            parts = [*_parts(it)]
            known.update(map(id, parts))
            left += parts
    return found, known


def _parts(whole: Any) -> Iterable[Any]:
    """What an object refers to, as far as that is looked at."""
    kind: Any = type(whole)
    if kind is FunctionType:
        return () if whole.__closure__ is None else (whole.__closure__,)
    return filter(_is_looked_at, gc.get_referents(whole)) if _leads(kind) else ()


def _is_looked_at(it: object) -> bool:
    kind: Any = type(it)
    return _is_known(kind)


@functools.cache
def _leads(kind: Any) -> bool:
    return kind in _CONTAINERS or kind.__module__.startswith("umem.")


@functools.cache
def _is_known(kind: Any) -> bool:
    return kind is FunctionType or _leads(kind) or issubclass(kind, torch.Tensor)


_OWN = next(map(sys.getrefcount, {0: object()}.values()))
"""References of :func:`lose_memory` itself to what it looks at."""
