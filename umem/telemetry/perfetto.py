"""Recordings as timelines, in the trace format that Perfetto and Chrome read."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import HintReport
from umem.io.files import compress, replace_file
from umem.telemetry.attribution import UNKNOWN
from umem.telemetry.hints import hint_row
from umem.telemetry.recording import Recording
from umem.telemetry.records import CAUSE_OF_NUMBER, RecordKind

__all__ = ["lanes", "write_perfetto"]

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


def write_perfetto(recordings: Sequence[Recording], path: str | os.PathLike[str]) -> None:
    """Write a timeline, one process for each recording.

    Steps, phases and each kind of record have tracks of their own; records that overlap are on
    several lines of one track. Bytes on the device are counters, one for each class. What hints
    came to is with the steps.

    Parameters
    ----------
    recordings
        In the order of the processes.
    path
        Such as ``run.perfetto.json``; compressed where it ends in ``.gz``. Replaced in one piece.

    Raises
    ------
    UmemError
        If the file cannot be written.
    """
    events = [
        event
        for number, recording in enumerate(recordings, start=1)
        for event in _events(recording, number)
    ]
    content = '{"displayTimeUnit":"ns","traceEvents":[\n' + ",\n".join(events) + "\n]}\n"
    encoded = content.encode()
    if os.fspath(path).endswith(".gz"):
        encoded = compress(encoded)
    try:
        replace_file(path, encoded)
    except OSError as error:
        raise UmemError(
            f"{path}: cannot be written ({error.strerror}): choose another place"
        ) from None


def lanes(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number each range so that those of one number do not overlap: the lowest that is free.

    Parameters
    ----------
    start, end : int64[N]
        By start.

    Returns
    -------
    int64[N]
        From 0.
    """
    numbers = np.zeros(len(start), np.int64)
    busy: list[tuple[int, int]] = []  # end, number
    free: list[int] = []
    count = 0
    for index, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            number = heapq.heappop(free)
        else:
            number, count = count, count + 1
        numbers[index] = number
        heapq.heappush(busy, (finish, number))
    return numbers


def _events(recording: Recording, process: int) -> Iterator[str]:
    title = f"{recording.workload} on {recording.hardware}, policy {recording.policy}"
    if not recording.is_collected:
        title += ", memory operations not recorded"
    yield _named("process_name", process, 0, title)
    if recording.notes:
        labels = {"labels": "; ".join(recording.notes)}
        yield _event({"ph": "M", "name": "process_labels", "pid": process, "args": labels})
    yield _named("thread_name", process, _STEPS, "steps")
    for number, (start, end) in enumerate(
        zip(recording.step_start_ns.tolist(), recording.step_end_ns.tolist(), strict=True)
    ):
        hints = recording.hints[number] if recording.hints else None
        arguments = {} if hints is None else _hint_arguments(hints)
        yield _slice(f"step {number}", process, _STEPS, start, end, arguments)
    yield from _phase_events(recording, process)
    yield from _residency_events(recording, process)
    for kind, track in _TRACKS.items():
        yield from _record_events(recording, process, kind, track)


def _phase_events(recording: Recording, process: int) -> Iterator[str]:
    phases = sorted(recording.phases, key=lambda it: it.start_ns)
    start = np.array([it.start_ns for it in phases], np.int64)
    lane = lanes(start, np.array([it.end_ns for it in phases], np.int64))
    yield from _lane_names(process, _PHASES, "phases", lane)
    for phase, number in zip(phases, lane.tolist(), strict=True):
        thread = _PHASES + number
        yield _slice(phase.name, process, thread, phase.start_ns, phase.end_ns, {})


def _hint_arguments(hints: HintReport) -> dict[str, object]:
    row = hint_row(hints)
    del row["by_operation"]
    return {f"hints {name}": count for name, count in row.items()}


def _residency_events(recording: Recording, process: int) -> Iterator[str]:
    residency = recording.residency
    if residency is None:
        return
    shown = [it for it in _CLASSES if residency.resident_bytes[:, it.number].any()]
    rows = zip(residency.time_ns.tolist(), residency.resident_bytes.tolist(), strict=True)
    for time_ns, sizes in rows:
        yield _event(
            {
                "ph": "C",
                "name": "bytes on the device",
                "pid": process,
                "ts": time_ns / 1000,
                "args": {it.value: sizes[it.number] for it in shown},
            }
        )


def _record_events(
    recording: Recording, process: int, kind: RecordKind, track: str
) -> Iterator[str]:
    rows = np.flatnonzero(recording.records.kind == kind)
    records = recording.records.taken(rows)
    lane = np.minimum(lanes(records.start_ns, records.end_ns), _LANES_OF_TRACK - 1)
    first = _FIRST_TRACK + _LANES_OF_TRACK * kind
    yield from _lane_names(process, first, track, lane)
    for index, row in enumerate(rows.tolist()):
        arguments: dict[str, object] = {}
        if kind in (RecordKind.GPU_FAULT, RecordKind.CPU_FAULT):
            name = _ACCESS[records.access[index]]
            arguments["faults"] = int(records.faults[index])
        else:
            arguments["bytes"] = int(records.bytes[index])
            name = "memset"
            if kind == RecordKind.MEMCPY:
                name = _COPIES.get(int(records.copy_kind[index]), "copy")
            elif kind != RecordKind.MEMSET:
                name = CAUSE_OF_NUMBER[records.cause[index]]
        if kind <= RecordKind.CPU_FAULT:
            found = int(recording.tensor_class[row])
            arguments["class"] = "unknown" if found == UNKNOWN else _CLASSES[found].value
            arguments["address"] = hex(int(records.address[index]) & (2**64 - 1))
            if recording.tensor[row] != UNKNOWN:
                arguments["tensor"] = recording.tensor_names[recording.tensor[row]]
        start, end = int(records.start_ns[index]), int(records.end_ns[index])
        yield _slice(name, process, first + int(lane[index]), start, end, arguments)


def _lane_names(process: int, first: int, track: str, lane: npt.NDArray[np.int64]) -> Iterator[str]:
    for number in range(int(lane.max(initial=-1)) + 1):
        yield _named("thread_name", process, first + number, track)
        yield _event(
            {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": process,
                "tid": first + number,
                "args": {"sort_index": first + number},
            }
        )


def _slice(
    name: str, process: int, thread: int, start_ns: int, end_ns: int, arguments: dict[str, object]
) -> str:
    return _event(
        {
            "ph": "X",
            "name": name,
            "pid": process,
            "tid": thread,
            # Microseconds; the third decimal is the nanosecond.
            "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": arguments,
        }
    )


def _named(what: str, process: int, thread: int, name: str) -> str:
    return _event({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}})


def _event(event: dict[str, object]) -> str:
    return json.dumps(event, separators=(",", ":"))
