"""Memory operations of a run, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from umem.core.report import Cause, Direction

__all__ = [
    "CAUSE_OF_NUMBER",
    "DIRECTION_OF_KIND",
    "MAX_RECORDS",
    "TRANSFERS",
    "Columns",
    "MigrationRecords",
    "RecordKind",
    "Row",
    "concatenated",
    "records_of",
]

MAX_RECORDS = 2**21
"""Most records that are kept of one run. A transfer carries at most 2 MiB, so that they cover 4 TiB
at best and, where pages fault in one by one, some tens of GiB."""


class RecordKind(IntEnum):
    """What a record is of. Saved profiles hold the numbers."""

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
"""By CUPTI's number of the cause of a migration (``CUpti_ActivityUnifiedMemoryMigrationCause``),
which Nsight Systems exports as it is."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Base of tables, whose fields are columns of one length."""

    def taken(self, which: npt.NDArray[Any]) -> Self:
        """The rows that an index or a mask picks, in its order."""
        return type(self)(*(getattr(self, column.name)[which] for column in fields(self)))


@dataclass(frozen=True, eq=False)
class MigrationRecords(Columns):
    """Unified-memory transfers, page faults, copies and memory sets. N records.

    Parameters
    ----------
    kind : uint8[N]
        :class:`RecordKind`.
    start_ns, end_ns : int64[N]
        On the clock of whoever recorded; equal where no duration is known.
    address : int64[N]
        Of the first byte that moved, or the page that faulted; 0 where there is none.
    bytes : int64[N]
        Moved, copied or set; 0 for faults.
    faults : int64[N]
        Faults on the page, for records of faults.
    cause : uint8[N]
        Of transfers: index into :data:`CAUSE_OF_NUMBER`.
    access : uint8[N]
        Of faults: 0 unknown, 1 read, 2 write, 3 atomic, 4 prefetch
        (``CUpti_ActivityUnifiedMemoryAccessType``).
    copy_kind : uint8[N]
        Of copies: 1 host to device, 2 device to host, 8 within a device, and so on
        (``CUpti_ActivityMemcpyKind``).
    """

    kind: npt.NDArray[np.uint8]
    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    address: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    faults: npt.NDArray[np.int64]
    cause: npt.NDArray[np.uint8]
    access: npt.NDArray[np.uint8]
    copy_kind: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.kind)

    def is_transfer(self) -> npt.NDArray[np.bool_]:
        """Which records are unified-memory transfers."""
        return self.kind <= RecordKind.BETWEEN_DEVICES


Row = tuple[int, int, int, int, int, int, int, int, int]
"""One record, in the order of the columns."""


def records_of(rows: Sequence[Row] | npt.NDArray[np.int64]) -> MigrationRecords:
    """Columns of rows, or of a table with one column for each field."""
    table = np.asarray(rows, np.int64).reshape(-1, 9)
    return MigrationRecords(
        kind=table[:, 0].astype(np.uint8),
        start_ns=table[:, 1].copy(),
        end_ns=table[:, 2].copy(),
        address=table[:, 3].copy(),
        bytes=table[:, 4].copy(),
        faults=table[:, 5].copy(),
        cause=table[:, 6].astype(np.uint8),
        access=table[:, 7].astype(np.uint8),
        copy_kind=table[:, 8].astype(np.uint8),
    )


def concatenated(chunks: Iterable[MigrationRecords]) -> MigrationRecords:
    """All records of several, by their start; those that start together keep their order."""
    parts = [records_of([]), *chunks]
    everything = MigrationRecords(
        *(
            np.concatenate([getattr(part, column.name) for part in parts])
            for column in fields(MigrationRecords)
        )
    )
    return everything.taken(np.argsort(everything.start_ns, kind="stable"))
