"""Tells whether anything but some tensors has their memory, and may use it unseen."""

from __future__ import annotations

import gc
from collections.abc import Collection

import torch

from umem.runtime.held_memory import any_held, are_kept
from umem.runtime.torch_hooks.memory_access import original_storage
from umem.runtime.unguarded import Unguarded, addresses_of
from umem.torch_compat import storage_address, storage_key, storage_use_count

__all__ = ["are_all_on_memory", "has_alias", "have_one_memory", "overlap", "tensors_on"]


def has_alias(tensors: Collection[torch.Tensor]) -> bool:
    """Whether something else has the memory of some tensors; always for sparse ones.

    That is other tensors, such as views, or a program that holds the memory in another way.
    """
    try:
        return any_held(tensors) or not _have_users(tensors, 1)
    except (NotImplementedError, RuntimeError):  # there is no storage
        return True


def are_all_on_memory(tensors: Collection[torch.Tensor]) -> bool:
    """Whether nothing but these tensors has their memory, the same for all; each is given once."""
    return not any_held(tensors) and _have_users([next(iter(tensors))], len(tensors))


def tensors_on(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    """All tensors of Python on a storage. To look among 100,000 objects takes about 0.1 s."""
    found, key = [], storage_key(storage)
    with Unguarded():
        for it in gc.get_objects():
            # Not `isinstance`, for which a proxy may answer with another class.
            if issubclass(type(it), torch.Tensor):
                try:
                    if storage_address(it) == key:
                        found.append(it)
                except (NotImplementedError, RuntimeError):  # it has no storage
                    continue
    return found


def overlap(tensors: Collection[torch.Tensor]) -> bool:
    """Whether a byte of memory may be of two strided tensors. Gaps count as a tensor's own."""
    some = [it for it in tensors if it.layout is torch.strided and it.numel()]
    ends = 0
    for begin, size_bytes in sorted(zip(addresses_of(some), map(_extent, some), strict=True)):
        if begin < ends:
            return True
        ends = begin + size_bytes
    return False


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    places = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in places) + 1) * tensor.itemsize


def have_one_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same memory, or parts of it."""
    try:
        return storage_address(first) == storage_address(second)
    except (NotImplementedError, RuntimeError):  # there is no storage
        return False


def _have_users(tensors: Collection[torch.Tensor], count: int) -> bool:
    """Whether so many tensors have the memory of each, and nothing else has it."""
    if {count}.issuperset(map(storage_use_count, map(storage_address, tensors))):
        return True
    # Python's object of a storage counts too, also one that nothing refers to any more.
    with Unguarded():
        storages = list(map(original_storage, tensors))
    counts = map(storage_use_count, map(storage_key, storages))
    return {count + 1}.issuperset(counts) and not are_kept(storages)
