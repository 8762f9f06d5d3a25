"""Recording real training runs: the trace of a step by modules, cheap enough to leave on."""

from __future__ import annotations

from umem.recorder._blocks import Block, find_blocks
from umem.recorder._clock import Clock, CudaClock, WallClock
from umem.recorder._follower import Follower
from umem.recorder._guard import Guard
from umem.recorder._listener import StepListener
from umem.recorder._parameters import parameter_names
from umem.recorder._phases import FollowedPhase
from umem.recorder._record import record
from umem.recorder._recording import StepRecording
from umem.recorder._saved import SavedTensors
from umem.recorder._saved_tensor import SavedTensor
from umem.recorder._signature import CallShapes, StepSignature, call_shapes
from umem.recorder._tensors import named_tensors

__all__ = [
    "Block",
    "CallShapes",
    "Clock",
    "CudaClock",
    "FollowedPhase",
    "Follower",
    "Guard",
    "SavedTensor",
    "SavedTensors",
    "StepListener",
    "StepRecording",
    "StepSignature",
    "WallClock",
    "call_shapes",
    "find_blocks",
    "named_tensors",
    "parameter_names",
    "record",
]
