"""Recordings as one page of HTML, and as timelines for Perfetto and Chrome."""

from __future__ import annotations

import base64
import heapq
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import UnsupportedError
from umem.core.report import HintReport, MeasuredReport, Source
from umem.core.units import format_bytes
from umem.io.files import compress, write_file
from umem.telemetry.figures import classes_figure, residency_over_run_figure, transfers_figure
from umem.telemetry.records import CAUSE_OF_NUMBER, UNKNOWN, Integers, Recording, RecordKind
from umem.telemetry.reports import HINT_COUNTS, hint_row, report_of, step_reports, tensor_traffic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "SOURCE_WORDS",
    "ReportTable",
    "figures_of_recording",
    "lanes",
    "report_tables",
    "write_html",
    "write_perfetto",
]


# ------------------------------------------------------------------------- tables, HTML page

SOURCE_WORDS: dict[Source, str] = {
    "driver": "recorded by the driver, copies and memory sets by CUPTI",
    "driver_only": "recorded by the driver, copies and memory sets not recorded",
    "cupti": "recorded by CUPTI",
    "hints": "memory operations not recorded, hints as the hint engine counts them",
    "none": "memory operations not recorded",
}
_MOST_ROWS = 200


@dataclass(frozen=True)
class ReportTable:
    """A table of a report, and words below it. Cells may hold text from a stranger's file."""

    title: str
    text: tuple[str, ...]
    """Headings of the first columns."""
    numbers: tuple[str, ...]
    """Headings of the columns after them."""
    rows: Sequence[tuple[str, ...]]
    words: str = ""


def report_tables(
    recording: Recording, report: MeasuredReport, most_tensors: int = _MOST_ROWS
) -> Iterator[ReportTable]:
    """Tables on a recording and its typical step, for people."""
    yield ReportTable("", ("",), ("in a step",), list(_summary(recording, report)))
    if report.source != "none" or report.traffic:
        transfers = "transfers" if report.collected else "calls"
        moved = [
            (
                entry.direction.replace("_", " "),
                entry.cause,
                entry.tensor_class.value,
                format_bytes(entry.bytes),
                f"{entry.count:,}",
                _ms(entry.seconds),
            )
            for entry in report.traffic
        ]
        text, numbers = ("direction", "cause", "class"), ("moved", transfers, "link time, ms")
        yield ReportTable("What moved", text, numbers, moved, "" if moved else "Nothing.")
    if report.hints is not None:
        yield _hints(report.hints)
    if report.collected and (tensors := tensor_traffic(recording)):
        rows = [
            (it.name, it.tensor_class.value, format_bytes(it.bytes), f"{it.count:,}")
            for it in tensors[:most_tensors]
        ]
        more = len(tensors) - len(rows)
        yield ReportTable(
            "Tensors that moved most, over all steps",
            ("tensor", "class"),
            ("moved", "transfers"),
            rows,
            f"and {more:,} tensors more" if more else "",
        )


def _summary(recording: Recording, report: MeasuredReport) -> Iterator[tuple[str, str]]:
    steps = report.step_count
    what = f"median step of {steps:,}" if steps > 1 else "step" if steps else "whole recording"
    yield f"{what}, ms", _ms(report.step_s)
    if report.ideal_s is not None:
        yield "all resident, ms", _ms(report.ideal_s)
    if report.exposed_stall_s is not None:
        yield "exposed stall, ms", _ms(report.exposed_stall_s)
    if report.exposed_stall_share is not None:
        yield "exposed stall, % of the step", _percent(report.exposed_stall_share)
    if report.has_copies:
        yield "unified memory, % of the time of memory operations", _percent(report.um_time_share)
        yield "the same by count, %", _percent(report.um_ops_share)
        yield "the same by bytes, %", _percent(report.um_bytes_share)
    if report.source != "none" or report.traffic:
        by = "" if report.collected else " by umem"
        yield f"moved to the device{by}", format_bytes(report.moved_bytes("to_device"))
        yield f"moved to the host{by}", format_bytes(report.moved_bytes("to_host"))
    if report.collected:
        yield "moved between devices", format_bytes(report.moved_bytes("between_devices"))
        yield "of class other, hit no known tensor", format_bytes(report.unattributed_bytes)
        yield "batches of faults on the device", f"{report.fault_batches:,}"
        yield "faults on the device", f"{report.gpu_faults:,}"
        yield "faults on the host", f"{report.cpu_faults:,}"
    if report.has_copies:
        yield "copies and memory sets", f"{report.memory_ops_count:,}"
        yield "bytes copied and set", format_bytes(report.memory_ops_bytes)
    if recording.residency is not None:
        yield "on the device at most", format_bytes(recording.residency.total_peak_bytes())
        for of, size_bytes in recording.residency.peak_bytes().items():
            yield f"{of.value} on the device at most", format_bytes(size_bytes)


