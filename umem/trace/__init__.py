"""The trace of a training step: its data type, checks, files and transformations."""

from __future__ import annotations

from umem.trace.check import check_trace
from umem.trace.file import TRACE_FORMAT, load_trace, save_trace
from umem.trace.model import (
    OPTIMIZER,
    Access,
    PhaseKind,
    Precision,
    Trace,
    ranges,
    require_durations,
)
from umem.trace.uses import (
    NEVER_MADE,
    NO_GAP,
    Gaps,
    find_gaps,
    first_and_last_use,
    live_bytes,
    phase_of_access,
    with_accesses,
    written_tensors,
)

__all__ = [
    "NEVER_MADE",
    "NO_GAP",
    "OPTIMIZER",
    "TRACE_FORMAT",
    "Access",
    "Gaps",
    "PhaseKind",
    "Precision",
    "Trace",
    "check_trace",
    "find_gaps",
    "first_and_last_use",
    "live_bytes",
    "load_trace",
    "phase_of_access",
    "ranges",
    "require_durations",
    "save_trace",
    "with_accesses",
    "written_tensors",
]
