"""What a plan decides for each idle interval, and why; and when phases begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from umem.trace import ranges

__all__ = ["NOT_NEEDED", "WHY", "PhaseClock", "Reason", "Selection"]

NOT_NEEDED = -1


class Reason(IntEnum):
    """Why a tensor leaves the device for an idle interval, or stays."""

    PRESSURE = 0
    PRESSURE_LATE = 1
    DEAD = 2
    ROOM = 3
    OUTRANKED = 4
    TOO_SHORT = 5
    LINK_BUSY = 6
    HELD = 7
    LEFT_TO_DRIVER = 8
    PRESSURE_FREE = 9
    IN_PLACE = 10


WHY: Mapping[Reason, str] = {
    Reason.PRESSURE: "leaves: more is resident than fits, and its absence helps longest per byte",
    Reason.PRESSURE_LATE: "leaves, though a phase waits for it: nothing else can go in time",
    Reason.PRESSURE_FREE: "leaves: the same, and the host has its contents already",
    Reason.DEAD: "dropped: its next use overwrites the contents",
    Reason.ROOM: "stays: there is room for it until its next use",
    Reason.OUTRANKED: "stays: the absence of others helps longer per byte",
    Reason.TOO_SHORT: "stays: its next use comes before it could leave and return",
    Reason.LINK_BUSY: "stays: other transfers leave the link no time for it",
    Reason.HELD: "stays where the policy or its mechanism holds it",
    Reason.IN_PLACE: "stays on the host, where its uses reach it in place",
    Reason.LEFT_TO_DRIVER: "left to the driver: demand paging is faster than every plan",
}
"""What each reason means, in words."""


@dataclass(frozen=True, eq=False)
class PhaseClock:
    """When phases begin: with everything resident, or as a simulation found it."""

    start_s: npt.NDArray[np.float64]
    """float64[P]"""
    step_s: float

    def at(self, phases: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Start of phases that may lie in the next step, seconds."""
        count = len(self.start_s)
        return self.start_s[phases % count] + self.step_s * (phases // count)


@dataclass(frozen=True, eq=False)
class Selection:
    """A decision for each of G idle intervals."""

    needed_by: npt.NDArray[np.int64]
    """int64[G]: phase by which the tensor's memory is needed, :data:`NOT_NEEDED` where it stays; P
    or more for phases of the next step."""
    gone: npt.NDArray[np.int64]
    back: npt.NDArray[np.int64]
    """int64[G] each: phases between which the tensor could be away."""
    barred: npt.NDArray[np.int8]
    """int8[G]: :class:`Reason` that holds whatever the sweep found; -1 for none."""
    is_late: npt.NDArray[np.bool_]
    """bool[G]: phases wait for its transfers."""
    is_free: npt.NDArray[np.bool_]
    """bool[G]: the host has the contents already."""
    phase_count: int

    @cached_property
    def reason(self) -> npt.NDArray[np.int8]:
        """int8[G]: :class:`Reason`. Found when it is asked for: most plans are never explained."""
        chosen = self.needed_by != NOT_NEEDED
        short = np.zeros(self.phase_count, np.int64)  # phases that lack memory
        short[self.needed_by[chosen] % self.phase_count] = 1
        count = ranges(np.tile(short, 3))
        edge = len(count) - 1
        is_pressed = count[np.clip(self.back, 0, edge)] > count[np.clip(self.gone, 0, edge)]
        leaves = np.where(self.is_free, Reason.PRESSURE_FREE, Reason.PRESSURE)
        leaves = np.where(self.is_late, Reason.PRESSURE_LATE, leaves)
        stays = np.where(is_pressed, Reason.OUTRANKED, Reason.ROOM)
        found = np.where(chosen, leaves, stays)
        return np.where(self.barred < 0, found, self.barred).astype(np.int8)
