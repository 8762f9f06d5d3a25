"""From steps that were looked at and timed to a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umem.blocks import block_bytes
from umem.classes import TensorClass
from umem.recorder._memory import OptimizerPart, StepLook, note_access
from umem.recorder._phases import JoinedPhases
from umem.recorder._saved_tensor import Save, SavedTensor
from umem.recorder._temporaries import LEAST_BYTES, temporary_bytes
from umem.trace import Access, PhaseKind, Precision, Trace, check_trace, ranges
from umem.trace._storages import BEFORE, Storage

__all__ = ["build_trace"]


@dataclass(frozen=True)
class _Column:
    """A tensor of the trace."""

    name: str
    nbytes: int
    tensor_class: TensorClass
    first: int
    last: int
    is_persistent: bool = False


def build_trace(
    look: StepLook,
    joined: JoinedPhases,
    seconds: Sequence[Sequence[float]],
    *,
    name: str,
    source: str,
    metadata: Mapping[str, str | int | float],
    optimizer_parts: bool,
) -> tuple[Trace, tuple[SavedTensor, ...]]:
    """Join what a step did to memory with how long its phases took.

    Parameters
    ----------
    look
        The phases that were followed, of which the last one is the optimizer's.
    joined
        Which of them are one.
    seconds
        Of each joined phase, its durations in the steps that have timed it; the medians count.
    name, source, metadata
        For :class:`umem.trace.Trace`.
    optimizer_parts
        Whether the optimizer's phase is split into its parts, whose durations are in proportion to
        the bytes that they use.

    Returns
    -------
    Trace
        With durations and no FLOPs.
    tuple of SavedTensor
        What autograd saved in the blocks' calls.
    """
    parts = look.optimizer_parts if optimizer_parts else _one_part(look.optimizer_parts)
    parts = parts or (OptimizerPart("", {}),)
    count = len(joined.labels) - 1
    labels = (*joined.labels[:-1], *(f"{joined.labels[-1]} {p.name}".rstrip() for p in parts))
    accesses: list[dict[int, Access]] = [{} for _ in range(count)]
    for phase, used in enumerate(look.accesses[:-1]):
        for number, access in used.items():
            note_access(accesses[joined.numbers[phase]], number, access)
    accesses += [dict(part.accesses) for part in parts]
    touched = np.array([_touched_bytes(phase, look.storages) for phase in accesses], np.int64)

    columns, position = _find_columns(look.storages, joined.numbers, len(labels) - 1)
    all_accesses = [
        [(position[number], mode) for number, mode in sorted(phase.items())] for phase in accesses
    ]
    if look.peak_bytes:
        for column in _find_temporaries(look, joined, columns, labels):
            all_accesses[column.first].append((len(columns), Access.WRITE))
            columns.append(column)
    medians = np.array([np.median(durations) for durations in seconds])
    shares = touched[count:] / touched[count:].sum() if touched[count:].any() else np.ones(1)
    trace = Trace(
        name=name,
        source=source,
        tensor_names=tuple(column.name for column in columns),
        tensor_bytes=np.array([column.nbytes for column in columns], np.int64),
        tensor_class=np.array([column.tensor_class.number for column in columns], np.uint8),
        persistent=np.array([column.is_persistent for column in columns], np.bool_),
        first_phase=np.array([column.first for column in columns], np.int32),
        last_phase=np.array([column.last for column in columns], np.int32),
        phase_names=labels,
        phase_kind=np.full(len(labels), PhaseKind.KERNEL, np.uint8),
        phase_precision=np.full(len(labels), Precision.FP32, np.uint8),
        flops=np.zeros(len(labels)),
        memory_bytes=touched,
        duration_s=np.concatenate([medians[:-1], medians[-1] * shares]),
        access_start=ranges(np.array([len(phase) for phase in all_accesses], np.int64)),
        access_tensor=np.array([tensor for phase in all_accesses for tensor, _ in phase], np.int32),
        access_mode=np.array([mode for phase in all_accesses for _, mode in phase], np.uint8),
        metadata=metadata,
    )
    check_trace(trace, name)
    return trace, tuple(_find_saved(look.saves, columns, position))


def _one_part(parts: Sequence[OptimizerPart]) -> tuple[OptimizerPart, ...]:
    used: dict[int, Access] = {}
    for part in parts:
        used.update(part.accesses)  # tied parameters are written by every part that has them
    return (OptimizerPart("", used),)


def _find_columns(
    storages: Sequence[Storage], numbers: NDArray[np.int64], last_phase: int
) -> tuple[list[_Column], dict[int, int]]:
    """Tensors of the trace, and where each storage is among them."""
    last = len(numbers) - 1
    columns: list[_Column] = []
    position: dict[int, int] = {}
    for number, storage in enumerate(storages):
        first, final, is_persistent = _lifetime(storage, last)
        if first <= final:
            position[number] = len(columns)
            columns.append(
                _Column(
                    storage.name,
                    storage.bytes,
                    storage.tensor_class,
                    int(numbers[first]),
                    last_phase if final == last else int(numbers[final]),
                    is_persistent,
                )
            )
    return columns, position


def _find_temporaries(
    look: StepLook, joined: JoinedPhases, columns: Sequence[_Column], labels: Sequence[str]
) -> Iterator[_Column]:
    """One tensor for what each phase holds beside the others; the optimizer's lives to the end."""
    sizes = block_bytes(np.array([column.nbytes for column in columns], np.int64))
    change = np.zeros(len(labels) + 1, np.int64)
    np.add.at(change, [column.first for column in columns], sizes)
    np.add.at(change, [column.last + 1 for column in columns], -sizes)
    found = temporary_bytes(look, joined.numbers, change.cumsum()[:-1])
    optimizer = len(joined.labels) - 1
    for phase in np.flatnonzero(found > LEAST_BYTES).tolist():
        is_optimizer = phase == optimizer
        yield _Column(
            f"temporary of {joined.labels[phase]}",
            int(found[phase]),
            TensorClass.ACTIVATIONS,
            phase,
            len(labels) - 1 if is_optimizer else phase,
        )


def _find_saved(
    saves: Iterable[Save], columns: Sequence[_Column], position: Mapping[int, int]
) -> Iterator[SavedTensor]:
    for save in saves:
        tensor = position.get(save.storage)
        if tensor is not None and columns[tensor].tensor_class is TensorClass.ACTIVATIONS:
            yield SavedTensor(save.block, save.call, save.ordinal, tensor, columns[tensor].nbytes)


def _lifetime(storage: Storage, last: int) -> tuple[int, int, bool]:
    """First and last phase of a storage, and whether it lives from step to step."""
    final = last if storage.died is None else min(storage.died - 1, last)
    if storage.born != BEFORE:
        return storage.born, max(final, storage.born), False
    # What the step before left, and this one reads before it lets go of it, is carried over.
    is_carried = storage.first_access is not None and Access.READ in storage.first_access
    if storage.died is None or is_carried:
        return 0, last, True
    return 0, final, False


def _touched_bytes(accesses: Mapping[int, Access], storages: Sequence[Storage]) -> int:
    """Bytes that a phase reads and writes, each tensor as a whole."""
    return sum(
        storages[number].bytes * ((Access.READ in mode) + (Access.WRITE in mode))
        for number, mode in accesses.items()
    )
