"""The engine of plain device memory: what the budget has no room for is copied ahead of its use.

Homes are in page-locked host memory. The folders are the flow of a step: `tune/` measures steps and
makes plans, `step/` is the optimizer's, `weights/`, `gradients/` and `activations/` are the classes
of tensors that move, `stage/` is what all of them use, and `plan/` says what moves when. It
imports no torch: `umem fit` uses it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.begin import stream_state
    from umem.streaming.training import (
        StreamedStatus,
        StreamedTraining,
        join,
        streamed_trainings,
    )
    from umem.streaming.weights.managed_models import manage_weights
    from umem.streaming.weights.model_weights import WeightStatus

__all__ = [
    "StreamedStatus",
    "StreamedTraining",
    "WeightStatus",
    "join",
    "manage_weights",
    "stream_state",
    "streamed_trainings",
]

__getattr__ = lazy_names(
    __name__,
    {
        "begin": "stream_state",
        "training": "StreamedStatus StreamedTraining join streamed_trainings",
        "weights.managed_models": "manage_weights",
        "weights.model_weights": "WeightStatus",
    },
)
