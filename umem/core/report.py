"""What migration cost a step, measured or predicted: the same record for both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass

__all__ = [
    "CAUSES",
    "UM_CAUSES",
    "Cause",
    "Direction",
    "HintReport",
    "HintUse",
    "MeasuredReport",
    "MigrationReport",
    "Source",
    "StepReport",
    "Timeline",
    "Traffic",
]

Direction = Literal["to_device", "to_host", "between_devices"]
"""Where bytes went. Predictions are of one device: ``between_devices`` is measured only."""

Cause = Literal["hint", "fault", "speculation", "eviction", "counter", "mapped", "copy", "unknown"]
"""Why bytes crossed the link. The first five are unified-memory transfers, as CUPTI names them:
asked for, faulted, the driver's speculation, the driver's eviction, access counters. ``mapped`` are
host pages used in place, ``copy`` explicit copies; a profiler shows neither as such a transfer.
``unknown`` is a unified-memory transfer that the driver gave no cause for: measured only."""

CAUSES: tuple[Cause, ...] = (
    "hint",
    "fault",
    "speculation",
    "eviction",
    "counter",
    "mapped",
    "copy",
)
"""The causes that a prediction tells apart."""

UM_CAUSES: tuple[Cause, ...] = (*CAUSES[:5], "unknown")
"""Those of unified-memory transfers: what a profiler shows."""


_ROUNDING = 1e-12
"""Of a time that is a sum of many."""


@dataclass(frozen=True)
class Traffic:
    """Transfers of one direction, cause and class in one step."""

    direction: Direction
    cause: Cause
    tensor_class: TensorClass
    bytes: int
    seconds: float
    count: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """The step as it went, for pictures. P phases, B equal bins of the step's time.

    Parameters
    ----------
    phase_start_s, phase_end_s : float64[P]
        From the start of the step.
    resident_bytes : int64[P, 6]
        On the device while the phase ran, by class number.
    budget_bytes : int
        Device memory that the step had.
    link_bin_s : float
        Length of a bin, seconds.
    link_bytes : int64[B, 2]
        Bytes that crossed the link in each bin: to the device, to the host.
    """

    phase_start_s: npt.NDArray[np.float64]
    phase_end_s: npt.NDArray[np.float64]
    resident_bytes: npt.NDArray[np.int64]
    budget_bytes: int
    link_bin_s: float
    link_bytes: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepReport:
    """What a prediction and a measurement of one step both say.

    Parameters
    ----------
    workload, hardware, policy, planner : str
        Names of what was run; the planner of a measurement is ``measured``.
    step_s : float
        Time of the step.
    traffic : tuple of Traffic
        Non-zero entries, by direction, cause and class.
    memory_ops_s, memory_ops_bytes, memory_ops_count : float, int, int
        The step's own memcpy and memset, without unified-memory transfers.
    fault_batches : int
        Batches that the driver served faults of the device in.
    """

    workload: str
    hardware: str
    policy: str
    planner: str
    step_s: float
    traffic: tuple[Traffic, ...]
    memory_ops_s: float
    memory_ops_bytes: int
    memory_ops_count: int
    fault_batches: int

    @property
    def um_time_share(self) -> float:
        """Unified-memory transfers' share of the time of all memory operations."""
        moved_s = sum(entry.seconds for entry in self._um())
        return _share(moved_s, self.memory_ops_s)

    @property
    def um_ops_share(self) -> float:
        """The same share, by count."""
        return _share(sum(entry.count for entry in self._um()), self.memory_ops_count)

    @property
    def um_bytes_share(self) -> float:
        """The same share, by bytes."""
        return _share(sum(entry.bytes for entry in self._um()), self.memory_ops_bytes)

    def moved_bytes(self, direction: Direction | None = None, cause: Cause | None = None) -> int:
        """Bytes that moved, in one direction or for one cause if given."""
        return sum(
            entry.bytes
            for entry in self.traffic
            if direction in (None, entry.direction) and cause in (None, entry.cause)
        )

    def bytes_by_cause(self) -> dict[str, dict[str, dict[str, int]]]:
        """Bytes that moved, from direction to cause to tensor class, for JSON."""
        moved: dict[str, dict[str, dict[str, int]]] = {}
        for entry in self.traffic:
            by_class = moved.setdefault(entry.direction, {}).setdefault(entry.cause, {})
            by_class[entry.tensor_class.value] = entry.bytes
        return moved

    def _um(self) -> list[Traffic]:
        return [entry for entry in self.traffic if entry.cause in UM_CAUSES]


@dataclass(frozen=True, eq=False)
class MigrationReport(StepReport):
    """Migration in one step in steady state, as predicted.

    Parameters
    ----------
    ideal_s : float
        Time with everything resident.
    lower_bound_s : float
        max(ideal, unavoidable traffic / link bandwidth): no schedule is faster.
    fault_pages : int
        Pages that faulted on the device.
    hints_late, hints_wasted : int
        Hints that a phase had to wait for; hints that found nothing to do.
    hint_count : int
        Hints issued.
    stall_s : mapping of str to float
        Where the time above `ideal_s` went, by cause: ``fault``, ``prefetch`` (waiting for what was
        asked for), ``room`` (waiting for evictions), ``mapped``, ``copy`` (computing beside what
        moves).
    timeline : Timeline or None
    """

    ideal_s: float
    lower_bound_s: float
    fault_pages: int
    hint_count: int
    hints_late: int
    hints_wasted: int
    stall_s: Mapping[str, float]
    timeline: Timeline | None = None

    @property
    def regret(self) -> float:
        """Step time over the lower bound, at least 1."""
        longer = _beyond(self.step_s, self.lower_bound_s)
        return self.step_s / self.lower_bound_s if longer else 1.0

    @property
    def exposed_stall_s(self) -> float:
        """Step time beyond that with everything resident, at least 0."""
        return _beyond(self.step_s, self.ideal_s)


