"""Nsight Systems' SQLite exports, in small databases of its schema.

Tables and columns are those of "SQLite Schema Reference" in its user guide, 2024 and later.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "TARGET_INFO_GPU": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, totalMemory INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": """
        start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
        correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
        copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER,
        srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER,
        migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER""",
    "CUPTI_ACTIVITY_KIND_MEMSET": """
        start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
        correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL,
        graphNodeId INTEGER, memKind INTEGER""",
    "CUDA_UM_CPU_PAGE_FAULT_EVENTS": """
        start INTEGER NOT NULL, globalPid INTEGER NOT NULL, address INTEGER NOT NULL,
        originalFaultPc INTEGER, CpuInstruction INTEGER NOT NULL, module INTEGER NOT NULL,
        unresolvedFaultPc INTEGER, sourceFile INTEGER, sourceLine INTEGER""",
    "CUDA_UM_GPU_PAGE_FAULT_EVENTS": """
        start INTEGER NOT NULL, end INTEGER NOT NULL, globalPid INTEGER NOT NULL,
        deviceId INTEGER NOT NULL, address INTEGER NOT NULL, numberOfPageFaults INTEGER NOT NULL,
        faultAccessType INTEGER NOT NULL""",
    "NVTX_EVENTS": """
        start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
        category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
        textId INTEGER, domainId INTEGER""",
}
T0 = 5_000_000_000
ADDRESS = 0x7F4C_0000_0000


def memcpy(start: int, end: int, size: int, kind: int, cause: int | None = None) -> dict[str, Any]:
    """A row; unified-memory transfers have a cause and an address."""
    row = {"start": T0 + start, "end": T0 + end, "deviceId": 0, "contextId": 1, "streamId": 7}
    row |= {"bytes": size, "copyKind": kind, "globalPid": 1}
    if cause is not None:
        row |= {"migrationCause": cause, "virtualAddress": ADDRESS + start}
    return row


def memset(start: int, end: int, size: int) -> dict[str, Any]:
    row = {"start": T0 + start, "end": T0 + end, "deviceId": 0, "contextId": 1, "streamId": 7}
    return row | {"value": 0, "bytes": size}


def gpu_fault(start: int, faults: int, access: int = 1) -> dict[str, Any]:
    row = {"start": T0 + start, "end": T0 + start + 5, "globalPid": 1, "deviceId": 0}
    return row | {
        "address": ADDRESS + start,
        "numberOfPageFaults": faults,
        "faultAccessType": access,
    }


def cpu_fault(start: int) -> dict[str, Any]:
    row = {"start": T0 + start, "globalPid": 1, "address": ADDRESS}
    return row | {"CpuInstruction": 1, "module": 1}


def nvtx(
    start: int, end: int | None, text: str | None, text_id: int | None = None
) -> dict[str, Any]:
    row = {"start": T0 + start, "end": None if end is None else T0 + end, "eventType": 60}
    return row | {"text": text, "textId": text_id}


Tables = dict[str, Sequence[dict[str, Any]]]

RUN: Tables = {
    "StringIds": [
        {"id": 1, "value": "main"},
        {"id": 2, "value": "umem step 1"},
        {"id": 3, "value": "somebody else's"},
    ],
    "TARGET_INFO_GPU": [{"id": 0, "name": "NVIDIA H200", "totalMemory": 1}],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [
        memcpy(100, 200, 2 << 20, 11, cause=2),
        memcpy(200, 250, 1 << 20, 11, cause=1),
        memcpy(300, 400, 1 << 16, 12, cause=4),
        memcpy(400, 410, 4096, 13, cause=5),
        memcpy(500, 600, 1000, 1),
        memcpy(610, 620, 500, 8),
        memcpy(1100, 1200, 4096, 11, cause=3),
    ],
    "CUPTI_ACTIVITY_KIND_MEMSET": [memset(700, 750, 24)],
    "CUDA_UM_GPU_PAGE_FAULT_EVENTS": [gpu_fault(90, 3), gpu_fault(95, 1, access=2)],
    "CUDA_UM_CPU_PAGE_FAULT_EVENTS": [cpu_fault(1050)],
    "NVTX_EVENTS": [
        nvtx(50, 1000, "umem step 0"),
        nvtx(1000, 2000, None, text_id=2),
        nvtx(60, 500, "umem phase forward"),
        nvtx(0, 3000, None, text_id=3),
        nvtx(70, None, "umem step 7"),  # never ended
    ],
}


def database(path: Path, tables: Tables) -> Path:
    """A database of these rows; tables are written only where there are rows, as nsys does."""
    with closing(sqlite3.connect(path)) as made, made:
        for table, rows in tables.items():
            made.execute(f"CREATE TABLE {table} ({SCHEMA[table]})")
            for row in rows:
                keys = ", ".join(f'"{key}"' for key in row)
                marks = ", ".join("?" * len(row))
                made.execute(f"INSERT INTO {table} ({keys}) VALUES ({marks})", [*row.values()])
    return path
