"""The trace of one training step: tensors, and the ordered phases that read and write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from umem.core.errors import TraceError

__all__ = ["OPTIMIZER", "Access", "PhaseKind", "Precision", "Trace", "ranges", "require_durations"]

OPTIMIZER = "optimizer"
"""First word in the names of an optimizer's phases."""


class Access(IntFlag):
    """How a phase uses a tensor.

    A phase that only writes a tensor overwrites it as a whole: its old contents are dead.
    """

    READ = 1
    WRITE = 2


class PhaseKind(IntEnum):
    """Kind of operation on the device, as a profiler's memory summary distinguishes them."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2


class Precision(IntEnum):
    """Precision of a phase's arithmetic, for the roofline."""

    FP32 = 0
    TF32 = 1
    FP16 = 2
    BF16 = 3
    FP8 = 4


@dataclass(frozen=True, eq=False)
class Trace:
    """One training step, which repeats.

    Columns are read-only NumPy arrays: first those of T tensors, then of P phases, then of A
    accesses. Phases are in the order of the compute stream. The accesses of phase p are
    ``access_start[p]:access_start[p + 1]``, each tensor at most once.
    """

    name: str
    """Workload, such as ``llama-2-7b-sft``."""
    source: str
    """Origin of the trace."""
    tensor_names: tuple[str, ...]
    tensor_bytes: npt.NDArray[np.int64]
    """Sizes, above 0."""
    tensor_class: npt.NDArray[np.uint8]
    """:attr:`umem.core.classes.TensorClass.number`."""
    persistent: npt.NDArray[np.bool_]
    """The tensor lives from step to step; others are born and die within the step."""
    first_phase: npt.NDArray[np.int32]
    last_phase: npt.NDArray[np.int32]
    """Phases, inclusive, in which the tensor's memory is allocated; 0 and P - 1 for persistent
    ones. Every access lies between them."""
    phase_names: tuple[str, ...]
    phase_kind: npt.NDArray[np.uint8]
    """:class:`PhaseKind`."""
    phase_precision: npt.NDArray[np.uint8]
    """:class:`Precision`."""
    flops: npt.NDArray[np.float64]
    """Floating-point operations of each phase, 0 where none were counted."""
    memory_bytes: npt.NDArray[np.int64]
    """Bytes that the phase reads and writes in memory, by the sizes of its arguments."""
    duration_s: npt.NDArray[np.float64] | None
    """Time of each phase with everything resident. None: to be taken from the roofline of a
    machine, :func:`umem.hardware.with_durations`."""
    access_start: npt.NDArray[np.int64]
    """Length P + 1."""
    access_tensor: npt.NDArray[np.int32]
    access_mode: npt.NDArray[np.uint8]
    """:class:`Access`."""
    metadata: Mapping[str, str | int | float] = field(default_factory=dict)
    """More facts: model, batch, sequence length, published times."""

    def __post_init__(self) -> None:
        for column in vars(self).values():
            if isinstance(column, np.ndarray):
                column.flags.writeable = False
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    @property
    def tensor_count(self) -> int:
        """T."""
        return len(self.tensor_names)

    @property
    def phase_count(self) -> int:
        """P."""
        return len(self.phase_names)


def ranges(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bounds of consecutive runs of these lengths: length N + 1, from 0 to their sum."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def require_durations(trace: Trace) -> npt.NDArray[np.float64]:
    """Durations of the phases, seconds, float64[P].

    Raises TraceError if the trace has none.
    """
    if trace.duration_s is None:
        raise TraceError(
            f"the trace {trace.name!r} has no durations: apply umem.hardware.with_durations first"
        )
    return trace.duration_s
