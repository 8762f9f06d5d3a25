"""Checks on the columns of a saved recording."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import HintReport, HintUse, Source
from umem.io.documents import (
    Document,
    digits,
    digits_text,
    integers,
    numbers,
    read_document,
    refuse,
    require_format,
    require_keys,
    shown,
    text,
    texts,
    write_document,
)
from umem.telemetry.nsys import is_nsys_export, read_nsys
from umem.telemetry.records import (
    CAUSE_OF_NUMBER,
    MAX_RECORDS,
    MAX_SAMPLES,
    UNKNOWN,
    MigrationRecords,
    NamedRange,
    Recording,
    RecordKind,
    Residency,
    Shares,
    no_shares,
)
from umem.telemetry.reports import HINT_FIGURES, HINT_OPS, HINT_TOTALS

__all__ = [
    "EXTRA_KEYS",
    "PROFILE_FORMAT",
    "extra_columns",
    "load_recording",
    "read_extras",
    "read_recording",
    "refuse_outside",
    "refuse_where",
    "require_lengths",
    "save_recording",
]


def require_lengths(document: Document, columns: dict[str, Any]) -> None:
    """Refuse columns of different lengths."""
    first, *others = columns
    for key in others:
        if len(columns[key]) != len(columns[first]):
            refuse(
                document,
                key,
                f"{len(columns[key])} entries, and {first} has {len(columns[first])}: copy the "
                "file again",
            )


def refuse_outside(
    document: Document, key: str, column: npt.NDArray[Any], low: int, high: int
) -> None:
    """Refuse a column with a value outside of a range."""
    bad = (column < low) | (column > high)
    refuse_where(document, key, bad, f"not from {low} to {high}")


def refuse_where(document: Document, key: str, bad: npt.NDArray[np.bool_], why: str) -> None:
    """Refuse a column at the first place that is bad."""
    if bad.any():
        at = int(bad.argmax())
        refuse(document, f"{key}[{at}]", f"{shown(document.data[key][at])} is {why}")


# What a saved recording has beside its records: hints, residency, and the ideal time.

_CLASSES = tuple(TensorClass)
_MOST_REPORTS = 2**16
_MOST_USES = 2**21
_LONGEST_S = 1e9
_LARGEST_EXTRA = 2**53
_NO_ENGINE = -1
"""In the place of totals of a step that no engine drove."""

_TIMES = ("driver_s", "late_s")
_FIGURE_KEYS = tuple(f"hint_{name}" for name in HINT_FIGURES)
_TOTAL_KEYS = tuple(f"hint_{name}" for name in HINT_TOTALS)
_HINT_KEYS = ("hint_step", "hint_op", "hint_class", *_FIGURE_KEYS)
EXTRA_KEYS = (
    "ideal_s",
    *_TOTAL_KEYS,
    *_HINT_KEYS,
    "residency_ns",
    "resident_bytes",
)
"""Keys that the second format adds: an engine's totals by step, hints by step, operation and
class, and samples, each of which has as many bytes as there are classes."""


def extra_columns(recording: Recording) -> dict[str, Any]:
    """The values of :data:`EXTRA_KEYS`."""
    uses = [
        (step, use)
        for step, report in enumerate(recording.hints)
        if report is not None
        for use in report.uses
    ]
    residency = recording.residency
    return {
        "ideal_s": recording.ideal_s,
        **{
            key: [_NO_ENGINE if it is None else getattr(it, name) for it in recording.hints]
            for key, name in zip(_TOTAL_KEYS, HINT_TOTALS, strict=True)
        },
        "hint_step": [step for step, _ in uses],
        "hint_op": digits_text(np.array([HINT_OPS.index(use.op) for _, use in uses])),
        "hint_class": digits_text(np.array([use.tensor_class.number for _, use in uses])),
        **{
            key: [getattr(use, name) for _, use in uses]
            for key, name in zip(_FIGURE_KEYS, HINT_FIGURES, strict=True)
        },
        "residency_ns": [] if residency is None else residency.time_ns.tolist(),
        "resident_bytes": [] if residency is None else residency.resident_bytes.ravel().tolist(),
    }


def read_extras(document: Document, steps: int) -> dict[str, Any]:
    """Fields of a recording that :func:`extra_columns` wrote.

    Parameters
    ----------
    document
        With the keys of :data:`EXTRA_KEYS`.
    steps
        Marked steps of the recording.

    Raises
    ------
    UmemError
        If they contradict themselves or the steps.
    """
    return {
        "ideal_s": _ideal_s(document),
        "hints": _hints(document, steps),
        "residency": _residency(document),
    }


def _ideal_s(document: Document) -> float | None:
    value = document.data["ideal_s"]
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= _LONGEST_S:
        refuse(document, "ideal_s", f"{shown(value)} is no time above 0 in seconds, nor null")
    return float(value)


def _hints(document: Document, steps: int) -> tuple[HintReport | None, ...]:
    totals = {key: integers(document, key, _MOST_REPORTS, np.int64) for key in _TOTAL_KEYS}
    require_lengths(document, totals)
    first = totals[_TOTAL_KEYS[0]]
    for key, column in totals.items():
        refuse_outside(document, key, column, _NO_ENGINE, _LARGEST_EXTRA)
        differ = (column == _NO_ENGINE) != (first == _NO_ENGINE)
        refuse_where(document, key, differ, f"not of the steps that {_TOTAL_KEYS[0]} has")
    if len(first) not in (0, max(steps, 1)):
        refuse(
            document, _TOTAL_KEYS[0], f"{len(first)} entries for {steps} steps: copy the file again"
        )
    uses = _uses(document, first)
    rows = zip(*(column.tolist() for column in totals.values()), strict=True)
    return tuple(
        None if row[0] == _NO_ENGINE else HintReport(tuple(uses[step]), *row)
        for step, row in enumerate(rows)
    )


def _uses(document: Document, totals: npt.NDArray[np.int64]) -> list[list[HintUse]]:
    column: dict[str, npt.NDArray[Any]] = {
        "hint_step": integers(document, "hint_step", _MOST_USES, np.int64),
        "hint_op": digits(document, "hint_op", _MOST_USES, len(HINT_OPS) - 1),
        "hint_class": digits(document, "hint_class", _MOST_USES, len(_CLASSES) - 1),
    }
    for key, name in zip(_FIGURE_KEYS, HINT_FIGURES, strict=True):
        if name in _TIMES:
            column[key] = numbers(document, key, _MOST_USES)
        else:
            column[key] = integers(document, key, _MOST_USES, np.int64)
    require_lengths(document, column)
    refuse_outside(document, "hint_step", column["hint_step"], 0, len(totals) - 1)
    idle = totals[column["hint_step"]] == _NO_ENGINE
    refuse_where(document, "hint_step", idle, "a step without an engine")
    for key, name in zip(_FIGURE_KEYS, HINT_FIGURES, strict=True):
        largest = int(_LONGEST_S) if name in _TIMES else _LARGEST_EXTRA
        refuse_outside(document, key, column[key], 0, largest)
    uses: list[list[HintUse]] = [[] for _ in totals]
    rows = zip(*(column[key].tolist() for key in _HINT_KEYS), strict=True)
    for step, op, number, *figures in rows:
        use = HintUse(
            HINT_OPS[op], _CLASSES[number], **dict(zip(HINT_FIGURES, figures, strict=True))
        )
        uses[step].append(use)
    return uses


def _residency(document: Document) -> Residency | None:
    times = integers(document, "residency_ns", MAX_SAMPLES, np.int64)
    sizes = integers(document, "resident_bytes", MAX_SAMPLES * len(_CLASSES), np.int64)
    if len(sizes) != len(times) * len(_CLASSES):
        refuse(
            document,
            "resident_bytes",
            f"{len(sizes)} entries for {len(times)} samples of {len(_CLASSES)} classes: copy the "
            "file again",
        )
    for key, column in (("residency_ns", times), ("resident_bytes", sizes)):
        refuse_outside(document, key, column, 0, _LARGEST_EXTRA)
    late = np.diff(times, prepend=0) < 0
    refuse_where(document, "residency_ns", late, "before the sample in front of it")
    return Residency(times, sizes.reshape(-1, len(_CLASSES))) if len(times) else None


# Recordings as files.

PROFILE_FORMAT = "umem-profile/2"
_FIRST_FORMAT = "umem-profile/1"
"""Without hints, residency and ideal time."""

MAX_MARKS = 2**16
"""Most steps, phases, names and notes."""

_SOURCES = {
    _FIRST_FORMAT: ("cupti", "nsys", "none"),
    PROFILE_FORMAT: get_args(Source),
}
_NO_CLASS = len(TensorClass)
"""Digit of a class that is unknown."""

_LONGEST_NS = 2**53
"""About a hundred days, and exact as a number of any program."""

_LARGEST = 2**42 - 1
"""Most bytes, faults and nanoseconds of one record: no sum of them leaves 64 bits."""

_TEXTS = ("workload", "hardware", "policy", "source")
_DIGITS = {"kind": max(RecordKind), "cause": len(CAUSE_OF_NUMBER) - 1, "access": 4}
_RECORD_KEYS = (
    "kind",
    "gap_ns",
    "length_ns",
    "address",
    "bytes",
    "faults",
    "cause",
    "access",
    "copy_kind",
    "tensor_class",
    "tensor",
)
_SHARE_KEYS = ("share_record", "share_bytes", "share_class", "share_tensor")
"""Optional keys of the second format: :class:`umem.telemetry.Shares` by column."""

_MAX_SHARES = 4 * MAX_RECORDS
"""Of the 2 MiB of a transfer at most one large block ends and one begins, before and after it."""

_KEYS = (
    "format",
    *_TEXTS,
    "duration_ns",
    "dropped",
    "notes",
    "tensor_names",
    "step_start_ns",
    "step_end_ns",
    "phase_names",
    "phase_start_ns",
    "phase_end_ns",
    *_RECORD_KEYS,
)
"""Keys of the first format, all required: the fields of :class:`umem.telemetry.Recording` and of
its records, by column. A record's times are the gap since the start of the one before it (since the
start of the recording for the first), and its length."""


def save_recording(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Save a recording, compressed.

    The file is replaced in one piece, missing folders are made, and equal recordings give equal
    bytes.

    Raises
    ------
    UmemError
        If the file cannot be written, would be too large, or could not be loaded again; an old file
        is then as it was.
    """
    marks = max(recording.step_count, len(recording.phases))
    if marks > MAX_MARKS:
        raise UmemError(f"{path}: not written: {marks} steps or phases; at most {MAX_MARKS} fit")
    records = recording.records
    data = {
        "format": PROFILE_FORMAT,
        **{key: getattr(recording, key) for key in _TEXTS},
        "duration_ns": recording.duration_ns,
        "dropped": recording.dropped,
        "notes": list(recording.notes),
        "tensor_names": list(recording.tensor_names),
        "step_start_ns": recording.step_start_ns.tolist(),
        "step_end_ns": recording.step_end_ns.tolist(),
        "phase_names": [phase.name for phase in recording.phases],
        "phase_start_ns": [phase.start_ns for phase in recording.phases],
        "phase_end_ns": [phase.end_ns for phase in recording.phases],
        "kind": digits_text(records.kind),
        "gap_ns": np.diff(records.start_ns, prepend=0).tolist(),
        "length_ns": (records.end_ns - records.start_ns).tolist(),
        "address": records.address.tolist(),
        "bytes": records.bytes.tolist(),
        "faults": records.faults.tolist(),
        "cause": digits_text(records.cause),
        "access": digits_text(records.access),
        "copy_kind": records.copy_kind.tolist(),
        "tensor_class": _class_digits(recording.tensor_class),
        "tensor": recording.tensor.tolist(),
        **extra_columns(recording),
        **_share_columns(recording.shares),
    }
    _recording_in(Document(f"{os.fspath(path)}: not written", UmemError, data), PROFILE_FORMAT)
    write_document(data, path, UmemError)


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Load a recording from a file.

    Parameters
    ----------
    path
        A file of format ``umem-profile/1`` or ``/2``, compressed with gzip or plain JSON. It may
        come from a stranger: it is read as data, within bounds of size and count.

    Raises
    ------
    UmemError
        If the file cannot be read or holds no valid recording; the message names file, place and
        remedy.
    """
    document = read_document(path, UmemError)
    return _recording_in(document, require_format(document, "a profile of umem", tuple(_SOURCES)))


def _recording_in(document: Document, said: str) -> Recording:
    """What a document of a format holds; refused where it is no valid recording."""
    extras = EXTRA_KEYS if said == PROFILE_FORMAT else ()
    has_shares = extras and any(key in document.data for key in _SHARE_KEYS)
    require_keys(
        document, "", document.data, (*_KEYS, *extras, *(_SHARE_KEYS if has_shares else ()))
    )
    source, sources = text(document, "source"), _SOURCES[said]
    if source not in sources:
        refuse(document, "source", f"{shown(source)} is none of {', '.join(sources)}")
    names = texts(document, "tensor_names", MAX_RECORDS)
    records, tensor_class, tensor = _records(document, len(names))
    step_start, step_end = _ranges(document, "step")
    phase_names = texts(document, "phase_names", MAX_MARKS)
    phase_start, phase_end = _ranges(document, "phase")
    require_lengths(document, {"phase_names": phase_names, "phase_start_ns": phase_start})
    refuse_where(document, "step_start_ns", _overlaps(step_start, step_end), "before the last end")
    return Recording(
        workload=text(document, "workload"),
        hardware=text(document, "hardware"),
        policy=text(document, "policy"),
        source=cast(Source, source),
        duration_ns=_count(document, "duration_ns"),
        records=records,
        tensor_class=tensor_class,
        tensor=tensor,
        tensor_names=names,
        step_start_ns=step_start,
        step_end_ns=step_end,
        phases=tuple(
            NamedRange(name, int(start), int(end))
            for name, start, end in zip(phase_names, phase_start, phase_end, strict=True)
        ),
        dropped=_count(document, "dropped"),
        notes=texts(document, "notes", MAX_MARKS),
        **(read_extras(document, len(step_start)) if extras else {}),
        shares=_shares(document, records, len(names)) if has_shares else no_shares(),
    )


def _share_columns(shares: Shares) -> dict[str, Any]:
    if not len(shares):
        return {}
    return {
        "share_record": shares.record.tolist(),
        "share_bytes": shares.bytes.tolist(),
        "share_class": _class_digits(shares.tensor_class),
        "share_tensor": shares.tensor.tolist(),
    }


def _class_digits(tensor_class: npt.NDArray[np.int8]) -> str:
    return digits_text(np.where(tensor_class == UNKNOWN, _NO_CLASS, tensor_class))


def _classes(document: Document, key: str, most: int) -> npt.NDArray[np.int8]:
    found = digits(document, key, most, _NO_CLASS).astype(np.int8)
    return np.where(found == _NO_CLASS, UNKNOWN, found).astype(np.int8)


def _shares(document: Document, records: MigrationRecords, names: int) -> Shares:
    shares = Shares(
        integers(document, "share_record", _MAX_SHARES, np.int64),
        integers(document, "share_bytes", _MAX_SHARES, np.int64),
        _classes(document, "share_class", _MAX_SHARES),
        integers(document, "share_tensor", _MAX_SHARES, np.int32),
    )
    columns = (shares.record, shares.bytes, shares.tensor_class, shares.tensor)
    require_lengths(document, dict(zip(_SHARE_KEYS, columns, strict=True)))
    refuse_outside(document, "share_record", shares.record, 0, len(records) - 1)
    back = np.diff(shares.record, prepend=0) < 0
    refuse_where(document, "share_record", back, "before the record in front of it")
    refuse_where(
        document, "share_record", ~records.is_transfer()[shares.record], "a record of no transfer"
    )
    refuse_outside(document, "share_bytes", shares.bytes, 1, _LARGEST)
    refuse_outside(document, "share_tensor", shares.tensor, UNKNOWN, names - 1)
    # Floats are exact as far as a transfer can be long, and do not wrap around beyond.
    together = np.bincount(shares.record, shares.bytes, len(records))
    too_much = (together > records.bytes)[shares.record]
    refuse_where(document, "share_bytes", too_much, "more than its transfer has, with its others")
    return shares


def _records(
    document: Document, names: int
) -> tuple[MigrationRecords, npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    column: dict[str, npt.NDArray[Any]] = {
        key: digits(document, key, MAX_RECORDS, largest) for key, largest in _DIGITS.items()
    }
    for key in ("gap_ns", "length_ns", "address", "bytes", "faults"):
        column[key] = integers(document, key, MAX_RECORDS, np.int64)
    column["copy_kind"] = integers(document, "copy_kind", MAX_RECORDS, np.uint8)
    tensor_class = _classes(document, "tensor_class", MAX_RECORDS)
    tensor = integers(document, "tensor", MAX_RECORDS, np.int32)
    require_lengths(document, {**column, "tensor_class": tensor_class, "tensor": tensor})
    refuse_outside(document, "tensor", tensor, UNKNOWN, names - 1)
    refuse_outside(document, "gap_ns", column["gap_ns"], 0, _LONGEST_NS)
    for key in ("length_ns", "bytes", "faults"):
        refuse_outside(document, key, column[key], 0, _LARGEST)
    if sum(document.data["gap_ns"]) > _LONGEST_NS:
        refuse(document, "gap_ns", f"together more than {_LONGEST_NS} ns: record for less long")
    column["start_ns"] = np.cumsum(column.pop("gap_ns"))
    column["end_ns"] = column["start_ns"] + column.pop("length_ns")
    records = MigrationRecords(*(column[it.name] for it in fields(MigrationRecords)))
    return records, tensor_class, tensor


def _ranges(document: Document, what: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    start_key, end_key = f"{what}_start_ns", f"{what}_end_ns"
    start = integers(document, start_key, MAX_MARKS, np.int64)
    end = integers(document, end_key, MAX_MARKS, np.int64)
    require_lengths(document, {start_key: start, end_key: end})
    for key, times in ((start_key, start), (end_key, end)):
        refuse_outside(document, key, times, 0, _LONGEST_NS)
    refuse_where(document, end_key, end < start, "before its start")
    return start, end


def _overlaps(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    overlaps = np.zeros(len(start), np.bool_)
    overlaps[1:] = start[1:] < end[:-1]
    return overlaps


def _count(document: Document, key: str) -> int:
    value = document.data[key]
    if type(value) is not int or not 0 <= value <= _LONGEST_NS:
        refuse(document, key, f"{shown(value)} is not a whole number from 0 to {_LONGEST_NS}")
    return value


# Recordings from files, whoever made them.

_REPORT_ENDINGS = (".nsys-rep", ".qdrep")


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read what :meth:`umem.telemetry.Profile.save` or ``nsys export --type sqlite`` wrote.

    Parameters
    ----------
    path
        Told apart by its content. It may come from a stranger.

    Raises
    ------
    UmemError
        If it is neither, or cannot be read; the message names file, place and remedy.
    """
    place = os.fspath(path)
    if place.endswith(_REPORT_ENDINGS):
        raise UmemError(
            f"{place}: a report of Nsight Systems, which only it can read: export it with "
            f"`nsys export --type sqlite {os.path.basename(place)}` and give the result"
        )
    return read_nsys(path) if is_nsys_export(path) else load_recording(path)
