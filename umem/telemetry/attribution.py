"""Whose bytes moved: from addresses to tensor classes and names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from umem.core.block_sizes import LARGE_BYTES
from umem.core.errors import EnableError
from umem.telemetry.records import MigrationRecords, RecordKind

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from umem.core.classes import TensorClass
    from umem.runtime.hints import HintStatistics
    from umem.runtime.inspection import LiveTensor

__all__ = [
    "UNKNOWN",
    "Shares",
    "Snapshot",
    "attribute",
    "blocks_hit",
    "current_residency",
    "current_statistics",
    "device_name",
    "ideal_step_s",
    "live_blocks",
    "name_numbers",
    "no_shares",
    "policy_name",
    "snapshot_of",
]

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


@dataclass(frozen=True, eq=False)
class Shares:
    """What transfers carried of other tensors than the one that their record is of. M shares.

    A record is of up to 2 MiB of addresses, and the ends of large blocks lie anywhere in them.

    Parameters
    ----------
    record : int64[M]
        Index of the transfer, ascending.
    bytes : int64[M]
        Of the transfer's bytes, at least 1. What its shares leave is of the record's own tensor.
    tensor_class : int8[M]
        :attr:`umem.TensorClass.number`, or :data:`UNKNOWN` for what was no tensor's.
    tensor : int32[M]
        Index of a tensor's name, or :data:`UNKNOWN`.
    """

    record: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    tensor_class: npt.NDArray[np.int8]
    tensor: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.record)


def no_shares() -> Shares:
    """Of records each of which is of one tensor."""
    return Shares(
        np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int8), np.zeros(0, np.int32)
    )


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
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32], Shares]:
    """Class and name of what each record touched first, and what transfers carried besides.

    A record is looked up in the last snapshot before it; where it hits nothing there, or a block of
    the same class that has no name yet, in the next one after it. What was born and died between
    two snapshots stays unknown, as do copies and memory sets, whose records have no address.

    A transfer across the ends of large blocks is looked up part by part. Small blocks share their
    pages, which move for the sake of any of them: the first one that a transfer hits has all.

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
    shares : Shares
        Parts of transfers that are of another tensor.
    """
    tensor_class, name = _first_hits(records, snapshots)
    parts, record = _parts_at_edges(records, snapshots)
    part_class, part_name = _first_hits(parts, snapshots)
    is_other = (part_class != tensor_class[record]) | (part_name != name[record])
    rest = Shares(
        record[is_other], parts.bytes[is_other], part_class[is_other], part_name[is_other]
    )
    return tensor_class, name, _joined(rest)


def _first_hits(
    records: MigrationRecords, snapshots: Sequence[Snapshot]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    tensor_class = np.full(len(records), UNKNOWN, np.int8)
    name = np.full(len(records), UNKNOWN, np.int32)
    between = _between(records, np.flatnonzero(records.kind <= RecordKind.CPU_FAULT), snapshots)
    # The closer rule last, so that it has the last word.
    for later in (0, 1):
        for index, snapshot in enumerate(snapshots):
            rows = between[index + later]
            hit = blocks_hit(snapshot, records.address[rows], records.bytes[rows])
            _write(tensor_class, name, rows, hit, snapshot)
    return tensor_class, name


def _between(
    records: MigrationRecords, rows: npt.NDArray[np.intp], snapshots: Sequence[Snapshot]
) -> list[npt.NDArray[np.intp]]:
    """Those of the rows that are before the first snapshot, between two, and after the last."""
    times = np.array([snapshot.time_ns for snapshot in snapshots], np.int64)
    following = np.searchsorted(times, records.start_ns[rows], side="right")
    order = np.argsort(following, kind="stable")
    begins = np.searchsorted(following[order], np.arange(1, len(snapshots) + 1))
    return np.split(rows[order], begins)


def _parts_at_edges(
    records: MigrationRecords, snapshots: Sequence[Snapshot]
) -> tuple[MigrationRecords, npt.NDArray[np.intp]]:
    """Parts of the transfers in which a large block begins or ends, and the record of each.

    Blocks are those of the snapshots before and after the transfer. Parts are by record and
    address.
    """
    edges = [_large_edges(snapshot) for snapshot in snapshots]
    record, begin = [np.zeros(0, np.intp)], [np.zeros(0, np.int64)]
    between = _between(records, np.flatnonzero(records.is_transfer()), snapshots)
    for index, rows in enumerate(between):
        if not len(rows) or not edges:
            continue
        near = np.unique(np.concatenate(edges[max(index - 1, 0) : index + 1]))
        address = records.address[rows]
        first = np.searchsorted(near, address, side="right")
        count = np.searchsorted(near, address + records.bytes[rows], side="left") - first
        count = np.maximum(count, 0)  # what carried nothing ends before the edge it is at
        within = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        is_cut = count > 0
        record += [rows[is_cut], np.repeat(rows, count)]
        begin += [address[is_cut], near[np.repeat(first, count) + within]]
    of, start = np.concatenate(record), np.concatenate(begin)
    order = np.lexsort((start, of))
    of, start = of[order], start[order]
    end = records.address[of] + records.bytes[of]
    goes_on = of[1:] == of[:-1]
    end[:-1][goes_on] = start[1:][goes_on]
    return replace(records.taken(of), address=start, bytes=end - start), of


def _large_edges(snapshot: Snapshot) -> npt.NDArray[np.int64]:
    is_large = snapshot.end - snapshot.start >= LARGE_BYTES
    return np.concatenate([snapshot.start[is_large], snapshot.end[is_large]])


def _joined(shares: Shares) -> Shares:
    """Shares with neighbours of one record and one tensor as one."""
    if not len(shares):
        return no_shares()
    columns = (shares.record, shares.tensor_class, shares.tensor)
    is_new = np.ones(len(shares), np.bool_)
    is_new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    first = np.flatnonzero(is_new)
    return Shares(
        shares.record[first],
        np.add.reduceat(shares.bytes, first),
        shares.tensor_class[first],
        shares.tensor[first],
    )


def _write(
    tensor_class: npt.NDArray[np.int8],
    name: npt.NDArray[np.int32],
    rows: npt.NDArray[np.intp],
    hit: npt.NDArray[np.intp],
    snapshot: Snapshot,
) -> None:
    rows, hit = rows[hit != UNKNOWN], hit[hit != UNKNOWN]
    # The names of an optimizer's state are known from its first step on: a later name stays.
    named = (snapshot.name[hit] != UNKNOWN) | (tensor_class[rows] != snapshot.tensor_class[hit])
    tensor_class[rows] = snapshot.tensor_class[hit]
    name[rows[named]] = snapshot.name[hit[named]]


# What a profile asks of the run: its blocks, the names of its tensors, its device and policy.


def live_blocks() -> Sequence[LiveTensor] | None:
    """What :func:`umem.tensors` says, or None where umem is not enabled."""
    from umem.runtime.inspection import tensors

    with suppress(EnableError):
        return tensors()
    return None


def policy_name() -> str:
    """Name of the policy in use, or ``none``."""
    from umem.runtime.state import is_enabled, runtime

    return runtime().policy.name if is_enabled() else "none"


def device_name() -> str:
    """Name of the current GPU as torch tells it."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else "no GPU"


