"""Reads recordings from the SQLite exports of Nsight Systems.

Tables and columns are those of its documentation ("SQLite Schema Reference" in the User Guide). It
leaves out tables that would be empty.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from umem.core.errors import UmemError
from umem.io.files import begins_with
from umem.io.problems import visible
from umem.telemetry.phases import PHASE_PREFIX, STEP_PREFIX
from umem.telemetry.records import (
    CAUSE_OF_NUMBER,
    MAX_RECORDS,
    UNKNOWN,
    Integers,
    MigrationRecords,
    NamedRange,
    Recording,
    RecordKind,
    concatenate,
    make_records,
)

__all__ = ["EXPORT_AGAIN", "is_nsys_export", "read_nsys"]

MAX_RANGES = 2**16
_ROWS_AT_ONCE = 2**16
_LONGEST_TEXT = 2**10
_LATEST_NS = 2**62
_LARGEST = 2**42 - 1
_MAGIC = b"SQLite format 3\x00"
_RANGE_TYPES = (59, 60)  # NvtxPushPopRange, NvtxStartEndRange of ENUM_NSYS_EVENT_TYPE

_UM_KINDS = {11: RecordKind.TO_DEVICE, 12: RecordKind.TO_HOST, 13: RecordKind.BETWEEN_DEVICES}
"""``CUDA_MEMCPY_KIND_UVM_HTOD``, ``_DTOH`` and ``_DTOD`` of ENUM_CUDA_MEMCPY_OPER."""

_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
_GPU_FAULTS = "CUDA_UM_GPU_PAGE_FAULT_EVENTS"
_CPU_FAULTS = "CUDA_UM_CPU_PAGE_FAULT_EVENTS"
_NVTX = "NVTX_EVENTS"
_GPUS = "TARGET_INFO_GPU"
_ANY_OF = (_MEMCPY, _MEMSET, "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME")

EXPORT_AGAIN = "export it again with `nsys export --type sqlite`"


@dataclass(frozen=True)
class _Export:
    place: str
    database: sqlite3.Connection
    tables: frozenset[str]

    def columns(self, table: str) -> frozenset[str]:
        return frozenset(
            str(row[1]) for row in self.database.execute(f"PRAGMA table_info({table})")
        )

    def refuse(self, table: str, why: str) -> UmemError:
        return UmemError(f"{self.place}: table {table}: {why}")


def is_nsys_export(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a SQLite database, as no other file of umem's is."""
    return begins_with(path, _MAGIC)


def read_nsys(path: str | os.PathLike[str], limit: int = MAX_RECORDS) -> Recording:
    """Read the memory operations of a run that Nsight Systems recorded.

    Steps and phases are known if the run used :func:`umem.profile` and its NVTX ranges were
    recorded. Tensor classes are unknown: Nsight Systems does not know umem's blocks.

    The file of ``nsys export --type sqlite`` may come from a stranger: it is opened read-only, and
    read within bounds of size and count.

    Raises UmemError if the file cannot be read or is no such export; the message names file, table
    and remedy.
    """
    place = os.fspath(path)
    with _errors(place), closing(_open(place)) as database:
        names = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        export = _Export(place, database, frozenset(str(row[0]) for row in names))
        if not export.tables.intersection(_ANY_OF):
            raise UmemError(
                f"{place}: holds nothing of CUDA: it is not an export of Nsight Systems, or the "
                "run was recorded without --trace=cuda"
            )
        return _recording(export, concatenate(_chunks(export, limit)))


def _open(place: str) -> sqlite3.Connection:
    # Immutable: no journal of the file is followed, and no file is made beside it.
    uri = f"file:{quote(os.path.abspath(place))}?mode=ro&immutable=1"
    database = sqlite3.connect(uri, uri=True)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2**24)
    database.text_factory = lambda text: text.decode("utf-8", "replace")
    for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON"):
        database.execute(f"PRAGMA {pragma}")
    return database


