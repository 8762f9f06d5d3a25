"""Migration cost of a step. Predictions and measurements are the same record."""

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
    "OpName",
    "Source",
    "StepReport",
    "Timeline",
    "Traffic",
]

Direction = Literal["to_device", "to_host", "between_devices"]
"""Direction of a transfer. Predictions are of one device: only measurements have
``between_devices``."""

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
"""The causes that a prediction has."""

UM_CAUSES: tuple[Cause, ...] = (*CAUSES[:5], "unknown")
"""Causes of unified-memory transfers, which a profiler shows."""

Source = Literal["driver", "driver_only", "cupti", "hints", "none"]
"""Origin of the figures of a measurement: the driver's event queue, with copies and memory sets
counted by CUPTI or by nobody; CUPTI; the hint engine's own counts; or nobody (steps were timed
only)."""

OpName = Literal["prefetch", "evict", "advise"]
"""Operations of the hint engine, in the order of reports and of the native numbers. Advice moves
nothing, and so is no `HintOp`."""

_ROUNDING = 1e-12
"""Relative error of a sum of many times."""


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
    """The step over time, for pictures. P phases."""

    phase_start_s: npt.NDArray[np.float64]
    """Of each phase, from the start of the step."""
    phase_end_s: npt.NDArray[np.float64]
    resident_bytes: npt.NDArray[np.int64]
    """int64[P, 6]: on the device while the phase ran, by class number."""
    budget_bytes: int
    """Device memory that the step had."""


@dataclass(frozen=True, eq=False)
class StepReport:
    """Figures that a prediction and a measurement of one step have in common.

    The shares of unified memory are not a number where copies were not counted.
    """

    workload: str
    hardware: str
    policy: str
    planner: str
    """Name of the planner; ``measured`` for a measurement."""
    step_s: float
    """Time of the step."""
    traffic: tuple[Traffic, ...]
    """Non-zero entries, by direction, cause and class."""
    memory_ops_s: float
    """Time of the step's own memcpy and memset, without unified-memory transfers."""
    memory_ops_bytes: int
    memory_ops_count: int
    fault_batches: int
    """Batches in which the driver served faults of the device."""

    @property
    def has_copies(self) -> bool:
        """Whether copies and memory sets were counted too, as shares need it."""
        return True

    @property
    def um_time_share(self) -> float:
        """Unified-memory transfers' share of the time of all memory operations."""
        return self._share([entry.seconds for entry in self._um()], self.memory_ops_s)

    @property
    def um_ops_share(self) -> float:
        """Unified-memory transfers' share of the number of all memory operations."""
        return self._share([entry.count for entry in self._um()], self.memory_ops_count)

    @property
    def um_bytes_share(self) -> float:
        """Unified-memory transfers' share of the bytes of all memory operations."""
        return self._share([entry.bytes for entry in self._um()], self.memory_ops_bytes)

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

    def _share(self, parts: list[int] | list[float], rest: float) -> float:
        if not self.has_copies:
            return math.nan
        part = sum(parts)
        return part / (part + rest) if part else 0.0


@dataclass(frozen=True, eq=False)
class MigrationReport(StepReport):
    """Migration in one step in steady state, as predicted."""

    ideal_s: float
    """Time with everything resident."""
    lower_bound_s: float
    """No schedule is faster: the quick bound, :func:`umem.pages.simulate.lower_bound_s`."""
    fault_pages: int
    """Pages that faulted on the device."""
    hint_count: int
    """Hints issued."""
    hints_late: int
    """Hints that a phase had to wait for."""
    hints_wasted: int
    """Hints that found nothing to do."""
    stall_s: Mapping[str, float]
    """Time above `ideal_s`, by cause: ``fault``, ``prefetch`` (waiting for memory that was asked
    for), ``room`` (waiting for evictions), ``mapped``, ``copy`` (computing beside transfers)."""
    timeline: Timeline | None = None
    faster_s: float | None = None
    """Time of the faster of the last two steps, where they differ; `step_s` is the slower one's."""

    @property
    def settled(self) -> bool:
        """Whether the last two steps that were simulated took the same time."""
        return self.faster_s is None

    @property
    def copied_bytes_share(self) -> float:
        """Share that the plan's explicit copies have in the bytes that moved.

        They are no transfers of unified memory, so that the other shares do not count them.
        """
        copied = self.moved_bytes(cause="copy")
        return copied / self.moved_bytes() if copied else 0.0

    @property
    def regret(self) -> float:
        """Step time over the quick lower bound, at least 1."""
        longer = _beyond(self.step_s, self.lower_bound_s)
        return self.step_s / self.lower_bound_s if longer else 1.0

    @property
    def exposed_stall_s(self) -> float:
        """Step time beyond the time with everything resident, at least 0."""
        return _beyond(self.step_s, self.ideal_s)


