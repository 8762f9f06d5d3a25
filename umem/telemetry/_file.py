"""Recordings as files."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from umem.classes import TensorClass
from umem.documents import (
    Document,
    digits,
    digits_text,
    integers,
    read_document,
    refuse,
    require_format,
    require_keys,
    shown,
    text,
    texts,
    write_document,
)
from umem.errors import UmemError
from umem.report import Source
from umem.telemetry._attribution import UNKNOWN, Shares, no_shares
from umem.telemetry._file_checks import refuse_outside, refuse_where, require_lengths
from umem.telemetry._file_extras import EXTRA_KEYS, extra_columns, read_extras
from umem.telemetry._recording import NamedRange, Recording
from umem.telemetry._records import CAUSE_OF_NUMBER, MAX_RECORDS, MigrationRecords, RecordKind

__all__ = ["PROFILE_FORMAT", "load_recording", "save_recording"]

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