@contextmanager
def _errors(place: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the second: an error quotes such a name
        reason = visible(str(error))  # it quotes the file
        raise UmemError(f"{place}: cannot be read ({reason}): {EXPORT_AGAIN}") from error


def _chunks(export: _Export, limit: int) -> Iterator[MigrationRecords]:
    count = 0
    for table, columns, optional in (
        (_MEMCPY, ("start", "end", "bytes", "copyKind"), ("virtualAddress", "migrationCause")),
        (_MEMSET, ("start", "end", "bytes"), ()),
        (_GPU_FAULTS, ("start", "end", "address", "numberOfPageFaults", "faultAccessType"), ()),
        (_CPU_FAULTS, ("start", "address"), ()),
    ):
        if table not in export.tables:
            continue
        for block in _rows(export, table, columns, optional):
            count += len(block)
            if count > limit:
                raise export.refuse(
                    table,
                    f"more than {limit} records with those before it: record fewer steps, or "
                    "export a part with --filter-time",
                )
            yield _records(table, block)


def _rows(
    export: _Export, table: str, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[Integers]:
    """Blocks of rows, one column for each name; an optional one that is missing is 0."""
    there = export.columns(table)
    for name in required:
        if name not in there:
            raise export.refuse(
                table, f"no column {name}: {EXPORT_AGAIN}, of a newer Nsight Systems"
            )
    wrong = [f"typeof(\"{name}\") <> 'integer'" for name in required]
    wrong += [
        f"typeof(\"{name}\") NOT IN ('integer', 'null')" for name in optional if name in there
    ]
    bad = export.database.execute(
        f"SELECT rowid FROM {table} WHERE {' OR '.join(wrong)} LIMIT 1"
    ).fetchone()
    if bad:
        raise export.refuse(table, f"row {bad[0]} has a value that is not a whole number")
    chosen = [f'"{name}"' for name in required]
    chosen += [f'COALESCE("{name}", 0)' if name in there else "0" for name in optional]
    cursor = export.database.execute(f"SELECT {', '.join(chosen)} FROM {table}")
    while rows := cursor.fetchmany(_ROWS_AT_ONCE):
        block = np.array(rows, np.int64)
        times = block[:, :2] if "end" in required else block[:, :1]
        if times.min() < 0 or times.max() > _LATEST_NS:
            raise export.refuse(table, f"a time is not from 0 to {_LATEST_NS} ns")
        for name in {"bytes", "numberOfPageFaults"}.intersection(required):
            values = block[:, required.index(name)]
            if values.min() < 0 or values.max() > _LARGEST:
                raise export.refuse(table, f"{name} is not from 0 to {_LARGEST}")
        yield block


def _records(name: str, block: Integers) -> MigrationRecords:
    if name == _MEMCPY:
        start, end, size, copied, address, cause = block.T
        kind = np.full(len(block), RecordKind.MEMCPY)
        for number, of_kind in _UM_KINDS.items():
            kind[copied == number] = of_kind
        moved = kind != RecordKind.MEMCPY
        columns: dict[str, Any] = {
            "kind": kind,
            "address": np.where(moved, address, 0),
            "bytes": size,
            "cause": _small(np.where(moved, cause, 0), len(CAUSE_OF_NUMBER)),
            "copy_kind": _small(np.where(moved, 0, copied), 256),
        }
    elif name == _MEMSET:
        start, end, size = block.T
        columns = {"kind": RecordKind.MEMSET, "bytes": size}
    elif name == _GPU_FAULTS:
        start, end, address, faults, access = block.T
        columns = {"kind": RecordKind.GPU_FAULT, "address": address, "faults": faults}
        columns["access"] = _small(access, 5)
    else:
        start, address = block.T
        end = start
        columns = {"kind": RecordKind.CPU_FAULT, "address": address, "faults": 1}
    return make_records(len(block), start_ns=start, end_ns=np.maximum(start, end), **columns)


def _small(values: Integers, count: int) -> Integers:
    """Numbers from 0 to count - 1; others become 0, which means unknown."""
    return np.where((values >= 0) & (values < count), values, 0)


def _recording(export: _Export, records: MigrationRecords) -> Recording:
    ranges = _ranges(export)
    times = [*records.start_ns[:1].tolist(), *(it.start_ns for it in ranges)]
    begin_ns = min(times, default=0)
    ends = [int(records.end_ns.max(initial=begin_ns)), *(it.end_ns for it in ranges)]
    ranges = [NamedRange(it.name, it.start_ns - begin_ns, it.end_ns - begin_ns) for it in ranges]
    steps = [it for it in ranges if it.name.startswith(STEP_PREFIX)]
    notes = _notes(export)
    if any(later.start_ns < earlier.end_ns for earlier, later in pairwise(steps)):
        notes.append(
            "the steps of several processes overlap and cannot be told apart: the figures are of "
            "the whole recording"
        )
        steps = []
    elif not steps:
        notes.append("no step was marked: the figures are of the whole recording")
    return Recording(
        workload=Path(export.place).stem,
        hardware=_gpus(export),
        policy="unknown",
        source="nsys",
        duration_ns=max(ends) - begin_ns,
        records=records.since(begin_ns),
        tensor_class=np.full(len(records), UNKNOWN, np.int8),
        tensor=np.full(len(records), UNKNOWN, np.int32),
        tensor_names=(),
        step_start_ns=np.array([step.start_ns for step in steps], np.int64),
        step_end_ns=np.array([step.end_ns for step in steps], np.int64),
        phases=tuple(
            replace(it, name=it.name.removeprefix(PHASE_PREFIX))
            for it in ranges
            if it.name.startswith(PHASE_PREFIX)
        ),
        dropped=0,
        notes=tuple(notes),
    )


def _notes(export: _Export) -> list[str]:
    notes = ["Nsight Systems does not know umem's tensors: all traffic is of class other"]
    for table, where, option in (
        (_GPU_FAULTS, "the device", "--cuda-um-gpu-page-faults=true"),
        (_CPU_FAULTS, "the host", "--cuda-um-cpu-page-faults=true"),
    ):
        if table not in export.tables:
            notes.append(
                f"there are no page faults on {where}: either there were none, or the run was "
                f"recorded without {option}"
            )
    return notes


def _ranges(export: _Export) -> list[NamedRange]:
    """The NVTX ranges that umem opened, by their start."""
    if _NVTX not in export.tables:
        return []
    there = export.columns(_NVTX)
    if not {"start", "end", "eventType", "text"} <= there:
        return []
    # A registered name is in a table of its own. It is looked up here: a join would take time and
    # memory in proportion to the product of both tables, where many rows share an id.
    registered = _registered_names(export) if "textId" in there else {}
    text_id = "textId" if registered else "NULL"
    rows = export.database.execute(
        f"SELECT substr(text, 1, {_LONGEST_TEXT}), {text_id}, e.start, e.end FROM {_NVTX} AS e "
        f"WHERE eventType IN {_RANGE_TYPES} AND typeof(e.start) = 'integer' "
        f"AND typeof(e.end) = 'integer' AND e.start BETWEEN 0 AND e.end AND e.end <= {_LATEST_NS} "
        f"AND ({_is_of_umem('text')} OR text IS NULL AND {text_id} IS NOT NULL) ORDER BY e.start"
    )
    found = []
    for text, number, start, end in rows:
        name = registered.get(number) if text is None else str(text)
        if name is not None:
            found.append(NamedRange(name, start, end))
        if len(found) > MAX_RANGES:
            raise export.refuse(_NVTX, f"more than {MAX_RANGES} ranges of umem: record fewer steps")
    return found


def _is_of_umem(column: str) -> str:
    """Condition of SQL: a text begins like the name of a range that umem opens."""
    return f"({column} GLOB '{STEP_PREFIX}*' OR {column} GLOB '{PHASE_PREFIX}*')"


def _registered_names(export: _Export) -> dict[int, str]:
    """Names of umem's ranges by id; the first one of an id."""
    if not {"id", "value"} <= export.columns("StringIds"):
        return {}
    rows = export.database.execute(
        f"SELECT id, substr(value, 1, {_LONGEST_TEXT}) FROM StringIds WHERE {_is_of_umem('value')}"
    )
    names: dict[int, str] = {}
    for number, name in rows:
        names.setdefault(number, str(name))
        if len(names) > MAX_RANGES:
            raise export.refuse("StringIds", f"more than {MAX_RANGES} names of umem's ranges")
    return names


def _gpus(export: _Export) -> str:
    if _GPUS not in export.tables or "name" not in export.columns(_GPUS):
        return "unknown"
    names = export.database.execute(f"SELECT DISTINCT name FROM {_GPUS} LIMIT 16").fetchall()
    return ", ".join(str(row[0])[:_LONGEST_TEXT] for row in names) or "unknown"
