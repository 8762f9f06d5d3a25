"""What was recorded of a run: memory operations, whose they were, and the marks of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from umem.core.report import HintReport, Source
from umem.telemetry.attribution import UNKNOWN, Shares, no_shares
from umem.telemetry.records import Columns, MigrationRecords
from umem.telemetry.residency import Residency

__all__ = ["NamedRange", "Parts", "Recording", "unattributed"]


@dataclass(frozen=True)
class NamedRange:
    """A stretch of the run that its script has named."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded run. N records, S steps. All times are nanoseconds since its start.

    Parameters
    ----------
    workload, hardware, policy : str
        Names of what ran.
    source : Source
    duration_ns : int
        From its start to its end.
    records : MigrationRecords
        By start.
    tensor_class : int8[N]
        :attr:`umem.TensorClass.number` of what a record touched, or -1 where that is unknown.
    tensor : int32[N]
        Index into `tensor_names`, or -1.
    tensor_names : tuple of str
    step_start_ns, step_end_ns : int64[S]
        Of the marked steps, which follow each other.
    phases : tuple of NamedRange
        Phases that the script has marked.
    dropped : int
        Records that were lost.
    notes : tuple of str
        What a reader should know before trusting the figures.
    ideal_s : float or None
        Time of a step with everything resident, where somebody knows it.
    hints : tuple of HintReport or None
        Of each step, or of the whole recording where no step is marked; None for a step that no
        hint engine drove. Empty where there was no engine at all.
    residency : Residency or None
        What was on the device over time, where somebody kept books.
    shares : Shares
        What transfers carried of other tensors than `tensor_class` and `tensor` tell.
    """

    workload: str
    hardware: str
    policy: str
    source: Source
    duration_ns: int
    records: MigrationRecords
    tensor_class: npt.NDArray[np.int8]
    tensor: npt.NDArray[np.int32]
    tensor_names: tuple[str, ...]
    step_start_ns: npt.NDArray[np.int64]
    step_end_ns: npt.NDArray[np.int64]
    phases: tuple[NamedRange, ...]
    dropped: int
    notes: tuple[str, ...]
    ideal_s: float | None = None
    hints: tuple[HintReport | None, ...] = ()
    residency: Residency | None = None
    shares: Shares = field(default_factory=no_shares)

    @property
    def is_collected(self) -> bool:
        """Whether memory operations were recorded."""
        return self.source in ("driver", "driver_only", "cupti", "nsys")

    @property
    def step_count(self) -> int:
        """Number of marked steps."""
        return len(self.step_start_ns)

    def parts(self) -> Parts:
        """The records tensor by tensor: bytes and times add up to theirs."""
        records, shares = self.records, self.shares
        own_bytes, own_ns = records.bytes.copy(), records.end_ns - records.start_ns
        share_of_time = shares.bytes / records.bytes[shares.record]
        share_ns = (own_ns[shares.record] * share_of_time).astype(np.int64)
        np.subtract.at(own_bytes, shares.record, shares.bytes)
        np.subtract.at(own_ns, shares.record, share_ns)
        return Parts(
            np.concatenate([np.arange(len(records)), shares.record]),
            np.arange(len(records) + len(shares)) < len(records),
            np.concatenate([own_bytes, shares.bytes]),
            np.concatenate([own_ns, share_ns]),
            np.concatenate([self.tensor_class, shares.tensor_class]),
            np.concatenate([self.tensor, shares.tensor]),
        )


@dataclass(frozen=True, eq=False)
class Parts(Columns):
    """What records carried of each tensor: N records' own part, then their shares. P parts.

    Parameters
    ----------
    record : int64[P]
        Index of the record.
    is_own : bool[P]
        Whether the part is of the record's own tensor.
    bytes : int64[P]
    time_ns : int64[P]
        Of the record's time, by bytes.
    tensor_class : int8[P]
        :attr:`umem.TensorClass.number`, or -1.
    tensor : int32[P]
        Index of a name, or -1.
    """

    record: npt.NDArray[np.int64]
    is_own: npt.NDArray[np.bool_]
    bytes: npt.NDArray[np.int64]
    time_ns: npt.NDArray[np.int64]
    tensor_class: npt.NDArray[np.int8]
    tensor: npt.NDArray[np.int32]


def unattributed(count: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Columns `tensor_class` and `tensor` of records of which nothing is known."""
    return np.full(count, UNKNOWN, np.int8), np.full(count, UNKNOWN, np.int32)
