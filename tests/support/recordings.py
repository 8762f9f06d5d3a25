"""Recordings written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from umem.telemetry import Recording
from umem.telemetry.records import RECORD_COLUMNS, UNKNOWN, Integers, MigrationRecords, make_records

Row = tuple[int, int, int, int, int, int, int]
"""One record, in the order of the first columns of :class:`MigrationRecords`."""


def records_of(rows: Sequence[Row] | Integers) -> MigrationRecords:
    """Records from rows, or from a table."""
    table = np.asarray(rows, np.int64).reshape(-1, 7)
    return make_records(len(table), **dict(zip(RECORD_COLUMNS, table.T, strict=False)))


def make_recording(
    rows: Sequence[Row] = (),
    owners: Sequence[tuple[int, int]] = (),
    steps: Sequence[tuple[int, int]] = (),
    parts: Sequence[int] = (),
    **changes: Any,
) -> Recording:
    """Make a recording; further keywords are fields of :class:`Recording`.

    Parameters
    ----------
    rows
        Its records, by start.
    owners
        Class and tensor of each record; by default unknown.
    steps
        Begin and end of each step, ns.
    parts
        Rows that are further parts of the transfer before them.
    """
    unknown = [(UNKNOWN, UNKNOWN)] * len(rows)
    tensor_class, tensor = np.array(owners or unknown, np.int64).reshape(-1, 2).T
    step_start, step_end = np.array(steps, np.int64).reshape(-1, 2).T
    fields: dict[str, Any] = {
        "workload": "by hand",
        "hardware": "NVIDIA H200",
        "policy": "sft",
        "source": "cupti",
        "duration_ns": int(step_end.max(initial=0)),
        "records": replace(
            records_of(rows),
            tensor_class=tensor_class.astype(np.int8),
            tensor=tensor.astype(np.int32),
            is_part=np.isin(np.arange(len(rows)), parts),
        ),
        "tensor_names": (),
        "step_start_ns": step_start.copy(),
        "step_end_ns": step_end.copy(),
        "dropped": 0,
        "notes": (),
    }
    return Recording(**{**fields, **changes})
