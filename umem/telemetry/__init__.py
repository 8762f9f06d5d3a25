"""Migration in real runs: recorded live or by Nsight Systems, attributed, reported.

:func:`profile` records this process, through the driver's own event queue and CUPTI;
:func:`read_recording` reads what it saved, or what Nsight Systems exported. Both give a
:class:`Recording`, from which the reports come.
:class:`PhaseRanges` is how the code that runs a step tells profilers of its phases.
"""

from __future__ import annotations

from umem.telemetry.aggregate import (
    TensorTraffic,
    measured_row,
    report_of,
    step_reports,
    tensor_traffic,
)
from umem.telemetry.attribution import (
    Shares,
    Snapshot,
    attribute,
    blocks_hit,
    no_shares,
    snapshot_of,
)
from umem.telemetry.cupti import CuptiCollector, Numbers, copied, numbers_of, read_activities
from umem.telemetry.driver_events import DriverEvents, DriverQueue, knows_release
from umem.telemetry.figures import (
    FORMATS,
    link_figure,
    require_matplotlib,
    residency_figure,
    save,
    shares_figure,
)
from umem.telemetry.file import PROFILE_FORMAT, load_recording, read_recording, save_recording
from umem.telemetry.hints import HINT_COUNTS, hint_traffic, hints_between
from umem.telemetry.html import write_html
from umem.telemetry.known_transfers import managed_on_host
from umem.telemetry.live import LiveCollector
from umem.telemetry.nsys import is_nsys_export, read_nsys
from umem.telemetry.perfetto import lanes, write_perfetto
from umem.telemetry.pictures import (
    classes_figure,
    link_bytes,
    residency_over_run_figure,
    transfers_figure,
)
from umem.telemetry.profile import PhaseRanges, Profile, nvtx_phases, profile
from umem.telemetry.recording import NamedRange, Recording
from umem.telemetry.records import MigrationRecords, RecordKind, concatenated, records_of
from umem.telemetry.residency import Residency

__all__ = [
    "FORMATS",
    "HINT_COUNTS",
    "PROFILE_FORMAT",
    "CuptiCollector",
    "DriverEvents",
    "DriverQueue",
    "LiveCollector",
    "MigrationRecords",
    "NamedRange",
    "Numbers",
    "PhaseRanges",
    "Profile",
    "RecordKind",
    "Recording",
    "Residency",
    "Shares",
    "Snapshot",
    "TensorTraffic",
    "attribute",
    "blocks_hit",
    "classes_figure",
    "concatenated",
    "copied",
    "hint_traffic",
    "hints_between",
    "is_nsys_export",
    "knows_release",
    "lanes",
    "link_bytes",
    "link_figure",
    "load_recording",
    "managed_on_host",
    "measured_row",
    "no_shares",
    "numbers_of",
    "nvtx_phases",
    "profile",
    "read_activities",
    "read_nsys",
    "read_recording",
    "records_of",
    "report_of",
    "require_matplotlib",
    "residency_figure",
    "residency_over_run_figure",
    "save",
    "save_recording",
    "shares_figure",
    "snapshot_of",
    "step_reports",
    "tensor_traffic",
    "transfers_figure",
    "write_html",
    "write_perfetto",
]
