"""Reports of a recording: what moved in each step and in a typical one, and what hints did."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.report import Direction, HintReport, HintUse, MeasuredReport, OpName, Traffic
from umem.telemetry.records import (
    CAUSE_OF_NUMBER,
    DIRECTION_OF_KIND,
    TRANSFERS,
    UNKNOWN,
    Integers,
    MigrationRecords,
    Recording,
    RecordKind,
    Residency,
)

if TYPE_CHECKING:
    from umem.runtime.hints import HintStatistics

__all__ = [
    "HINT_COUNTS",
    "MeasuredRun",
    "TensorTraffic",
    "hint_traffic",
    "hints_between",
    "measured_row",
    "run_of",
]

_CLASSES = tuple(TensorClass)
_NS = 1e-9


@dataclass(frozen=True)
class TensorTraffic:
    """Unified-memory transfers of one named tensor, over all steps or the recording."""

    name: str
    tensor_class: TensorClass
    bytes: int
    count: int


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """What is reported of a recorded run."""

    steps: tuple[MeasuredReport, ...]
    """One exact report for each marked step, or one of the whole recording if none is marked. A
    record belongs to the step in which it starts. What starts outside of all steps is in none."""
    step_start_s: tuple[float, ...]
    """Of marked steps, since the start of the recording."""
    duration_s: float
    dropped: int
    """Records that were lost."""
    tensors: tuple[TensorTraffic, ...]
    """Named tensors that moved in these steps, the most bytes first."""
    residency: Residency | None
    """None if no executor kept accounts."""

    @property
    def typical(self) -> MeasuredReport:
        """The typical step: the one whose time is the median.

        Of an even number of steps it is the lower of the two in the middle, and of several equal
        times the first. It is a step that occurred, so its sums and shares are consistent. A
        recording without steps is reported as a whole.
        """
        found = sorted(self.steps, key=lambda it: it.step_s)[(len(self.steps) - 1) // 2]
        return replace(found, step_count=len(self.step_start_s))


def run_of(recording: Recording) -> MeasuredRun:
    """Report a recorded run."""
    return MeasuredRun(
        _step_reports(recording),
        tuple((recording.step_start_ns * _NS).tolist()),
        recording.duration_ns * _NS,
        recording.dropped,
        _tensor_traffic(recording),
        recording.residency,
    )


def _step_reports(recording: Recording) -> tuple[MeasuredReport, ...]:
    if not recording.step_count:
        return (_report(recording, recording.records, recording.duration_ns, 0, 0),)
    step = _step_of_records(recording)
    times_ns = recording.step_end_ns - recording.step_start_ns
    return tuple(
        _report(recording, recording.records.select(step == number), int(time_ns), 1, number)
        for number, time_ns in enumerate(times_ns)
    )


def _tensor_traffic(recording: Recording) -> tuple[TensorTraffic, ...]:
    """Named tensors that moved, over all marked steps, or all the recording where none is."""
    moved = recording.records
    counted = moved.is_transfer() & (moved.tensor != UNKNOWN)
    if recording.step_count:
        counted &= _step_of_records(recording) != UNKNOWN
    moved = moved.select(counted)
    names = len(recording.tensor_names)
    size_bytes = _sums(moved.bytes, moved.tensor, names)
    count = np.bincount(moved.tensor, minlength=names)
    found = np.full(names, TensorClass.OTHER.number)
    found[moved.tensor] = moved.tensor_class
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


def measured_row(run: MeasuredRun) -> dict[str, Any]:
    """Put a run's reports into plain values, for JSON.

    It has the keys of :func:`umem.predict.prediction.report_row`, with None for figures that a run
    does not have, and further keys that only a run has. ``per_step`` has one entry for each marked
    step.
    """
    report = run.typical
    predicted = ("lower_bound_s", "regret", "settled", "faster_s", "fault_pages", "stall_s")
    unknown = dict.fromkeys((*predicted, "copied_bytes_share"))
    return {
        **{key: getattr(report, key) for key in ("workload", "planner", "hardware", "policy")},
        **unknown,
        **_figures(report),
        "bytes": None if report.source == "none" else report.bytes_by_cause(),
        "ideal_s": report.ideal_s,
        "source": report.source,
        "steps": report.step_count,
        "dropped": run.dropped,
        "per_step": [_figures(step) for step in run.steps if report.step_count],
        "tensors": [
            {
                "name": entry.name,
                "class": entry.tensor_class.value,
                "bytes": entry.bytes,
                "transfers": entry.count,
            }
            for entry in run.tensors
        ],
        "residency": _residency_row(run.residency),
        "notes": list(report.notes),
    }


def _figures(report: MeasuredReport) -> dict[str, Any]:
    def known(is_known: bool, *names: str) -> dict[str, Any]:
        return {name: getattr(report, name) if is_known else None for name in names}

    memory_ops = {
        "seconds": report.memory_ops_s,
        "bytes": report.memory_ops_bytes,
        "count": report.memory_ops_count,
    }
    moved = {way: report.moved_bytes(way) for way in DIRECTION_OF_KIND.values()}
    recorded = ("unattributed_bytes", "fault_batches", "gpu_faults", "cpu_faults")
    return {
        **known(True, "step_s", "exposed_stall_s"),
        "moved_bytes": moved if report.source != "none" or report.traffic else None,
        **known(report.has_copies, "um_time_share", "um_ops_share", "um_bytes_share"),
        "memory_ops": memory_ops if report.has_copies else None,
        **known(report.collected, *recorded),
        "hints": None if report.hints is None else hint_row(report.hints),
    }


def _residency_row(residency: Residency | None) -> dict[str, Any] | None:
    if residency is None:
        return None
    return {
        "samples": len(residency.time_ns),
        "total_peak_bytes": residency.total_peak_bytes(),
        "peak_bytes": {it.value: size for it, size in residency.peak_bytes().items()},
    }


def _step_of_records(recording: Recording) -> Integers:
    """The step in which each record starts, or UNKNOWN."""
    starts = recording.records.start_ns
    step = np.searchsorted(recording.step_start_ns, starts, side="right") - 1
    inside = (step >= 0) & (starts < recording.step_end_ns[np.maximum(step, 0)])
    return np.where(inside, step, UNKNOWN)


def _report(
    recording: Recording,
    records: MigrationRecords,
    time_ns: int,
    step_count: int,
    number: int,
) -> MeasuredReport:
    hints = recording.hints[number] if recording.hints else None
    moved = records.select(records.is_transfer())
    others = np.isin(records.kind, (RecordKind.MEMCPY, RecordKind.MEMSET))
    on_device = records.kind == RecordKind.GPU_FAULT
    traffic = _traffic(moved)
    if recording.source == "hints" and hints is not None:
        traffic = hint_traffic(hints)
    if recording.copies:
        traffic = (*traffic, *recording.copies[number])
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


def _traffic(transfers: MigrationRecords) -> tuple[Traffic, ...]:
    """Sums over transfers; one in several parts counts once."""
    classes = transfers.tensor_class
    classes = np.where(classes == UNKNOWN, TensorClass.OTHER.number, classes)
    shape = (len(TRANSFERS), len(CAUSE_OF_NUMBER), len(_CLASSES))
    cell = np.ravel_multi_index((transfers.kind, transfers.cause, classes), shape)
    size = int(np.prod(shape))
    moved = _sums(transfers.bytes, cell, size).reshape(shape)
    spent_ns = _sums(transfers.end_ns - transfers.start_ns, cell, size).reshape(shape)
    count = np.bincount(cell[~transfers.is_part], minlength=size).reshape(shape)
    return tuple(
        Traffic(
            DIRECTION_OF_KIND[RecordKind(kind)],
            CAUSE_OF_NUMBER[cause],
            _CLASSES[number],
            int(moved[kind, cause, number]),
            int(spent_ns[kind, cause, number]) * _NS,
            int(count[kind, cause, number]),
        )
        for kind, cause, number in np.ndindex(*shape)
        if count[kind, cause, number] or moved[kind, cause, number]
    )


def _sums(values: Integers, cell: npt.NDArray[Any], size: int) -> Integers:
    # The weights of bincount are floats, which are exact only up to 2**53.
    sums = np.zeros(size, np.int64)
    np.add.at(sums, cell, values)
    return sums


# --------------------------------------------------------------------------------------- hints

HINT_FIGURES = tuple(it.name for it in fields(HintUse) if it.name not in ("op", "tensor_class"))
"""Figures by operation and class."""

HINT_COUNTS = ("asked", "done", "late", "early", "missed", "wasted")
"""The figures that count requests."""

HINT_TOTALS = tuple(it.name for it in fields(HintReport) if it.name != "uses")
"""Figures of a whole engine."""

_MOVES: dict[OpName, Direction] = {"prefetch": "to_device", "evict": "to_host"}


def hints_between(before: HintStatistics | None, after: HintStatistics) -> HintReport:
    """What an engine did between two statistics; all of `after` if there was no engine before.

    Statistics of another engine, which `after`'s engine has replaced, count as None.
    """
    new, old = after.counts, {} if before is None else before.counts
    if any(key not in new or new[key].asked < use.asked for key, use in old.items()):
        old, before = {}, None
    uses = [_less(use, old[key]) if key in old else use for key, use in new.items()]
    return HintReport(
        uses=tuple(
            sorted(
                (use for use in uses if any(getattr(use, name) for name in HINT_FIGURES)),
                key=lambda it: (get_args(OpName).index(it.op), it.tensor_class.number),
            )
        ),
        **{
            name: _total(after, name) - (0 if before is None else _total(before, name))
            for name in HINT_TOTALS
        },
    )


def hint_traffic(report: HintReport) -> tuple[Traffic, ...]:
    """What hints moved, as the engine counts it, with its driver calls in place of transfers."""
    moved = [
        Traffic(_MOVES[use.op], "hint", use.tensor_class, use.moved_bytes, use.driver_s, use.calls)
        for use in report.uses
        if use.op in _MOVES and use.moved_bytes
    ]
    return tuple(sorted(moved, key=lambda it: it.direction != "to_device"))


def hint_row(report: HintReport) -> dict[str, Any]:
    """Put hints into plain values, for JSON.

    There are sums over all requests (``issued`` are those asked for, as in a prediction), and all
    figures in ``by_operation``, from operation to class.
    """
    total = {name: sum(map(attrgetter(name), report.uses)) for name in HINT_COUNTS}
    by_operation: dict[str, dict[str, Any]] = {}
    for use in report.uses:
        figures = {name: getattr(use, name) for name in HINT_FIGURES}
        by_operation.setdefault(use.op, {})[use.tensor_class.value] = figures
    return {
        "issued": total.pop("asked"),
        **total,
        **{name: getattr(report, name) for name in HINT_TOTALS},
        "by_operation": by_operation,
    }


def _less(use: HintUse, before: HintUse) -> HintUse:
    # Differences of float sums may fall below 0 by a rounding.
    return replace(
        use, **{name: max(getattr(use, name) - getattr(before, name), 0) for name in HINT_FIGURES}
    )


def _total(found: HintStatistics, name: str) -> int:
    if name == "failures":
        return sum(failure.count for failure in found.failures)
    return int(getattr(found, name))
