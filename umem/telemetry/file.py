"""Recordings as files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import HintReport, Source, Traffic
from umem.io.columns import Checker, Header, Items, read_columns, write_columns
from umem.telemetry.records import (
    CAUSE_OF_NUMBER,
    MAX_RECORDS,
    MAX_SAMPLES,
    RECORD_COLUMNS,
    TRANSFERS,
    UNKNOWN,
    MigrationRecords,
    NamedRange,
    Recording,
    RecordKind,
    Residency,
    Shares,
)
from umem.telemetry.reports import HINT_FIGURES, HINT_OPS, HINT_TOTALS

__all__ = ["PROFILE_COLUMNS", "ProfileHeader", "load_recording", "save_recording"]

PROFILE_FORMAT = "umem-profile/4"

MAX_MARKS = 2**16
"""Most steps, phases and notes."""

_LONGEST_NS = 2**53
"""About a hundred days, and exact as a number of any program."""

_LARGEST = 2**42 - 1
"""Most bytes, faults and nanoseconds of one record: no sum of them leaves 64 bits."""

_LARGEST_FIGURE = 2**53
"""Of a hint engine, and of a sample of residency."""

_LONGEST_S = 1e9
_CLASSES = len(TensorClass)

_OWNER_COLUMNS: dict[str, Any] = {"tensor_class": np.int8, "tensor": np.int32}
_STEP_COLUMNS: dict[str, Any] = {"step_start_ns": np.int64, "step_end_ns": np.int64}
_SAMPLE_COLUMNS: dict[str, Any] = {"residency_ns": np.int64}
_SHARE_COLUMNS: dict[str, Any] = {
    "share_record": np.int64,
    "share_bytes": np.int64,
    "share_tensor_class": np.int8,
    "share_tensor": np.int32,
}
# Of the 2 MiB of a transfer at most one large block ends and one begins, before and after it.
_TABLES = (
    (RECORD_COLUMNS | _OWNER_COLUMNS, MAX_RECORDS),
    (_STEP_COLUMNS, MAX_MARKS),
    (_SAMPLE_COLUMNS, MAX_SAMPLES),
    (_SHARE_COLUMNS, 4 * MAX_RECORDS),
)
PROFILE_COLUMNS: Mapping[str, Any] = {
    **{key: dtype for table, _ in _TABLES for key, dtype in table.items()},
    "resident_bytes": np.int64,
}
"""Types of the columns of a profile."""


class ProfileHeader(Header):
    """Header of a profile: fields of :class:`umem.telemetry.Recording` that are no columns."""

    format: str = PROFILE_FORMAT
    workload: str
    hardware: str
    policy: str
    source: Source
    duration_ns: int = Field(ge=0, le=_LONGEST_NS)
    dropped: int = Field(ge=0, le=_LONGEST_NS)
    ideal_s: float | None = Field(gt=0, le=_LONGEST_S)
    notes: Items[str] = Field(max_length=MAX_MARKS)
    tensor_names: Items[str] = Field(max_length=MAX_RECORDS)
    phases: Items[NamedRange] = Field(max_length=MAX_MARKS)
    hints: Items[HintReport | None] = Field(max_length=MAX_MARKS)
    copies: Items[Items[Traffic]] = Field(max_length=MAX_MARKS)


def save_recording(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Save a recording, compressed.

    The file is replaced in one piece, missing folders are made, and equal recordings give equal
    bytes.

    Raises UmemError if the file cannot be written, would be too large, or could not be loaded
    again; an old file is then as it was.
    """
    columns = _checked_columns(recording, Checker(f"{os.fspath(path)}: not written", UmemError))
    header = {key: getattr(recording, key) for key in ProfileHeader.model_fields if key != "format"}
    write_columns(path, ProfileHeader, header, columns, error=UmemError)


