"""From records to reports: what moved in each step, and in a typical one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.report import MeasuredReport, Traffic
from umem.telemetry.attribution import UNKNOWN
from umem.telemetry.hints import hint_row, hint_traffic
from umem.telemetry.recording import Parts, Recording
from umem.telemetry.records import CAUSE_OF_NUMBER, DIRECTION_OF_KIND, TRANSFERS, RecordKind

__all__ = ["TensorTraffic", "measured_row", "report_of", "step_reports", "tensor_traffic"]

_CLASSES = tuple(TensorClass)
_NS = 1e-9


@dataclass(frozen=True)
class TensorTraffic:
    """Unified-memory transfers with parts of one named tensor, over all steps or the recording."""

    name: str
    tensor_class: TensorClass
    bytes: int
    count: int


def step_reports(recording: Recording) -> tuple[MeasuredReport, ...]:
    """One report for each marked step, exact; one for the whole recording where none is marked.

    A record belongs to the step in which it starts. What starts outside of all steps is in no
    report.
    """
    parts = recording.parts()
    if not recording.step_count:
        everything = np.ones(len(recording.records), np.bool_)
        return (_report(recording, parts, everything, recording.duration_ns, 0, 0),)
    step = _step_of(recording)
    times_ns = recording.step_end_ns - recording.step_start_ns
    return tuple(
        _report(recording, parts, step == number, int(time_ns), 1, number)
        for number, time_ns in enumerate(times_ns)
    )


def report_of(recording: Recording) -> MeasuredReport:
    """The typical step: the one whose time is the median, as it was.

    Of an even number of steps it is the lower of the two in the middle, and of several that took as
    long the first. Because it is a step that occurred, its sums and shares hold. A recording
    without steps is reported as a whole.
    """
    reports = step_reports(recording)
    typical = sorted(reports, key=lambda it: it.step_s)[(len(reports) - 1) // 2]
    return replace(typical, step_count=recording.step_count)


def tensor_traffic(recording: Recording) -> tuple[TensorTraffic, ...]:
    """Named tensors by the bytes that moved, the most first; those that did not move are left out.

    Over all marked steps, or the whole recording where none is marked.
    """
    counted = recording.records.is_transfer()
    if recording.step_count:
        counted &= _step_of(recording) != UNKNOWN
    parts = recording.parts()
    parts = parts.taken(counted[parts.record] & (parts.tensor != UNKNOWN))
    names = len(recording.tensor_names)
    size_bytes = _sums(parts.bytes, parts.tensor, names)
    count = np.bincount(parts.tensor, minlength=names)
    found = np.full(names, TensorClass.OTHER.number)
    found[parts.tensor] = parts.tensor_class
    return tuple(
        TensorTraffic(
            recording.tensor_names[name],
            _CLASSES[found[name]],
            int(size_bytes[name]),
            int(count[name]),
        )
        for name in np.argsort(-size_bytes, kind="stable")
        if count[name]
    )


def measured_row(recording: Recording) -> dict[str, Any]:
    """Put a recording's report into plain values, for JSON.

    Returns
    -------
    dict
        The keys of :func:`report_row`, where a figure is None that a run does not
        tell, and those that only a run has. ``per_step`` has one entry for each marked step.
    """
    report = report_of(recording)
    unknown = dict.fromkeys(("lower_bound_s", "regret", "fault_pages", "stall_s"))
    return {
        "workload": report.workload,
        "planner": report.planner,
        "hardware": report.hardware,
        "policy": report.policy,
        **unknown,
        **_figures(report),
        "bytes": None if report.source == "none" else report.bytes_by_cause(),
        "ideal_s": report.ideal_s,
        "source": recording.source,
        "steps": recording.step_count,
        "dropped": recording.dropped,
        "per_step": [_figures(step) for step in step_reports(recording) if recording.step_count],
        "tensors": [
            {
                "name": entry.name,
                "class": entry.tensor_class.value,
                "bytes": entry.bytes,
                "transfers": entry.count,
            }
            for entry in tensor_traffic(recording)
        ],
        "residency": _residency_row(recording),
        "notes": list(report.notes),
    }


def _figures(report: MeasuredReport) -> dict[str, Any]:
    moved: dict[str, Any] = {
        "moved_bytes": {
            direction: report.moved_bytes(direction) for direction in DIRECTION_OF_KIND.values()
        },
    }
    of_copies: dict[str, Any] = {
        "um_time_share": report.um_time_share,
        "um_ops_share": report.um_ops_share,
        "um_bytes_share": report.um_bytes_share,
        "memory_ops": {
            "seconds": report.memory_ops_s,
            "bytes": report.memory_ops_bytes,
            "count": report.memory_ops_count,
        },
    }
    recorded: dict[str, Any] = {
        "unattributed_bytes": report.unattributed_bytes,
        "fault_batches": report.fault_batches,
        "gpu_faults": report.gpu_faults,
        "cpu_faults": report.cpu_faults,
    }
    return {
        "step_s": report.step_s,
        "exposed_stall_s": report.exposed_stall_s,
        **(dict.fromkeys(moved) if report.source == "none" else moved),
        **(of_copies if report.has_copies else dict.fromkeys(of_copies)),
        **(recorded if report.collected else dict.fromkeys(recorded)),
        "hints": None if report.hints is None else hint_row(report.hints),
    }


def _residency_row(recording: Recording) -> dict[str, Any] | None:
    residency = recording.residency
    if residency is None:
        return None
    return {
        "samples": len(residency.time_ns),
        "total_peak_bytes": residency.total_peak_bytes(),
        "peak_bytes": {it.value: size for it, size in residency.peak_bytes().items()},
    }


def _step_of(recording: Recording) -> npt.NDArray[np.int64]:
    """The step in which each record starts, or UNKNOWN."""
    starts = recording.records.start_ns
    step = np.searchsorted(recording.step_start_ns, starts, side="right") - 1
    inside = (step >= 0) & (starts < recording.step_end_ns[np.maximum(step, 0)])
    return np.where(inside, step, UNKNOWN)


def _report(
    recording: Recording,
    parts: Parts,
    which: npt.NDArray[np.bool_],
    time_ns: int,
    step_count: int,
    number: int,
) -> MeasuredReport:
    hints = recording.hints[number] if recording.hints else None
    records = recording.records.taken(which)
    moved = parts.taken((which & recording.records.is_transfer())[parts.record])
    others = np.isin(records.kind, (RecordKind.MEMCPY, RecordKind.MEMSET))
    on_device = records.kind == RecordKind.GPU_FAULT
    traffic = _traffic(recording, moved)
    if recording.source == "hints" and hints is not None:
        traffic = hint_traffic(hints)
    return MeasuredReport(
        workload=recording.workload,
        hardware=recording.hardware,
        policy=recording.policy,
        planner="measured",
        step_s=time_ns * _NS,
        traffic=traffic,
        memory_ops_s=int((records.end_ns - records.start_ns)[others].sum()) * _NS,
        memory_ops_bytes=int(records.bytes[others].sum()),
        memory_ops_count=int(others.sum()),
        fault_batches=int(on_device.sum()),
        collected=recording.is_collected,
        step_count=step_count,
        gpu_faults=int(records.faults[on_device].sum()),
        cpu_faults=int(records.faults[records.kind == RecordKind.CPU_FAULT].sum()),
        unattributed_bytes=int(moved.bytes[moved.tensor_class == UNKNOWN].sum()),
        notes=recording.notes,
        source=recording.source,
        ideal_s=recording.ideal_s,
        hints=hints,
    )


def _traffic(recording: Recording, parts: Parts) -> tuple[Traffic, ...]:
    """Sums of the parts of transfers. One with several parts is counted with its record's."""
    records = recording.records
    classes = np.where(parts.tensor_class == UNKNOWN, TensorClass.OTHER.number, parts.tensor_class)
    causes = len(CAUSE_OF_NUMBER)
    shape = (len(TRANSFERS), causes, len(_CLASSES))
    cell = np.ravel_multi_index(
        (records.kind[parts.record], records.cause[parts.record], classes), shape
    )
    size = len(TRANSFERS) * causes * len(_CLASSES)
    moved = _sums(parts.bytes, cell, size).reshape(shape)
    spent_ns = _sums(parts.time_ns, cell, size).reshape(shape)
    count = np.bincount(cell[parts.is_own], minlength=size).reshape(shape)
    return tuple(
        Traffic(
            DIRECTION_OF_KIND[kind],
            cause,
            _CLASSES[number],
            int(moved[kind, i, number]),
            int(spent_ns[kind, i, number]) * _NS,
            int(count[kind, i, number]),
        )
        for kind in TRANSFERS
        for i, cause in enumerate(CAUSE_OF_NUMBER)
        for number in range(len(_CLASSES))
        if count[kind, i, number] or moved[kind, i, number]
    )


def _sums(
    values: npt.NDArray[np.int64], cell: npt.NDArray[Any], size: int
) -> npt.NDArray[np.int64]:
    # Weights of bincount are floats, which are exact to 2**53 only.
    sums = np.zeros(size, np.int64)
    np.add.at(sums, cell, values)
    return sums
