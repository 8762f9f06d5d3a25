"""Recording of a running training: the trace of a step by modules, at little cost."""

from __future__ import annotations

from umem.capture.live.blocks import NO_BLOCK, Block, find_blocks
from umem.capture.live.collector import CallShapes, StepSignature, call_shapes
from umem.capture.live.phase_tracker import PhaseTracker, StepListener
from umem.capture.live.recording import StepRecording, record
from umem.capture.live.saved_tensors import SavedTensor, SavedTensorHooks
from umem.capture.live.timing import Clock
from umem.capture.live.trace_builder import TrackedPhase

__all__ = [
    "NO_BLOCK",
    "Block",
    "CallShapes",
    "Clock",
    "PhaseTracker",
    "SavedTensor",
    "SavedTensorHooks",
    "StepListener",
    "StepRecording",
    "StepSignature",
    "TrackedPhase",
    "call_shapes",
    "find_blocks",
    "record",
]