@dataclass(frozen=True)
class HintUse:
    """What hints of one operation on one class came to in one step, as the hint engine says.

    Parameters
    ----------
    op : str
        ``prefetch``, ``evict``, ``discard``, ``copy_in``, ``copy_out`` or ``advise``.
    tensor_class : TensorClass
    asked : int
        Requests that were made in the step.
    done, wasted : int
        Requests that ended in the step: as asked; superseded, forgotten, dropped or failed.
    late, early, missed : int
        Requests that a phase needed and that were done after it began; done before it began; never
        wholly done. Only requests that the program says it needs are among them.
    asked_bytes, moved_bytes, wasted_bytes : int
        `moved_bytes` are where they were asked to be, and some of them may have been there before.
    calls : int
        Driver calls, of which one may serve several requests.
    driver_s, late_s : float
        Time in driver calls; by how much late requests were late, added up.
    """

    op: str
    tensor_class: TensorClass
    asked: int
    done: int
    late: int
    early: int
    missed: int
    wasted: int
    asked_bytes: int
    moved_bytes: int
    wasted_bytes: int
    calls: int
    driver_s: float
    late_s: float


@dataclass(frozen=True)
class HintReport:
    """What the hints of one step came to.

    Parameters
    ----------
    uses : tuple of HintUse
        Non-zero entries, by operation and class.
    refused : int
        Requests that the engine did not take.
    failures : int
        Driver calls that failed.
    over_budget_bytes : int
        Brought to a device that was full by its budget.
    """

    uses: tuple[HintUse, ...]
    refused: int
    failures: int
    over_budget_bytes: int


Source = Literal["driver", "driver_only", "cupti", "nsys", "hints", "none"]
"""Who counted what moved: the driver in its event queue, with copies and memory sets counted by
CUPTI or by nobody; CUPTI in the process; Nsight Systems; the hint engine for itself; or nobody
(steps were timed only)."""


@dataclass(frozen=True, eq=False)
class MeasuredReport(StepReport):
    """Migration in one step of a real run: of one step, or the typical one of several.

    What a run alone cannot tell, such as a lower bound, has no field here.

    Parameters
    ----------
    collected : bool
        Whether migrations were recorded. If not, only `step_s`, `ideal_s` and `hints` mean
        anything, and where `source` is ``hints`` also `traffic`: the hints' part of it, as the
        engine counts it.
    step_count : int
        Steps of which it is the one with the median time; 0 where no step was marked, and the
        figures are those of the whole recording.
    gpu_faults : int
        Page faults on the device; a page may fault several times.
    cpu_faults : int
        Page faults on the host.
    unattributed_bytes : int
        Bytes of unified-memory transfers that hit no known tensor; they count as class ``other``.
    notes : tuple of str
        What to know before trusting the figures.
    source : Source
        Who counted what moved.
    ideal_s : float or None
        Time of a step with everything resident, where it is known from elsewhere.
    hints : HintReport or None
        What hints came to; None where no hint engine drove the step.
    """

    collected: bool
    step_count: int
    gpu_faults: int
    cpu_faults: int
    unattributed_bytes: int
    notes: tuple[str, ...]
    source: Source = "cupti"
    ideal_s: float | None = None
    hints: HintReport | None = None

    @property
    def has_copies(self) -> bool:
        """Whether copies and memory sets were recorded too: shares are of all of these together."""
        return self.collected and self.source != "driver_only"

    @property
    def um_time_share(self) -> float:
        """As in a prediction; not a number where :attr:`has_copies` is false."""
        return super().um_time_share if self.has_copies else math.nan

    @property
    def um_ops_share(self) -> float:
        """The same share, by count."""
        return super().um_ops_share if self.has_copies else math.nan

    @property
    def um_bytes_share(self) -> float:
        """The same share, by bytes."""
        return super().um_bytes_share if self.has_copies else math.nan

    @property
    def exposed_stall_s(self) -> float | None:
        """Step time beyond that with everything resident; None where that is not known.

        Below 0 where the step was faster than what it is measured against.
        """
        return None if self.ideal_s is None else self.step_s - self.ideal_s

    @property
    def exposed_stall_share(self) -> float | None:
        """Exposed stall's share of the step's time."""
        stall_s = self.exposed_stall_s
        return stall_s / self.step_s if stall_s is not None and self.step_s > 0 else None


def _beyond(time_s: float, floor_s: float) -> float:
    """How much longer a time is than a floor that it cannot be below.

    Both are sums of many times in different orders, which differ by their rounding.
    """
    beyond_s = time_s - floor_s
    return beyond_s if beyond_s > _ROUNDING * floor_s else 0.0


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part else 0.0
