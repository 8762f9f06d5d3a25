"""The executor: a training's recorded step, planned, and carried out in every later one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umem.executor.begin_streaming import stream_state
    from umem.executor.manager import Manager
    from umem.executor.managers import current_statistics, ideal_step_s, manage, residency
    from umem.executor.status import ManagerState, ManagerStatus
    from umem.executor.streamed_training import StreamedStatus, StreamedTraining, join
    from umem.executor.weights.managed_models import manage_weights
    from umem.executor.weights.model_weights import ModelWeights, WeightStatus

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

_MODULES = {
    "begin_streaming": ("stream_state",),
    "manager": ("Manager",),
    "managers": ("current_statistics", "ideal_step_s", "manage", "residency"),
    "status": ("ManagerState", "ManagerStatus"),
    "streamed_training": ("StreamedStatus", "StreamedTraining", "join"),
    "weights.managed_models": ("manage_weights",),
    "weights.model_weights": ("ModelWeights", "WeightStatus"),
}


def __getattr__(name: str) -> Any:
    """Load a module at the first use of a name: weights need neither trainings nor planners."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
