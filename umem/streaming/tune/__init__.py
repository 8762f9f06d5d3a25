"""Measures steps of a training, makes plans for them, and watches what becomes of these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.tune.measured_steps import MeasuredBlock, MeasuredStep, MeasuredSteps
    from umem.streaming.tune.states import TRANSITIONS, TuningEvent, TuningState, TuningStatus
    from umem.streaming.tune.step_meter import StepMeter
    from umem.streaming.tune.tuner import StreamTuner

__all__ = [
    "TRANSITIONS",
    "MeasuredBlock",
    "MeasuredStep",
    "MeasuredSteps",
    "StepMeter",
    "StreamTuner",
    "TuningEvent",
    "TuningState",
    "TuningStatus",
]

__getattr__ = lazy_names(
    __name__,
    {
        "states": "TRANSITIONS TuningEvent TuningState TuningStatus",
        "measured_steps": "MeasuredBlock MeasuredStep MeasuredSteps",
        "step_meter": "StepMeter",
        "tuner": "StreamTuner",
    },
)
