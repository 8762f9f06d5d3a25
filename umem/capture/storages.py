"""The storages of one training step, which both ways of recording write into a trace.

Tensors that are views of one storage share its memory, which is allocated and freed as a whole. So
a storage is what a trace calls a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from umem.core.classes import TensorClass
from umem.torch_compat import storage_key
from umem.trace import Access, PhaseKind, Precision, Trace, check_trace, ranges

__all__ = ["BEFORE", "Lifetime", "Phase", "Storage", "Storages", "build_trace", "lifetime"]

BEFORE = -1
"""Birth of a storage that was there before the step."""

Lifetime = tuple[int, int, bool]
"""First and last phase, and whether the storage lives from step to step. The first lies after the
last for a storage that no phase sees."""


@dataclass(slots=True)
class Storage:
    """One storage; its phases are numbers in the order of the step."""

    name: str
    bytes: int
    tensor_class: TensorClass
    born: int
    """First phase that it is there for, or :data:`BEFORE`."""
    died: int | None = None
    """First phase that it is gone for; None while it lives."""
    first_access: Access | None = None


class Storages:
    """All storages seen in a step, by weak references; `records` has them by number."""

    def __init__(self, next_phase: Callable[[], int]) -> None:
        self.records: list[Storage] = []
        self._next_phase = next_phase
        # By address of the C++ storage, which is not used again before the weak reference's
        # callback has run.
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def find(self, tensor: torch.Tensor) -> int | None:
        """Number of the storage behind a tensor, or None for one not seen yet."""
        known = self._live.get(storage_key(tensor.untyped_storage()))
        return None if known is None else known[0]

    def add(
        self, tensor: torch.Tensor, name: str, tensor_class: TensorClass, born: int
    ) -> int | None:
        """Number of the storage behind a tensor, which is tracked from now on.

        A known storage keeps its record, with its present bytes if they are more: it can be
        resized. None for a storage without bytes.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes == 0:
            return None
        key = storage_key(storage)
        known = self._live.get(key)
        if known is not None:
            record = self.records[known[0]]
            record.bytes = max(record.bytes, nbytes)
            return known[0]
        number = len(self.records)
        self.records.append(Storage(name, nbytes, tensor_class, born))

        def note_death(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._live[key]
            self.records[number].died = self._next_phase()

        self._live[key] = (number, weakref.ref(storage, note_death))
        return number

    def note_first_access(self, number: int, access: Access) -> None:
        """A phase uses a storage; what its first use does shows whether it was carried over."""
        record = self.records[number]
        record.first_access = record.first_access or access


def lifetime(storage: Storage, phase_count: int) -> Lifetime:
    """The phases that a storage is there for, in a step of so many phases."""
    last = phase_count - 1 if storage.died is None else storage.died - 1
    if storage.born != BEFORE:
        return storage.born, last, False
    # A storage from the step before that this step reads before it is freed is carried over from
    # step to step, though each time in other memory.
    is_carried = storage.first_access is not None and Access.READ in storage.first_access
    if storage.died is None or is_carried:
        return 0, phase_count - 1, True
    return 0, last, False


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a trace."""

    name: str
    memory_bytes: int
    accesses: Mapping[int, Access]
    """By number of the storage."""
    kind: PhaseKind = PhaseKind.KERNEL
    precision: Precision = Precision.FP32
    flops: float = 0.0


def build_trace(
    storages: Sequence[Storage],
    lifetimes: Sequence[Lifetime],
    phases: Sequence[Phase],
    *,
    name: str,
    source: str,
    metadata: Mapping[str, str | int | float],
    duration_s: NDArray[np.float64] | None = None,
) -> tuple[Trace, dict[int, int]]:
    """Write storages and phases into a trace, and check it; raises ``TraceError``.

    The trace leaves out storages that no phase sees. Also returns the index in the trace's tensors
    by number of the storage.
    """
    kept = [number for number, (first, last, _) in enumerate(lifetimes) if first <= last]
    index = {number: position for position, number in enumerate(kept)}
    accesses = [sorted(phase.accesses.items()) for phase in phases]
    trace = Trace(
        name=name,
        source=source,
        tensor_names=tuple(storages[number].name for number in kept),
        tensor_bytes=np.array([storages[number].bytes for number in kept], np.int64),
        tensor_class=np.array([storages[number].tensor_class.number for number in kept], np.uint8),
        persistent=np.array([lifetimes[number][2] for number in kept], np.bool_),
        first_phase=np.array([lifetimes[number][0] for number in kept], np.int32),
        last_phase=np.array([lifetimes[number][1] for number in kept], np.int32),
        phase_names=tuple(phase.name for phase in phases),
        phase_kind=np.array([phase.kind for phase in phases], np.uint8),
        phase_precision=np.array([phase.precision for phase in phases], np.uint8),
        flops=np.array([phase.flops for phase in phases], np.float64),
        memory_bytes=np.array([phase.memory_bytes for phase in phases], np.int64),
        duration_s=duration_s,
        access_start=ranges(np.array([len(phase) for phase in accesses], np.int64)),
        access_tensor=np.array([index[it] for phase in accesses for it, _ in phase], np.int32),
        access_mode=np.array([mode for phase in accesses for _, mode in phase], np.uint8),
        metadata=metadata,
    )
    check_trace(trace, name)
    return trace, index
