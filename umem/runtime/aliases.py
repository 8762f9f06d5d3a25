"""Tells whether anything but some tensors has their memory, and may use it unseen."""

from __future__ import annotations

from collections.abc import Collection

import torch

from umem.runtime.held_memory import any_held, are_kept
from umem.runtime.torch_hooks.memory_access import original_storage
from umem.runtime.unguarded import Unguarded
from umem.torch_compat import storage_address, storage_key, storage_use_count

__all__ = ["are_all_on_memory", "has_alias"]

_ONE, _TWO = frozenset((1,)), frozenset((2,))
"""References to a storage that one tensor has for itself: without an object in Python, and with."""


def has_alias(tensors: Collection[torch.Tensor]) -> bool:
    """Whether something else has the memory of some tensors; always for sparse ones.

    That is other tensors, such as views, or a program that holds the memory in another way.
    """
    try:
        if any_held(tensors):
            return True
        if _ONE.issuperset(map(storage_use_count, map(storage_address, tensors))):
            return False
        # Python's object of a storage counts too, also one that nothing refers to any more.
        with Unguarded():
            storages = list(map(original_storage, tensors))
        counts = map(storage_use_count, map(storage_key, storages))
        return not _TWO.issuperset(counts) or are_kept(storages)
    except (NotImplementedError, RuntimeError):  # there is no storage
        return True


def are_all_on_memory(tensors: Collection[torch.Tensor]) -> bool:
    """Whether nothing but these tensors has their memory, the same for all; each is given once."""
    if any_held(tensors):
        return False
    first = next(iter(tensors))
    address = storage_address(first)
    if storage_use_count(address) == len(tensors):
        return True
    # Python's object of a storage counts too, also one that nothing refers to any more.
    with Unguarded():
        storages = [original_storage(first)]
    is_object = storage_use_count(storage_key(storages[0])) == len(tensors) + 1
    return is_object and not are_kept(storages)
