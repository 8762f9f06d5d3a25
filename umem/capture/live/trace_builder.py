"""Makes a trace from a tracked step and the times of its phases."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umem.capture.live.memory_tracker import StepMemory, note_access
from umem.capture.live.saved_tensors import SavedTensor, StorageSave
from umem.capture.storages import Lifetime, Phase, Storage, build_trace, lifetime
from umem.core.block_sizes import block_bytes
from umem.core.classes import TensorClass
from umem.trace import Access, Trace

__all__ = ["JoinedPhases", "TrackedPhase", "build_step_trace", "join_phases", "outside_bytes"]

_MIN_TEMPORARY_BYTES = 1 << 20
"""Smaller temporaries are left out of the trace."""


@dataclass(frozen=True)
class TrackedPhase:
    """A phase that a :class:`StepListener` gets a report of, and where the trace has it."""

    label: str
    phase: int
    """Index in the trace's phases; of the optimizer's first one for "optimizer"."""


@dataclass(frozen=True)
class JoinedPhases:
    """The tracked phases of a step, some of them joined to their neighbours."""

    numbers: NDArray[np.int64]
    """``int64[L]``: number of the joined phase of each tracked phase, from 0 without holes."""
    labels: tuple[str, ...]

    @property
    def begins(self) -> tuple[bool, ...]:
        """For each tracked phase whether a joined phase begins with it."""
        return tuple((np.diff(self.numbers, prepend=-1) > 0).tolist())


def join_phases(memory: StepMemory, gaps: Collection[str]) -> JoinedPhases:
    """Join phases that use nothing of their own to their neighbours.

    `gaps` are the labels of what the model does between blocks: such a phase joins the one before
    it. Where a checkpoint recomputes a block, the block's backward phase up to there, and a gap
    before it, join the phase that recomputes. The last phase, the optimizer's, stays.
    """
    labels, last = memory.labels, len(memory.labels) - 1
    joins_before = np.array(
        [
            0 < phase < last and label in gaps and not memory.accesses[phase]
            for phase, label in enumerate(labels)
        ]
    )
    joins_after = np.array(
        [
            following.startswith("recompute ")
            and (label in gaps or label == "backward " + following.removeprefix("recompute "))
            for label, following in zip(labels, [*labels[1:], ""], strict=True)
        ]
    )
    stays = ~joins_before & ~joins_after
    # A phase that joins the next one has the number of the next one that stays.
    numbers: NDArray[np.int64] = np.cumsum(stays) - 1 + joins_after
    return JoinedPhases(numbers, tuple(labels[phase] for phase in np.flatnonzero(stays)))


def build_step_trace(
    memory: StepMemory,
    joined: JoinedPhases,
    seconds: Sequence[Sequence[float]],
    *,
    name: str,
    source: str,
    metadata: Mapping[str, str | int | float],
    optimizer_parts: bool,
) -> tuple[Trace, tuple[SavedTensor, ...]]:
    """Make the trace of a step, with durations and no FLOPs, and list what autograd saved in it.

    `seconds` has for each joined phase its durations in the steps that have timed it; the medians
    count. With `optimizer_parts` the optimizer's phase is split by block; the parts share its
    duration by their bytes.
    """
    parts = memory.optimizer_parts
    if not optimizer_parts or not parts:
        # Each part that has tied parameters writes them.
        parts = {"": {number: mode for part in parts.values() for number, mode in part.items()}}
    optimizer = len(joined.labels) - 1
    accesses: list[dict[int, Access]] = [{} for _ in range(optimizer)]
    for phase, used in enumerate(memory.accesses[:-1]):
        for number, access in used.items():
            note_access(accesses[joined.numbers[phase]], number, access)
    accesses += map(dict, parts.values())
    labels = (*joined.labels[:-1], *(f"{joined.labels[-1]} {name}".rstrip() for name in parts))

    storages = list(memory.storages)
    touched = np.array([_touched_bytes(phase, storages) for phase in accesses], np.int64)
    lifetimes = [_joined_lifetime(storage, joined, len(labels)) for storage in storages]
    if memory.peak_bytes:
        for phase, nbytes in _find_temporaries(memory, joined, lifetimes, len(labels)):
            accesses[phase][len(storages)] = Access.WRITE
            temporary = f"temporary of {joined.labels[phase]}"
            storages.append(Storage(temporary, nbytes, TensorClass.ACTIVATIONS, phase))
            lifetimes.append((phase, len(labels) - 1 if phase == optimizer else phase, False))
    medians = np.array([np.median(durations) for durations in seconds])
    shares = np.ones(1)
    if touched[optimizer:].any():
        shares = touched[optimizer:] / touched[optimizer:].sum()
    trace, index = build_trace(
        storages,
        lifetimes,
        [Phase(*phase) for phase in zip(labels, touched.tolist(), accesses, strict=True)],
        name=name,
        source=source,
        metadata=metadata,
        duration_s=np.concatenate([medians[:-1], medians[-1] * shares]),
    )
    return trace, tuple(_find_saved(memory.saves, storages, index))


def _joined_lifetime(storage: Storage, joined: JoinedPhases, phase_count: int) -> Lifetime:
    """Lifetime in phases of the trace; the optimizer's last one stands for all of its parts."""
    count = len(joined.numbers)
    first, last, is_persistent = lifetime(storage, count)
    if first > last:
        return first, last, is_persistent
    end = phase_count - 1 if last == count - 1 else int(joined.numbers[last])
    return int(joined.numbers[first]), end, is_persistent


