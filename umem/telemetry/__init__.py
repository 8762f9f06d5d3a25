"""Migration in real runs: recorded live or by Nsight Systems, attributed, reported.

:func:`profile` records this process, through the driver's own event queue and CUPTI;
:func:`read_recording` reads what it saved, or what Nsight Systems exported. Both give a
:class:`Recording`, from which the reports come.
:class:`PhaseRanges` is how the code that runs a step tells profilers of its phases.
"""

from __future__ import annotations

from umem.telemetry._activities import Numbers, copied, numbers_of, read_activities
from umem.telemetry._aggregate import (
    TensorTraffic,
    measured_row,
    report_of,
    step_reports,
    tensor_traffic,
)
from umem.telemetry._attribution import (
    Shares,
    Snapshot,
    attribute,
    blocks_hit,
    no_shares,
    snapshot_of,
)
from umem.telemetry._cupti import CuptiCollector
from umem.telemetry._driver_events import DriverEvents
from umem.telemetry._driver_queue import DriverQueue, knows_release
from umem.telemetry._entry import profile
from umem.telemetry._file import PROFILE_FORMAT, load_recording, save_recording
from umem.telemetry._hints import HINT_COUNTS, hint_traffic, hints_between
from umem.telemetry._html import write_html
from umem.telemetry._known import managed_on_host
from umem.telemetry._live import LiveCollector
from umem.telemetry._nsys import is_nsys_export, read_nsys
from umem.telemetry._perfetto import lanes, write_perfetto
from umem.telemetry._phases import PhaseRanges, nvtx_phases
from umem.telemetry._pictures import (
    classes_figure,
    link_bytes,
    residency_over_run_figure,
    transfers_figure,
)
from umem.telemetry._profile import Profile
from umem.telemetry._read import read_recording
from umem.telemetry._recording import NamedRange, Recording
from umem.telemetry._records import MigrationRecords, RecordKind, concatenated, records_of
from umem.telemetry._residency import Residency

__all__ = [
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
    "residency_over_run_figure",
    "save_recording",
    "snapshot_of",
    "step_reports",
    "tensor_traffic",
    "transfers_figure",
    "write_html",
    "write_perfetto",
]