def name_numbers(
    model: nn.Module | None, optimizers: Sequence[Optimizer], names: dict[str, int]
) -> dict[int, int]:
    """Number of the name of the tensor that begins at an address.

    Parameters
    ----------
    model
        Whose parameters, gradients and state have names.
    optimizers
        Those that hold the state.
    names
        Numbers of names; new ones are added.
    """
    from umem.runtime.model_parts import storage_addresses

    numbers: dict[int, int] = {}
    for name, tensor in () if model is None else _named_tensors(model, optimizers):
        for address in storage_addresses(tensor):
            numbers.setdefault(address, names.setdefault(name, len(names)))
    return numbers


def _named_tensors(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    from umem.runtime.model_parts import optimizer_parameters, optimizer_state, parameter_names

    names = parameter_names(model.named_parameters(), optimizer_parameters(*optimizers))
    for parameter, name in names.items():
        yield name, parameter
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad
    for optimizer in optimizers:
        yield from optimizer_state(optimizer, names)


def current_statistics() -> HintStatistics | None:
    """Counts of the hint engine that the executor drives, or None where none is at work."""
    found: HintStatistics | None = _from_executor("current_statistics")
    return found


def current_residency() -> Mapping[TensorClass, int] | None:
    """Bytes on the device by class, by the executor's books, or None where it keeps none."""
    found: Mapping[TensorClass, int] | None = _from_executor("residency")
    return found


def ideal_step_s() -> float | None:
    """Time of a step with everything resident, of the step that the executor runs, or None."""
    found: float | None = _from_executor("ideal_step_s")
    return found


def _from_executor(name: str) -> Any:
    # It is at work only if somebody has imported it: a profile must not.
    function = getattr(sys.modules.get("umem.executor"), name, None)
    with suppress(EnableError):
        return None if function is None else function()
    return None
