"""Attributes records to tensors: from addresses to tensor classes and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from umem.core.block_sizes import LARGE_BYTES
from umem.telemetry.records import (
    UNKNOWN,
    Integers,
    MigrationRecords,
    RecordKind,
    concatenate,
    make_records,
)

if TYPE_CHECKING:
    from umem.runtime.inspection import LiveTensor

__all__ = ["Snapshot", "attribute", "blocks_hit", "snapshot_of"]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The allocator's live blocks at one moment, by address. They do not overlap."""

    time_ns: int
    """On the clock of the records."""
    start: Integers
    end: Integers
    """The address after the last byte."""
    tensor_class: npt.NDArray[np.int8]
    """:attr:`umem.TensorClass.number`."""
    name: npt.NDArray[np.int32]
    """Index of a tensor's name, or :data:`UNKNOWN`."""


def snapshot_of(
    tensors: Sequence[LiveTensor], time_ns: int, names: Mapping[int, int] | None = None
) -> Snapshot:
    """Make a snapshot of live blocks, in any order; `names` has numbers of names by address."""
    blocks = sorted(tensors, key=lambda block: block.address)
    known = names or {}
    return Snapshot(
        time_ns,
        np.array([block.address for block in blocks], np.int64),
        np.array([block.address + block.block_bytes for block in blocks], np.int64),
        np.array([block.tensor_class.number for block in blocks], np.int8),
        np.array([known.get(block.address, UNKNOWN) for block in blocks], np.int32),
    )


def blocks_hit(snapshot: Snapshot, address: Integers, size_bytes: Integers) -> npt.NDArray[np.intp]:
    """Index of the first block that each address range overlaps, or :data:`UNKNOWN`.

    A fault has size 0 and hits the block that holds its address.
    """
    count = len(snapshot.start)
    if count == 0:
        return np.full(len(address), UNKNOWN, np.intp)
    following = np.searchsorted(snapshot.start, address, side="right")
    holding = np.maximum(following - 1, 0)
    holds = (following > 0) & (address < snapshot.end[holding])
    # A transfer may begin before a small block that shares the page.
    next_one = np.minimum(following, count - 1)
    reaches = (following < count) & (snapshot.start[next_one] < address + size_bytes)
    return np.where(holds, holding, np.where(reaches, next_one, UNKNOWN))


def attribute(records: MigrationRecords, snapshots: Sequence[Snapshot]) -> MigrationRecords:
    """Find class and name of the tensor that each record touched; snapshots are by time.

    A record is looked up in the last snapshot before it. If it hits nothing there, or a block of
    the same class without a name, the next snapshot decides. Blocks that live between two snapshots
    stay unknown, as do copies and memory sets, whose records have no address.

    A transfer across the ends of large blocks becomes one record for each tensor, with bytes and
    time in proportion; the first counts as the transfer. Small blocks share their pages, which move
    for any of them: the first one hit gets all bytes.
    """
    whole = _first_hits(records, snapshots)
    parts, of = _split_at_large_blocks(records, snapshots)
    parts = _first_hits(parts, snapshots)
    keys = np.stack([of, parts.tensor_class, parts.tensor], axis=1).astype(np.int64)
    keys, which = np.unique(keys, axis=0, return_inverse=True)
    size = np.zeros(len(keys), np.int64)
    np.add.at(size, which.ravel(), parts.bytes)
    of, tensor_class, tensor = keys.T
    is_own = (tensor_class == whole.tensor_class[of]) & (tensor == whole.tensor[of])
    order = np.lexsort((~is_own, of))
    of, size = of[order], size[order]
    is_part = np.diff(of, prepend=-1) == 0
    total_ns = whole.end_ns - whole.start_ns
    time_ns = (total_ns[of] * (size / whole.bytes[of])).astype(np.int64)
    # The first part has what rounding leaves.
    np.subtract.at(total_ns, of[is_part], time_ns[is_part])
    time_ns[~is_part] = total_ns[of[~is_part]]
    cut = replace(
        whole.select(of),
        end_ns=whole.start_ns[of] + time_ns,
        bytes=size,
        tensor_class=tensor_class[order].astype(np.int8),
        tensor=tensor[order].astype(np.int32),
        is_part=is_part,
    )
    return concatenate((whole.select(~np.isin(np.arange(len(records)), of)), cut))


