"""Recording real training runs: the trace of a step by modules, cheap enough to leave on."""

from __future__ import annotations

from umem.capture.live.blocks import Block, find_blocks
from umem.capture.live.clock import Clock, CudaClock, WallClock
from umem.capture.live.collector import CallShapes, StepSignature, call_shapes
from umem.capture.live.phase_tracker import FollowedPhase, Follower, StepListener
from umem.capture.live.recording import StepRecording, record
from umem.capture.live.saved_tensors import SavedTensor, SavedTensors

__all__ = [
    "Block",
    "CallShapes",
    "Clock",
    "CudaClock",
    "FollowedPhase",
    "Follower",
    "SavedTensor",
    "SavedTensors",
    "StepListener",
    "StepRecording",
    "StepSignature",
    "WallClock",
    "call_shapes",
    "find_blocks",
    "record",
]
