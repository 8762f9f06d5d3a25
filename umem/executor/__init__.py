"""The executor: a training's recorded step, planned, and carried out in every later one."""

from __future__ import annotations

from umem.executor.manage import current_statistics, ideal_step_s, manage, residency
from umem.executor.manager import Manager
from umem.executor.status import ManagerState, ManagerStatus
from umem.executor.streamed_training import StreamedStatus, StreamedTraining, join, stream_state

__all__ = [
    "Manager",
    "ManagerState",
    "ManagerStatus",
    "StreamedStatus",
    "StreamedTraining",
    "current_statistics",
    "ideal_step_s",
    "join",
    "manage",
    "residency",
    "stream_state",
]
