"""A recorded run: its memory operations as columns, their tensors, and the marks of its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.report import Cause, Direction, HintReport, Source, Traffic

__all__ = [
    "CAUSE_OF_NUMBER",
    "DIRECTION_OF_KIND",
    "MAX_RECORDS",
    "MAX_SAMPLES",
    "RECORD_COLUMNS",
    "TRANSFERS",
    "UNKNOWN",
    "Integers",
    "MigrationRecords",
    "RecordKind",
    "Recording",
    "Residency",
    "concatenate",
    "make_records",
]

Integers = npt.NDArray[np.int64]

MAX_RECORDS = 2**21
"""Most records kept of one run. A transfer carries at most 2 MiB, so these records cover at most
4 TiB, and some tens of GiB where pages fault in one by one."""

MAX_SAMPLES = 2**16
"""Most residency samples kept of one run."""

UNKNOWN = -1
"""Tensor class and name of bytes that belong to no known tensor."""


class RecordKind(IntEnum):
    """What a record describes."""

    TO_DEVICE = 0
    TO_HOST = 1
    BETWEEN_DEVICES = 2
    GPU_FAULT = 3
    CPU_FAULT = 4
    MEMCPY = 5
    MEMSET = 6


TRANSFERS = (RecordKind.TO_DEVICE, RecordKind.TO_HOST, RecordKind.BETWEEN_DEVICES)

DIRECTION_OF_KIND: dict[RecordKind, Direction] = {
    RecordKind.TO_DEVICE: "to_device",
    RecordKind.TO_HOST: "to_host",
    RecordKind.BETWEEN_DEVICES: "between_devices",
}

CAUSE_OF_NUMBER: tuple[Cause, ...] = (
    "unknown",
    "hint",
    "fault",
    "speculation",
    "eviction",
    "counter",
)
"""Causes by CUPTI's number (``CUpti_ActivityUnifiedMemoryMigrationCause``). The driver uses
the same numbers."""


@dataclass(frozen=True, eq=False)
class MigrationRecords:
    """Unified-memory transfers, page faults, copies and memory sets: columns of N records."""

    kind: npt.NDArray[np.uint8]
    """:class:`RecordKind`."""
    start_ns: Integers
    end_ns: Integers
    """Times are on the recorder's clock; both are equal where the duration is unknown."""
    address: Integers
    """Of the first byte that moved, or of the page that faulted; 0 where there is none."""
    bytes: Integers
    """Moved, copied or set; 0 for faults."""
    faults: Integers
    cause: npt.NDArray[np.uint8]
    """Of transfers: index into :data:`CAUSE_OF_NUMBER`."""

    tensor_class: npt.NDArray[np.int8]
    """:attr:`umem.TensorClass.number` of what was touched, or :data:`UNKNOWN`."""
    tensor: npt.NDArray[np.int32]
    """Index of a tensor's name, or :data:`UNKNOWN`."""
    is_part: npt.NDArray[np.bool_]
    """A further part of a transfer, of another tensor than the part that counts as a transfer."""

    def __len__(self) -> int:
        return len(self.kind)

    def select(self, rows: npt.NDArray[Any]) -> MigrationRecords:
        """The rows that an index or a mask picks, in its order."""
        return MigrationRecords(*(column[rows] for column in vars(self).values()))

    def is_transfer(self) -> npt.NDArray[np.bool_]:
        """Which records are unified-memory transfers."""
        return self.kind <= RecordKind.BETWEEN_DEVICES

    def since(self, begin_ns: int) -> MigrationRecords:
        """The same records with times counted from `begin_ns`."""
        return replace(self, start_ns=self.start_ns - begin_ns, end_ns=self.end_ns - begin_ns)


RECORD_COLUMNS: dict[str, tuple[Any, int]] = {
    "kind": (np.uint8, 0),
    "start_ns": (np.int64, 0),
    "end_ns": (np.int64, 0),
    "address": (np.int64, 0),
    "bytes": (np.int64, 0),
    "faults": (np.int64, 0),
    "cause": (np.uint8, 0),
    "tensor_class": (np.int8, UNKNOWN),
    "tensor": (np.int32, UNKNOWN),
    "is_part": (np.bool_, 0),
}
"""Types and defaults of the columns."""


def make_records(count: int, **columns: Any) -> MigrationRecords:
    """Make records from columns, or one value for all records of a column; or their defaults."""
    made: list[Any] = [
        np.broadcast_to(columns.get(name, default), count).astype(dtype)
        for name, (dtype, default) in RECORD_COLUMNS.items()
    ]
    return MigrationRecords(*made)


def concatenate(chunks: Iterable[MigrationRecords]) -> MigrationRecords:
    """All records of several tables by start time; equal starts keep their order."""
    parts = [make_records(0), *chunks]
    merged = MigrationRecords(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in RECORD_COLUMNS)
    )
    return merged.select(np.argsort(merged.start_ns, kind="stable"))


@dataclass(frozen=True, eq=False)
class Residency:
    """Bytes on the device over a run. K samples.

    They come from the executor's accounts, which count a tensor as arrived when its move has been
    requested. The host runs ahead of the device, so the device reaches the same state a little
    later.
    """

    time_ns: Integers
    """Ascending, since the start of the recording, on the host's clock."""
    resident_bytes: Integers
    """int64[K, 6]: by class number, from this sample until the next one."""

    def peak_bytes(self) -> dict[TensorClass, int]:
        """The peak of each class; classes that never were on the device are left out."""
        peak = self.resident_bytes.max(axis=0, initial=0)
        return {it: int(peak[it.number]) for it in TensorClass if peak[it.number]}

    def total_peak_bytes(self) -> int:
        """The peak of all classes together."""
        return int(self.resident_bytes.sum(axis=1).max(initial=0))


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded run. N records, S steps. All times are nanoseconds since its start."""

    workload: str
    hardware: str
    policy: str
    """Names of what ran."""
    source: Source
    duration_ns: int
    records: MigrationRecords
    """By start."""
    tensor_names: tuple[str, ...]
    step_start_ns: Integers
    step_end_ns: Integers
    """int64[S]: of the marked steps, which follow each other."""
    dropped: int
    """Records that were lost."""
    notes: tuple[str, ...]
    """What a reader should know before trusting the figures."""
    ideal_s: float | None = None
    """Time of a step with everything resident, if known."""
    hints: tuple[HintReport | None, ...] = ()
    """Of each step, or of the whole recording where no step is marked; None for a step without a
    hint engine. Empty if there was no engine at all."""
    copies: tuple[tuple[Traffic, ...], ...] = ()
    """What umem itself copied in each step, or in the whole recording where no step is marked."""
    residency: Residency | None = None
    """None if no executor kept accounts."""

    @property
    def is_collected(self) -> bool:
        """Whether memory operations were recorded."""
        return self.source in ("driver", "driver_only", "cupti")

    @property
    def step_count(self) -> int:
        """Number of marked steps."""
        return len(self.step_start_ns)
