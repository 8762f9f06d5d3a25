"""The executor: a training's recorded step, planned, and carried out in every later one."""

from __future__ import annotations

from umem.executor.manage import current_statistics, ideal_step_s, manage, residency
from umem.executor.manager import Manager
from umem.executor.status import ManagerState, ManagerStatus
from umem.executor.streamed_training import StreamedStatus, StreamedTraining, join, stream_state
from umem.executor.weights.model_weights import ModelWeights, WeightStatus, manage_weights

__all__ = [
    "Manager",
    "ManagerState",
    "ManagerStatus",
    "ModelWeights",
    "StreamedStatus",
    "StreamedTraining",
    "WeightStatus",
    "current_statistics",
    "ideal_step_s",
    "join",
    "manage",
    "manage_weights",
    "residency",
    "stream_state",
]
