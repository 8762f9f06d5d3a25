"""Migration in real runs: recorded live, attributed to tensors, reported.

:func:`profile` records this process, through the driver's own event queue and CUPTI;
:func:`load_run` reads a saved profile. Reports and pictures are of the :class:`MeasuredRun` that
both give.
"""

from __future__ import annotations

from umem.telemetry.driver_events import knows_release
from umem.telemetry.figures import (
    require_matplotlib,
    residency_figure,
    residency_over_run_figure,
    save,
)
from umem.telemetry.file import load_run, save_run
from umem.telemetry.phases import phase_begins
from umem.telemetry.profiler import Profile, profile
from umem.telemetry.records import Recording, RecordKind
from umem.telemetry.reports import HINT_COUNTS, MeasuredRun, measured_row, run_of

__all__ = [
    "HINT_COUNTS",
    "MeasuredRun",
    "Profile",
    "RecordKind",
    "Recording",
    "knows_release",
    "load_run",
    "measured_row",
    "phase_begins",
    "profile",
    "require_matplotlib",
    "residency_figure",
    "residency_over_run_figure",
    "run_of",
    "save",
    "save_run",
]
