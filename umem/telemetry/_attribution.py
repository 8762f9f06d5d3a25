"""Whose bytes moved: from addresses to tensor classes and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from umem.telemetry._records import MigrationRecords, RecordKind

if TYPE_CHECKING:
    from umem.inspection import LiveTensor

__all__ = ["UNKNOWN", "Snapshot", "attribute", "blocks_hit", "snapshot_of"]

UNKNOWN = -1
"""Class and name of what hit no known tensor."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Blocks that were live at a moment, by address. B blocks that do not overlap.

    Parameters
    ----------
    time_ns : int
        The moment, on the clock of the records.
    start, end : int64[B]
        First address of each block, and the address after its last byte.
    tensor_class : int8[B]
        :attr:`umem.TensorClass.number`.
    name : int32[B]
        Index of a tensor's name, or :data:`UNKNOWN`.
    """

    time_ns: int
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    tensor_class: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]


def snapshot_of(
    tensors: Sequence[LiveTensor], time_ns: int, names: Mapping[int, int] | None = None
) -> Snapshot:
    """A snapshot of :func:`umem.tensors`.

    Parameters
    ----------
    tensors
        Live blocks, in any order.
    time_ns
        When they were asked for.
    names
        Number of the name of the tensor at an address.
    """
    blocks = sorted(tensors, key=lambda block: block.address)
    known = names or {}
    return Snapshot(
        time_ns,
        np.array([block.address for block in blocks], np.int64),
        np.array([block.address + block.block_bytes for block in blocks], np.int64),
        np.array([block.tensor_class.number for block in blocks], np.int8),
        np.array([known.get(block.address, UNKNOWN) for block in blocks], np.int32),
    )


def blocks_hit(
    snapshot: Snapshot, address: npt.NDArray[np.int64], size_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.intp]:
    """The block that each range of addresses hits first, or :data:`UNKNOWN`.

    Parameters
    ----------
    snapshot
        With B blocks.
    address, size_bytes : int64[R]
        Of ranges; a fault has size 0 and hits the block that holds its address.

    Returns
    -------
    intp[R]
        Index of a block.
    """
    count = len(snapshot.start)
    if count == 0:
        return np.full(len(address), UNKNOWN, np.intp)
    following = np.searchsorted(snapshot.start, address, side="right")
    holding = np.maximum(following - 1, 0)
    holds = (following > 0) & (address < snapshot.end[holding])
    # A transfer may begin in front of a small block that shares the page.
    next_one = np.minimum(following, count - 1)
    reaches = (following < count) & (snapshot.start[next_one] < address + size_bytes)
    return np.where(holds, holding, np.where(reaches, next_one, UNKNOWN))


def attribute(
    records: MigrationRecords, snapshots: Sequence[Snapshot]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Class and name of what each record touched.

    A record is looked up in the last snapshot before it; where it hits nothing there, or a block of
    the same class that has no name yet, in the next one after it. What was born and died between
    two snapshots stays unknown, as do copies and memory sets, whose records have no address.

    Parameters
    ----------
    records
        N records.
    snapshots
        By time, on the records' clock.

    Returns
    -------
    tensor_class : int8[N]
        :attr:`umem.TensorClass.number`, or :data:`UNKNOWN`.
    name : int32[N]
        Index of a name, or :data:`UNKNOWN`.
    """
    tensor_class = np.full(len(records), UNKNOWN, np.int8)
    name = np.full(len(records), UNKNOWN, np.int32)
    times = np.array([snapshot.time_ns for snapshot in snapshots], np.int64)
    following = np.searchsorted(times, records.start_ns, side="right")
    # In the order of the snapshots, so that those between two of them are a slice.
    located = np.flatnonzero(records.kind <= RecordKind.CPU_FAULT)
    located = located[np.argsort(following[located], kind="stable")]
    begins = np.searchsorted(following[located], np.arange(len(snapshots) + 2))
    # The closer rule last, so that it has the last word.
    for later in (0, 1):
        for index, snapshot in enumerate(snapshots):
            rows = located[begins[index + later] : begins[index + later + 1]]
            hit = blocks_hit(snapshot, records.address[rows], records.bytes[rows])
            _write(tensor_class, name, rows, hit, snapshot)
    return tensor_class, name


def _write(
    tensor_class: npt.NDArray[np.int8],
    name: npt.NDArray[np.int32],
    rows: npt.NDArray[Any],
    hit: npt.NDArray[np.intp],
    snapshot: Snapshot,
) -> None:
    rows, hit = rows[hit != UNKNOWN], hit[hit != UNKNOWN]
    # The names of an optimizer's state are known from its first step on: a later name stays.
    named = (snapshot.name[hit] != UNKNOWN) | (tensor_class[rows] != snapshot.tensor_class[hit])
    tensor_class[rows] = snapshot.tensor_class[hit]
    name[rows[named]] = snapshot.name[hit[named]]
