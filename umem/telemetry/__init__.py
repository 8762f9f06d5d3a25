"""Migration in real runs: recorded live, attributed to tensors, reported.

:func:`profile` records this process, through the driver's own event queue and CUPTI;
:func:`load_recording` reads a saved profile. Both give a :class:`Recording`, from which reports and
pictures are made.
"""

from __future__ import annotations

from umem.telemetry.driver_events import knows_release
from umem.telemetry.figures import (
    require_matplotlib,
    residency_figure,
    residency_over_run_figure,
    save,
)
from umem.telemetry.file import load_recording, save_recording
from umem.telemetry.phases import phase_begins
from umem.telemetry.profiler import Profile, profile
from umem.telemetry.records import Recording, RecordKind
from umem.telemetry.reports import (
    HINT_COUNTS,
    measured_row,
    report_of,
    step_reports,
    tensor_traffic,
)

__all__ = [
    "HINT_COUNTS",
    "Profile",
    "RecordKind",
    "Recording",
    "knows_release",
    "load_recording",
    "measured_row",
    "phase_begins",
    "profile",
    "report_of",
    "require_matplotlib",
    "residency_figure",
    "residency_over_run_figure",
    "save",
    "save_recording",
    "step_reports",
    "tensor_traffic",
]
