"""Which memory a training step uses, and when: one record for each storage.

A tensor is a view of a storage; views share it. Memory is allocated and freed by the storage, so
that is what a trace calls a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from umem.classes import TensorClass
from umem.trace._model import Access

__all__ = ["BEFORE", "Storage", "Storages"]

BEFORE = -1
"""Birth of a storage that was there before the step."""


@dataclass(slots=True)
class Storage:
    """One storage of the step; phases are numbers in the order of the step."""

    name: str
    bytes: int
    tensor_class: TensorClass
    born: int
    """First phase that it is there for, or :data:`BEFORE`."""
    died: int | None = None
    """First phase that it is gone for; None while it lives."""
    first_access: Access | None = None


class Storages:
    """All storages seen, in the order of their numbers.

    Parameters
    ----------
    clock
        Gives the number of the next phase.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.records: list[Storage] = []
        self._clock = clock
        # By address of the C++ storage, which is its own until the reference's callback has run.
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def find(self, tensor: torch.Tensor) -> int | None:
        """Number of the storage behind a tensor, or None for one not seen yet."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def add(
        self, tensor: torch.Tensor, name: str, tensor_class: TensorClass, born: int
    ) -> int | None:
        """Follow the storage behind a tensor from now on; None for one without bytes.

        One that is known already keeps its record, with the bytes that it has now if they are
        more: a storage can be resized.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes == 0:
            return None
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            record = self.records[known[0]]
            record.bytes = max(record.bytes, nbytes)
            return known[0]
        number = len(self.records)
        self.records.append(Storage(name, nbytes, tensor_class, born))

        def note_death(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._live[key]
            self.records[number].died = self._clock()

        self._live[key] = (number, weakref.ref(storage, note_death))
        return number

    def live(self) -> Iterator[Storage]:
        """Records of the storages that are there now."""
        return (self.records[number] for number, _ in list(self._live.values()))
