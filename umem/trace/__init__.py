"""Traces: what one training step reads and writes, phase by phase.

Recorded without memory or a GPU (:func:`model_trace`, :func:`script_trace`, :func:`record_step`),
or read from a file (:func:`load_trace`). Recording imports torch when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from umem.trace._check import MAX_TENSORS, check_trace
from umem.trace._file import load_trace, save_trace
from umem.trace._fingerprint import trace_fingerprint
from umem.trace._gaps import NO_GAP, Gaps, find_gaps
from umem.trace._model import (
    OPTIMIZER,
    Access,
    PhaseKind,
    Precision,
    Trace,
    ranges,
    require_durations,
)
from umem.trace._step_in_backward import is_optimizer_phase, with_step_in_backward
from umem.trace._uses import (
    first_and_last_use,
    phase_of_access,
    with_accesses,
    written_tensors,
)

if TYPE_CHECKING:
    from umem.trace._models import MODELS, MODES, model_trace
    from umem.trace._record import record_step
    from umem.trace._script import script_trace

__all__ = [
    "MAX_TENSORS",
    "MODELS",
    "MODES",
    "NO_GAP",
    "OPTIMIZER",
    "Access",
    "Gaps",
    "PhaseKind",
    "Precision",
    "Trace",
    "check_trace",
    "find_gaps",
    "first_and_last_use",
    "is_optimizer_phase",
    "load_trace",
    "model_trace",
    "phase_of_access",
    "ranges",
    "record_step",
    "require_durations",
    "save_trace",
    "script_trace",
    "trace_fingerprint",
    "with_accesses",
    "with_step_in_backward",
    "written_tensors",
]

_MODULE_OF = {
    "MODELS": "umem.trace._models",
    "MODES": "umem.trace._models",
    "model_trace": "umem.trace._models",
    "record_step": "umem.trace._record",
    "script_trace": "umem.trace._script",
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'umem.trace' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