def _checked_columns(recording: Recording, check: Checker) -> dict[str, npt.NDArray[Any]]:
    """Columns of a recording that a profile can hold; else the error."""
    residency = recording.residency
    columns = {
        **vars(recording.records),
        **{key: getattr(recording, key) for key in _OWNER_COLUMNS | _STEP_COLUMNS},
        **{f"share_{key}": column for key, column in vars(recording.shares).items()},
        "residency_ns": np.zeros(0) if residency is None else residency.time_ns,
        "resident_bytes": np.zeros(0) if residency is None else residency.resident_bytes.ravel(),
    }
    columns = {key: columns[key].astype(dtype) for key, dtype in PROFILE_COLUMNS.items()}
    _check_hints(recording.hints, recording.step_count, check)
    _check_copies(recording.copies, recording.step_count, check)
    _check_phases(recording.phases, check)
    _check_columns(columns, len(recording.tensor_names), check)
    return columns


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Load a file of :func:`save_recording`.

    It may come from a stranger: it is read as data, within bounds of size and count.

    Raises UmemError if the file cannot be read or holds no valid recording; the message names file,
    place and remedy.
    """
    check_argument("path", path, (str, os.PathLike), "give the path of a profile")
    header, columns = read_columns(
        path, ProfileHeader, PROFILE_COLUMNS, noun="a profile of umem", error=UmemError
    )
    check = Checker(os.fspath(path), UmemError)
    _check_hints(header.hints, len(columns["step_start_ns"]), check)
    _check_copies(header.copies, len(columns["step_start_ns"]), check)
    _check_phases(header.phases, check)
    _check_columns(columns, len(header.tensor_names), check)
    fields: dict[str, Any] = {key: columns[key] for key in _OWNER_COLUMNS | _STEP_COLUMNS}
    for key in ProfileHeader.model_fields.keys() - {"format"}:
        value = getattr(header, key)
        fields[key] = tuple(value) if isinstance(value, list) else value
    samples, sizes = columns["residency_ns"], columns["resident_bytes"].reshape(-1, _CLASSES)
    return Recording(
        **fields,
        records=MigrationRecords(*(columns[key] for key in RECORD_COLUMNS)),
        residency=Residency(samples, sizes) if len(samples) else None,
        shares=Shares(*(columns[key] for key in _SHARE_COLUMNS)),
    )


# Checks that a profile does not contradict itself.


def _check_hints(hints: Sequence[HintReport | None], steps: int, check: Checker) -> None:
    if len(hints) not in (0, max(steps, 1)):
        check.refuse("hints", f"{len(hints)} entries for {steps} steps: copy the file again")
    for step, report in enumerate(hints):
        if report is None:
            continue
        figures = [getattr(report, name) for name in HINT_TOTALS]
        for use in report.uses:
            figures += [getattr(use, name) for name in HINT_FIGURES]
            if use.op not in HINT_OPS:
                check.refuse(f"hints[{step}].uses", f"{use.op!r:.40} is none of {HINT_OPS}")
        for figure in figures:
            if not 0 <= figure <= _LARGEST_FIGURE:
                check.refuse(f"hints[{step}]", f"{figure} is not from 0 to {_LARGEST_FIGURE}")


def _check_copies(copies: Sequence[Sequence[Traffic]], steps: int, check: Checker) -> None:
    if len(copies) not in (0, max(steps, 1)):
        check.refuse("copies", f"{len(copies)} entries for {steps} steps: copy the file again")
    for step, traffic in enumerate(copies):
        for it in traffic:
            for figure, most in (
                (it.bytes, _LARGEST_FIGURE),
                (it.count, _LARGEST_FIGURE),
                (it.seconds, _LONGEST_S),
            ):
                if not 0 <= figure <= most:
                    check.refuse(f"copies[{step}]", f"{figure} is not from 0 to {most}")


def _check_phases(phases: Sequence[NamedRange], check: Checker) -> None:
    for index, phase in enumerate(phases):
        if not 0 <= phase.start_ns <= phase.end_ns <= _LONGEST_NS:
            times = f"{phase.start_ns} to {phase.end_ns}"
            check.refuse(f"phases[{index}]", f"{times} is no time from 0 to {_LONGEST_NS}")


def _check_columns(columns: Mapping[str, npt.NDArray[Any]], names: int, check: Checker) -> None:
    for table, most in _TABLES:
        first = next(iter(table))
        if len(columns[first]) > most:
            check.refuse(first, f"{len(columns[first])} entries: at most {most} fit")
        for key, dtype in table.items():
            check.require_column(key, columns[key], dtype, len(columns[first]))
    samples = len(columns["residency_ns"])
    check.require_column("resident_bytes", columns["resident_bytes"], np.int64, samples * _CLASSES)
    for key, low, high in (
        ("kind", 0, max(RecordKind)),
        ("start_ns", 0, _LONGEST_NS),
        ("end_ns", 0, _LONGEST_NS + _LARGEST),
        ("bytes", 0, _LARGEST),
        ("faults", 0, _LARGEST),
        ("cause", 0, len(CAUSE_OF_NUMBER) - 1),
        ("access", 0, 4),
        ("tensor_class", UNKNOWN, _CLASSES - 1),
        ("tensor", UNKNOWN, names - 1),
        ("step_start_ns", 0, _LONGEST_NS),
        ("step_end_ns", 0, _LONGEST_NS),
        ("residency_ns", 0, _LARGEST_FIGURE),
        ("resident_bytes", 0, _LARGEST_FIGURE),
        ("share_record", 0, len(columns["kind"]) - 1),
        ("share_bytes", 1, _LARGEST),
        ("share_tensor_class", UNKNOWN, _CLASSES - 1),
        ("share_tensor", UNKNOWN, names - 1),
    ):
        check.require_range(key, columns[key], low, high)
    start, end, record = columns["step_start_ns"], columns["step_end_ns"], columns["share_record"]
    length_ns = columns["end_ns"] - columns["start_ns"]
    is_transfer = columns["kind"] <= max(TRANSFERS)
    # Floats are exact as far as a transfer can be long, and do not wrap around beyond.
    shared = np.bincount(record, columns["share_bytes"], len(columns["kind"]))

    def refuse(key: str, bad: npt.NDArray[np.bool_], why: str) -> None:
        check.refuse_where(bad, key, lambda at: f"{columns[key][at]} is {why}")

    for key in ("start_ns", "residency_ns", "share_record"):
        refuse(key, np.diff(columns[key], prepend=0) < 0, "before the one in front of it")
    too_long = (length_ns < 0) | (length_ns > _LARGEST)
    refuse("end_ns", too_long, f"not from 0 to {_LARGEST} after its start")
    refuse("step_end_ns", end < start, "before its start")
    refuse("step_start_ns", start < np.append(0, end)[: len(start)], "before the last end")
    refuse("share_record", ~is_transfer[record], "a record of no transfer")
    too_much = (shared > columns["bytes"])[record]
    refuse("share_bytes", too_much, "more than its transfer has, with its other shares")