@dataclass(frozen=True)
class HintUse:
    """Hints of one operation on one class in one step, as the hint engine counts them."""

    op: OpName
    tensor_class: TensorClass
    asked: int
    """Requests that were made in the step."""
    done: int
    """Requests that ended in the step as asked."""
    late: int
    """Requests that a phase needed and that were done after it began. Like `early` and `missed`, it
    counts only requests that the program says it needs."""
    early: int
    """Requests that were done before the phase that needed them began."""
    missed: int
    """Requests that a phase needed and that were never wholly done."""
    wasted: int
    """Requests that ended superseded, forgotten, dropped or failed."""
    asked_bytes: int
    moved_bytes: int
    """Bytes that are where they were asked to be; some may have been there before."""
    wasted_bytes: int
    calls: int
    """Driver calls, of which one may serve several requests."""
    driver_s: float
    """Time in driver calls. Concurrent calls in one direction share its link and the time, so that
    ``moved_bytes / driver_s`` is the link's rate for any number of workers. The time of a call that
    serves several requests is divided by bytes."""
    late_s: float
    """Lateness of late requests, added up."""


@dataclass(frozen=True)
class HintReport:
    """Hints of one step."""

    uses: tuple[HintUse, ...]
    """Non-zero entries, by operation and class."""
    refused: int
    """Requests that the engine did not take."""
    failures: int
    """Driver calls that failed."""


@dataclass(frozen=True, eq=False)
class MeasuredReport(StepReport):
    """Migration in one step of a real run: of one step, or the typical one of several.

    A figure that a run alone does not show, such as a lower bound, has no field here.
    """

    collected: bool
    """Whether migrations were recorded. If not, only `step_s`, `ideal_s` and `hints` mean anything,
    and where `source` is ``hints`` also `traffic`: that of hints, as the engine counts it."""
    step_count: int
    """Steps, of which this one has the median time; 0 where no step was marked, and the figures are
    those of the whole recording."""
    gpu_faults: int
    """Page faults on the device; a page may fault several times."""
    cpu_faults: int
    """Page faults on the host."""
    unattributed_bytes: int
    """Bytes of unified-memory transfers that hit no known tensor; they count as class ``other``."""
    notes: tuple[str, ...]
    """Cautions to read before trusting the figures."""
    source: Source = "cupti"
    ideal_s: float | None = None
    """Time of a step with everything resident, where it is known from elsewhere."""
    hints: HintReport | None = None
    """Hints of the step; None where no hint engine drove it."""

    @property
    def has_copies(self) -> bool:
        """Whether copies and memory sets were recorded too."""
        return self.collected and self.source != "driver_only"

    @property
    def exposed_stall_s(self) -> float | None:
        """Step time beyond the time with everything resident; None where that is not known.

        Below 0 where the step was faster than that.
        """
        return None if self.ideal_s is None else self.step_s - self.ideal_s

    @property
    def exposed_stall_share(self) -> float | None:
        """Exposed stall's share of the step's time."""
        stall_s = self.exposed_stall_s
        return stall_s / self.step_s if stall_s is not None and self.step_s > 0 else None


def _beyond(time_s: float, floor_s: float) -> float:
    """Time beyond a floor. Both are sums of many times in other orders, so rounding is ignored."""
    beyond_s = time_s - floor_s
    return beyond_s if beyond_s > _ROUNDING * floor_s else 0.0