def _touched_bytes(accesses: Mapping[int, Access], storages: Sequence[Storage]) -> int:
    """Bytes that a phase reads and writes, each storage as a whole."""
    return sum(
        storages[number].bytes * ((Access.READ in mode) + (Access.WRITE in mode))
        for number, mode in accesses.items()
    )


def _find_saved(
    saves: Iterable[StorageSave], storages: Sequence[Storage], index: Mapping[int, int]
) -> Iterator[SavedTensor]:
    for save in saves:
        storage = storages[save.storage]
        if save.storage in index and storage.tensor_class is TensorClass.ACTIVATIONS:
            tensor = index[save.storage]
            yield SavedTensor(save.block, save.call, save.ordinal, tensor, storage.bytes)


def _find_temporaries(
    memory: StepMemory, joined: JoinedPhases, lifetimes: Sequence[Lifetime], phase_count: int
) -> Iterator[tuple[int, int]]:
    """Phase and bytes that its operators hold beyond the trace's tensors, at the worst moment.

    Only phases with more than the least worth recording. Memory outside of the step, such as
    another model's, does not count.
    """
    sizes = _block_bytes(memory.storages)
    change = np.zeros(phase_count + 1, np.int64)
    for (first, last, _), size in zip(lifetimes, sizes, strict=True):
        if first <= last:
            change[first] += size
            change[last + 1] -= size
    peaks = np.zeros(phase_count, np.int64)
    np.maximum.at(peaks, joined.numbers, np.array(memory.peak_bytes, np.int64))
    found = peaks - change.cumsum()[:-1] - _unknown_bytes(memory).min()
    for phase in np.flatnonzero(found > _MIN_TEMPORARY_BYTES).tolist():
        yield phase, int(found[phase])


def outside_bytes(memory: StepMemory) -> int:
    """Bytes that are allocated all the step long and belong to none of its tensors.

    Such as another model's. 0 where no allocator reports them.
    """
    return max(int(_unknown_bytes(memory).min()), 0) if memory.start_bytes else 0


def _unknown_bytes(memory: StepMemory) -> NDArray[np.int64]:
    """Bytes allocated at the begin of each phase that are in none of the step's storages."""
    change = np.zeros(len(memory.start_bytes) + 1, np.int64)
    for storage, size in zip(memory.storages, _block_bytes(memory.storages), strict=True):
        # A storage born in one phase is there when the next one begins; `died` is the phase after
        # the one in which it is freed.
        change[storage.born + 1] += size
        if storage.died is not None:
            change[max(storage.died, storage.born + 1)] -= size
    return np.array(memory.start_bytes, np.int64) - change.cumsum()[:-1]


def _block_bytes(storages: Sequence[Storage]) -> NDArray[np.int64]:
    return block_bytes(np.array([storage.bytes for storage in storages], np.int64))