def _hints(hints: HintReport) -> ReportTable:
    rows = [
        (
            use.op.replace("_", " "),
            use.tensor_class.value,
            *(f"{getattr(use, name):,}" for name in HINT_COUNTS),
            format_bytes(use.moved_bytes),
            _ms(use.late_s),
        )
        for use in hints.uses
    ]
    words = (
        f"{_ms(sum(use.late_s for use in hints.uses))} ms late in all, {hints.refused:,} requests "
        f"refused, {hints.failures:,} driver calls failed, {format_bytes(hints.over_budget_bytes)} "
        "over the budget"
    )
    return ReportTable("Hints", ("hint", "class"), (*HINT_COUNTS, "moved", "ms late"), rows, words)


def _steps(recording: Recording) -> ReportTable:
    rows = [
        (
            str(number),
            _ms(step.step_s),
            format_bytes(step.moved_bytes("to_device")),
            format_bytes(step.moved_bytes("to_host")),
            _percent(step.um_time_share) if step.has_copies else "",
            f"{step.fault_batches:,}" if step.collected else "",
            str(sum(use.late for use in step.hints.uses)) if step.hints else "",
        )
        for number, step in enumerate(step_reports(recording)[:_MOST_ROWS])
    ]
    numbers = ("ms", "to device", "to host", "UM, % of time", "fault batches", "hints late")
    return ReportTable("Steps", ("step",), numbers, rows)


def write_html(recordings: Sequence[Recording], path: str | os.PathLike[str]) -> None:
    """Write a page on recordings, with pictures where matplotlib is installed.

    The page loads nothing from the network, and runs no script. The file is replaced in one piece.

    Raises UmemError if the file cannot be written.
    """
    from jinja2 import Environment, PackageLoader

    templates = Environment(
        loader=PackageLoader("umem.telemetry", ""), autoescape=True, trim_blocks=True
    )
    sections = []
    for recording in recordings:
        report = report_of(recording)
        tables = list(report_tables(recording, report))
        if report.source != "none" and recording.step_count:
            tables.append(_steps(recording))
        pictures, missing = [], ""
        try:
            for words, draw in figures_of_recording(recording, report).values():
                picture = io.BytesIO()
                draw().savefig(picture, format="png")
                pictures.append((words, base64.b64encode(picture.getvalue()).decode()))
        except UnsupportedError as error:
            missing = str(error)
        sections.append(
            {
                "title": recording.workload,
                "subtitle": f"{recording.hardware}, policy {recording.policy}, "
                f"{SOURCE_WORDS[recording.source]}",
                "notes": recording.notes,
                "tables": tables,
                "pictures": pictures,
                "missing": missing,
            }
        )
    page = templates.get_template("page.html.j2").render(sections=sections)
    write_file(path, page.encode("utf-8", "replace"))


def figures_of_recording(
    recording: Recording, report: MeasuredReport
) -> dict[str, tuple[str, Callable[[], Figure]]]:
    """The pictures for which a recording and its typical step have data, by short name.

    Each is what the picture shows, and the function that draws it.
    """
    figures: dict[str, tuple[str, Callable[[], Figure]]] = {}
    if recording.residency is not None:
        draw = partial(residency_over_run_figure, recording)
        figures["residency"] = ("Bytes on the device over the recording", draw)
    if recording.records.is_transfer().any():
        draw = partial(transfers_figure, recording)
        figures["transfers"] = ("Rate of transfers over the recording", draw)
    if report.traffic:
        draw = partial(classes_figure, recording, report)
        figures["moved"] = ("Bytes moved by direction, cause and class", draw)
    return figures


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:,.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


# ----------------------------------------------------------------------------------- timelines

_TRACKS = {
    RecordKind.TO_DEVICE: "transfers to device",
    RecordKind.TO_HOST: "transfers to host",
    RecordKind.BETWEEN_DEVICES: "transfers between devices",
    RecordKind.GPU_FAULT: "page faults on the device",
    RecordKind.CPU_FAULT: "page faults on the host",
    RecordKind.MEMCPY: "memcpy",
    RecordKind.MEMSET: "memset",
}
_ACCESS = ("access", "read", "write", "atomic access", "prefetch")
_COPIES = {1: "host to device", 2: "device to host", 8: "device to device", 10: "peer to peer"}
_CLASSES = tuple(TensorClass)
_LANES_OF_TRACK = 1000
_STEPS, _PHASES, _FIRST_TRACK = 1, 1000, 2000

_Event = dict[str, object]


def write_perfetto(recordings: Sequence[Recording], path: str | os.PathLike[str]) -> None:
    """Write a timeline, one process for each recording.

    Steps, phases and each kind of record have tracks of their own; records that overlap are on
    several lines of one track. Bytes on the device are counters, one for each class. The results of
    hints are with the steps. The file is replaced in one piece, and compressed where its name ends
    in ``.gz``.

    Raises UmemError if the file cannot be written.
    """
    events = [
        json.dumps({"pid": number, **event}, separators=(",", ":"))
        for number, recording in enumerate(recordings, start=1)
        for event in _events(recording)
    ]
    content = '{"displayTimeUnit":"ns","traceEvents":[\n' + ",\n".join(events) + "\n]}\n"
    is_compressed = os.fspath(path).endswith(".gz")
    write_file(path, compress(content.encode()) if is_compressed else content.encode())