def _first_hits(records: MigrationRecords, snapshots: Sequence[Snapshot]) -> MigrationRecords:
    """The records with class and name of the tensor that each touched first."""
    tensor_class = np.full(len(records), UNKNOWN, np.int8)
    name = np.full(len(records), UNKNOWN, np.int32)
    between = _rows_between(
        records, np.flatnonzero(records.kind <= RecordKind.CPU_FAULT), snapshots
    )
    # First the snapshot after a record, then the one before it, whose result replaces the first.
    for later in (0, 1):
        for index, snapshot in enumerate(snapshots):
            rows = between[index + later]
            hit = blocks_hit(snapshot, records.address[rows], records.bytes[rows])
            rows, hit = rows[hit != UNKNOWN], hit[hit != UNKNOWN]
            found = snapshot.tensor_class[hit]
            # Optimizer state has names only after its first step: keep a name found later.
            named = (snapshot.name[hit] != UNKNOWN) | (tensor_class[rows] != found)
            tensor_class[rows] = found
            name[rows[named]] = snapshot.name[hit[named]]
    return replace(records, tensor_class=tensor_class, tensor=name)


def _rows_between(
    records: MigrationRecords, rows: npt.NDArray[np.intp], snapshots: Sequence[Snapshot]
) -> list[npt.NDArray[np.intp]]:
    """Those of the rows that are before the first snapshot, between two, and after the last."""
    times = np.array([snapshot.time_ns for snapshot in snapshots], np.int64)
    following = np.searchsorted(times, records.start_ns[rows], side="right")
    order = np.argsort(following, kind="stable")
    begins = np.searchsorted(following[order], np.arange(1, len(snapshots) + 1))
    return np.split(rows[order], begins)


def _split_at_large_blocks(
    records: MigrationRecords, snapshots: Sequence[Snapshot]
) -> tuple[MigrationRecords, npt.NDArray[np.intp]]:
    """Parts of the transfers in which a large block begins or ends, and the record of each part.

    Blocks are those of the snapshots before and after the transfer. Parts are ordered by record and
    address.
    """
    if not snapshots:
        return make_records(0), np.zeros(0, np.intp)
    edges = [_large_edges(snapshot) for snapshot in snapshots]
    record, begin = [np.zeros(0, np.intp)], [np.zeros(0, np.int64)]
    between = _rows_between(records, np.flatnonzero(records.is_transfer()), snapshots)
    for index, rows in enumerate(between):
        if not len(rows):
            continue
        near = np.unique(np.concatenate(edges[max(index - 1, 0) : index + 1]))
        address = records.address[rows]
        first = np.searchsorted(near, address, side="right")
        count = np.searchsorted(near, address + records.bytes[rows], side="left") - first
        count = np.maximum(count, 0)  # an empty transfer at an edge would give -1
        within = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        is_cut = count > 0
        record += [rows[is_cut], np.repeat(rows, count)]
        begin += [address[is_cut], near[np.repeat(first, count) + within]]
    of, start = np.concatenate(record), np.concatenate(begin)
    order = np.lexsort((start, of))
    of, start = of[order], start[order]
    end = records.address[of] + records.bytes[of]
    continues = of[1:] == of[:-1]
    end[:-1][continues] = start[1:][continues]
    return replace(records.select(of), address=start, bytes=end - start), of


def _large_edges(snapshot: Snapshot) -> Integers:
    is_large = snapshot.end - snapshot.start >= LARGE_BYTES
    return np.concatenate([snapshot.start[is_large], snapshot.end[is_large]])
