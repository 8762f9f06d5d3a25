"""What migration cost a step, measured or predicted: the same record for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from umem.classes import TensorClass

__all__ = ["CAUSES", "Cause", "Direction", "MigrationReport", "Timeline", "Traffic"]

Direction = Literal["to_device", "to_host"]

Cause = Literal["hint", "fault", "speculation", "eviction", "counter", "mapped", "copy"]
"""Why bytes crossed the link. The first five are unified-memory transfers, as CUPTI names them:
asked for, faulted, the driver's speculation, the driver's eviction, access counters. ``mapped`` are
host pages used in place, ``copy`` the copy kernel's; a profiler shows neither as a transfer."""

CAUSES: tuple[Cause, ...] = (
    "hint",
    "fault",
    "speculation",
    "eviction",
    "counter",
    "mapped",
    "copy",
)
UM_CAUSES: tuple[Cause, ...] = CAUSES[:5]


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
class MigrationReport:
    """Migration in one step in steady state.

    Parameters
    ----------
    workload, hardware, policy, planner : str
        Names of what was run.
    step_s : float
        Time of the step.
    ideal_s : float
        Time with everything resident.
    lower_bound_s : float
        max(ideal, unavoidable traffic / link bandwidth): no schedule is faster.
    traffic : tuple of Traffic
        Non-zero entries, by direction, cause and class.
    memory_ops_s, memory_ops_bytes, memory_ops_count : float, int, int
        The step's own memcpy and memset, without unified-memory transfers.
    fault_pages, fault_batches : int
        Pages that faulted on the device, and the batches they came in.
    hints_late, hints_wasted : int
        Hints that a phase had to wait for; hints that found nothing to do.
    hint_count : int
        Hints issued.
    stall_s : mapping of str to float
        Where the time above `ideal_s` went, by cause: ``fault``, ``prefetch`` (waiting for what was
        asked for), ``room`` (waiting for evictions), ``mapped``, ``copy``.
    timeline : Timeline or None
    """

    workload: str
    hardware: str
    policy: str
    planner: str
    step_s: float
    ideal_s: float
    lower_bound_s: float
    traffic: tuple[Traffic, ...]
    memory_ops_s: float
    memory_ops_bytes: int
    memory_ops_count: int
    fault_pages: int
    fault_batches: int
    hint_count: int
    hints_late: int
    hints_wasted: int
    stall_s: Mapping[str, float]
    timeline: Timeline | None = None

    @property
    def regret(self) -> float:
        """Step time over the lower bound, at least 1."""
        return self.step_s / self.lower_bound_s

    @property
    def exposed_stall_s(self) -> float:
        """Step time beyond that with everything resident."""
        return self.step_s - self.ideal_s

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
        """Bytes that crossed the link, in one direction or for one cause if given."""
        return sum(
            entry.bytes
            for entry in self.traffic
            if direction in (None, entry.direction) and cause in (None, entry.cause)
        )

    def _um(self) -> list[Traffic]:
        return [entry for entry in self.traffic if entry.cause in UM_CAUSES]


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part else 0.0