def lanes(start: Integers, end: Integers) -> Integers:
    """Give each range, by start, the lowest number whose ranges it does not overlap, from 0."""
    numbers = np.zeros(len(start), np.int64)
    busy: list[tuple[int, int]] = []  # end, number
    free: list[int] = []
    for index, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        number = heapq.heappop(free) if free else len(busy)
        numbers[index] = number
        heapq.heappush(busy, (finish, number))
    return numbers


def _events(recording: Recording) -> Iterator[_Event]:
    title = f"{recording.workload} on {recording.hardware}, policy {recording.policy}"
    if not recording.is_collected:
        title += ", memory operations not recorded"
    yield _metadata("process_name", 0, name=title)
    if recording.notes:
        labels = {"labels": "; ".join(recording.notes)}
        yield {"ph": "M", "name": "process_labels", "args": labels}
    steps = []
    for number in range(recording.step_count):
        hints = recording.hints[number] if recording.hints else None
        row = {} if hints is None else hint_row(hints)
        row.pop("by_operation", None)
        steps.append((f"step {number}", {f"hints {name}": count for name, count in row.items()}))
    yield from _track(_STEPS, "steps", recording.step_start_ns, recording.step_end_ns, steps)
    phases = sorted(recording.phases, key=lambda it: it.start_ns)
    start = np.array([it.start_ns for it in phases], np.int64)
    end = np.array([it.end_ns for it in phases], np.int64)
    yield from _track(_PHASES, "phases", start, end, [(it.name, {}) for it in phases])
    yield from _residency_events(recording)
    for kind, title in _TRACKS.items():
        rows = np.flatnonzero(recording.records.kind == kind)
        start, end = recording.records.start_ns[rows], recording.records.end_ns[rows]
        named = _named_records(recording, kind, rows)
        yield from _track(_FIRST_TRACK + _LANES_OF_TRACK * kind, title, start, end, named)


def _residency_events(recording: Recording) -> Iterator[_Event]:
    residency = recording.residency
    if residency is None:
        return
    shown = [it for it in _CLASSES if residency.resident_bytes[:, it.number].any()]
    rows = zip(residency.time_ns.tolist(), residency.resident_bytes.tolist(), strict=True)
    for time_ns, sizes in rows:
        sizes_by_class = {it.value: sizes[it.number] for it in shown}
        counter = {"ph": "C", "name": "bytes on the device"}
        yield {**counter, "ts": time_ns / 1000, "args": sizes_by_class}


def _named_records(
    recording: Recording, kind: RecordKind, rows: npt.NDArray[np.intp]
) -> Iterator[tuple[str, _Event]]:
    """Name and arguments of each record of a kind."""
    records = recording.records
    for row in rows.tolist():
        arguments: _Event = {}
        if kind in (RecordKind.GPU_FAULT, RecordKind.CPU_FAULT):
            name = _ACCESS[records.access[row]]
            arguments["faults"] = int(records.faults[row])
        else:
            arguments["bytes"] = int(records.bytes[row])
            name = "memset"
            if kind == RecordKind.MEMCPY:
                name = _COPIES.get(int(records.copy_kind[row]), "copy")
            elif kind != RecordKind.MEMSET:
                name = CAUSE_OF_NUMBER[records.cause[row]]
        if kind <= RecordKind.CPU_FAULT:
            found = int(recording.tensor_class[row])
            arguments["class"] = "unknown" if found == UNKNOWN else _CLASSES[found].value
            arguments["address"] = hex(int(records.address[row]) & (2**64 - 1))
            if recording.tensor[row] != UNKNOWN:
                arguments["tensor"] = recording.tensor_names[recording.tensor[row]]
        yield name, arguments


def _track(
    first: int, title: str, start: Integers, end: Integers, named: Iterable[tuple[str, _Event]]
) -> Iterator[_Event]:
    """Ranges by start, in as many lines as overlap; each with its name and arguments."""
    lane = first + np.minimum(lanes(start, end), _LANES_OF_TRACK - 1)
    for thread in range(first, int(lane.max(initial=first - 1)) + 1):
        yield _metadata("thread_name", thread, name=title)
        yield _metadata("thread_sort_index", thread, sort_index=thread)
    ranges = zip(lane.tolist(), start.tolist(), end.tolist(), named, strict=True)
    for thread, start_ns, end_ns, (name, arguments) in ranges:
        # Times are microseconds; the third decimal is the nanosecond.
        times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
        yield {"ph": "X", "name": name, "tid": thread, **times, "args": arguments}


def _metadata(what: str, thread: int, **arguments: object) -> _Event:
    return {"ph": "M", "name": what, "tid": thread, "args": arguments}
