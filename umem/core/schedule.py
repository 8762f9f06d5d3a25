"""A planner's result: where each tensor lives, and the hints that move it, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = ["HintOp", "ResidencyMode", "Schedule"]


class ResidencyMode(IntEnum):
    """How a tensor is held through the whole step."""

    MIGRATE = 0
    """Managed pages, which move by hint or by fault."""
    KEEP = 1
    """On the device throughout; neither driver nor hint moves it."""
    MAP = 2
    """On the host throughout, read and written in place over the link."""
    DUPLICATE = 3
    """Managed pages with a copy on the host: leaving the device moves nothing until a write. What
    comes back keeps the copy."""
    SYSTEM = 4
    """The host's own memory, used in place until access counters move it (ATS machines)."""


class HintOp(IntEnum):
    """Operation that a hint asks for."""

    PREFETCH = 0
    """Bring the tensor's pages to the device."""
    EVICT = 1
    """Send the tensor's pages to the host; pages with a valid host copy are dropped."""
    DISCARD = 2
    """The contents are dead: free the device pages and any host copy without moving them."""
    COPY_IN = 3
    """Copy the contents from a host block by an explicit copy."""
    COPY_OUT = 4
    """Copy the contents to a host block by an explicit copy, and free the device pages; contents
    that were not written since the last copy are only freed."""
    WRITE_BACK = 5
    """Copy the tensor's pages to the host and keep both, so that a later ``EVICT`` moves nothing,
    unless a phase has written the tensor meanwhile. For predictions: no training carries it out,
    and the executor's ``EVICT`` moves the pages when it comes."""
    COPY_BACK = 6
    """The same by an explicit copy, for a later ``COPY_OUT``."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Hints of one step, in the order in which they are issued.

    A hint of phase p is issued when the compute stream reaches phase p, so everything before p is
    done. H hints, T tensors.
    """

    planner: str
    residency: npt.NDArray[np.uint8]
    """``[T]``: :class:`ResidencyMode` of each tensor of the trace."""
    hint_phase: npt.NDArray[np.int32]
    """``[H]``: ascending."""
    hint_op: npt.NDArray[np.uint8]
    """``[H]``: :class:`HintOp`."""
    hint_tensor: npt.NDArray[np.int32]
    waits: bool = True
    """A phase waits for tensors that were asked for before it and have not arrived; otherwise it
    faults."""

    def __post_init__(self) -> None:
        for column in vars(self).values():
            if isinstance(column, np.ndarray):
                column.flags.writeable = False

    @property
    def hint_count(self) -> int:
        """H."""
        return len(self.hint_phase)
