"""Recordings as one page of HTML that needs nothing else."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING

from umem.core.errors import UmemError, UnsupportedError
from umem.core.report import HintReport, MeasuredReport, Source
from umem.core.units import format_bytes
from umem.io.files import replace_file
from umem.telemetry.aggregate import report_of, step_reports, tensor_traffic
from umem.telemetry.hints import HINT_COUNTS
from umem.telemetry.recording import Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_html"]

_SOURCE_WORDS: dict[Source, str] = {
    "driver": "recorded by the driver, copies and memory sets by CUPTI",
    "driver_only": "recorded by the driver, copies and memory sets not recorded",
    "cupti": "recorded by CUPTI",
    "nsys": "recorded by Nsight Systems",
    "hints": "memory operations not recorded, hints as the hint engine counts them",
    "none": "memory operations not recorded",
}
_MOST_ROWS = 200
_MOST_TEXT = 400

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>Migration, measured</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
 color: #222; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { padding: .15rem .8rem .15rem 0; text-align: left; border-bottom: 1px solid #ddd; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; }
p.note { color: #8a4b00; }
</style>
</head>
<body>
<h1>Migration, measured</h1>
"""


def write_html(recordings: Sequence[Recording], path: str | os.PathLike[str]) -> None:
    """Write a page on recordings, with pictures where matplotlib is installed.

    The page asks nothing of the network, and runs no script.

    Parameters
    ----------
    recordings
        In the order of the page.
    path
        Such as ``run.html``. Replaced in one piece.

    Raises
    ------
    UmemError
        If the file cannot be written.
    """
    sections = "\n".join(map(_section, recordings))
    try:
        replace_file(path, f"{_HEAD}{sections}\n</body>\n</html>\n".encode("utf-8", "replace"))
    except OSError as error:
        raise UmemError(
            f"{path}: cannot be written ({error.strerror}): choose another place"
        ) from None


def _section(recording: Recording) -> str:
    report = report_of(recording)
    parts = [
        f"<section>\n<h2>{_text(recording.workload)}</h2>",
        f"<p>{_text(recording.hardware)}, policy {_text(recording.policy)}, "
        f"{_SOURCE_WORDS[recording.source]}</p>",
        *(f'<p class="note">{_text(note)}</p>' for note in report.notes),
        _table(("", "in a step"), _summary(report), numbers=1),
    ]
    if report.source != "none":
        parts += _moved(recording, report)
    if report.hints is not None:
        parts += _hints(report.hints)
    parts += _pictures(recording, report)
    if report.source != "none":
        parts += _details(recording)
    return "\n".join([*parts, "</section>"])


def _summary(report: MeasuredReport) -> list[tuple[str, ...]]:
    what = "median step" if report.step_count > 1 else "step" if report.step_count else "recording"
    rows: list[tuple[str, ...]] = [
        (f"{what}, ms", f"{report.step_s * 1e3:,.3f}"),
        ("steps", f"{report.step_count:,}"),
    ]
    if report.ideal_s is not None:
        rows.append(("all resident, ms", f"{report.ideal_s * 1e3:,.3f}"))
    if report.exposed_stall_s is not None:
        rows.append(("exposed stall, ms", f"{report.exposed_stall_s * 1e3:,.3f}"))
    if report.exposed_stall_share is not None:
        rows.append(("exposed stall, % of the step", _percent(report.exposed_stall_share)))
    if report.source == "none":
        return rows
    if not report.collected:
        return [
            *rows,
            ("moved to the device by hints", format_bytes(report.moved_bytes("to_device"))),
            ("moved to the host by hints", format_bytes(report.moved_bytes("to_host"))),
        ]
    if report.has_copies:
        rows += [
            ("unified memory, % of the time of memory operations", _percent(report.um_time_share)),
            ("the same by count, %", _percent(report.um_ops_share)),
            ("the same by bytes, %", _percent(report.um_bytes_share)),
        ]
    return [
        *rows,
        ("moved to the device", format_bytes(report.moved_bytes("to_device"))),
        ("moved to the host", format_bytes(report.moved_bytes("to_host"))),
        ("moved between devices", format_bytes(report.moved_bytes("between_devices"))),
        ("of unknown tensors", format_bytes(report.unattributed_bytes)),
        ("batches of faults on the device", f"{report.fault_batches:,}"),
        ("faults on the device", f"{report.gpu_faults:,}"),
        ("faults on the host", f"{report.cpu_faults:,}"),
        ("copies and memory sets", f"{report.memory_ops_count:,}"),
        ("bytes copied and set", format_bytes(report.memory_ops_bytes)),
    ]


def _moved(recording: Recording, report: MeasuredReport) -> list[str]:
    parts = ["<h3>What moved</h3>"]
    if not report.traffic:
        return [*parts, "<p>Nothing.</p>"]
    rows = [
        (
            entry.direction.replace("_", " "),
            entry.cause,
            entry.tensor_class.value,
            format_bytes(entry.bytes),
            f"{entry.count:,}",
            f"{entry.seconds * 1e3:,.3f}",
        )
        for entry in report.traffic
    ]
    transfers = "transfers" if report.collected else "calls"
    heading = ("direction", "cause", "class", "moved", transfers, "time, ms")
    return [*parts, _table(heading, rows, numbers=3)]


def _hints(hints: HintReport) -> list[str]:
    parts = ["<h3>Hints</h3>"]
    if hints.uses:
        rows = [
            (
                use.op.replace("_", " "),
                use.tensor_class.value,
                *(f"{getattr(use, name):,}" for name in HINT_COUNTS),
                format_bytes(use.moved_bytes),
                f"{use.late_s * 1e3:,.3f}",
            )
            for use in hints.uses
        ]
        heading = ("operation", "class", *HINT_COUNTS, "moved", "late by, ms")
        parts.append(_table(heading, rows, numbers=len(HINT_COUNTS) + 2))
    return [
        *parts,
        f"<p>{hints.refused:,} requests refused, {hints.failures:,} driver calls failed, "
        f"{format_bytes(hints.over_budget_bytes)} over the budget</p>",
    ]


def _details(recording: Recording) -> list[str]:
    parts = []
    tensors = tensor_traffic(recording)
    if tensors:
        parts.append("<h3>Tensors that moved most, over all steps</h3>")
        named = [
            (it.name, it.tensor_class.value, format_bytes(it.bytes), f"{it.count:,}")
            for it in tensors[:_MOST_ROWS]
        ]
        parts.append(_table(("tensor", "class", "moved", "transfers"), named, numbers=2))
    if recording.step_count:
        parts.append("<h3>Steps</h3>")
        steps = [
            (
                str(number),
                f"{step.step_s * 1e3:,.3f}",
                format_bytes(step.moved_bytes("to_device")),
                format_bytes(step.moved_bytes("to_host")),
                _percent(step.um_time_share) if step.has_copies else "",
                f"{step.fault_batches:,}" if step.collected else "",
                str(sum(use.late for use in step.hints.uses)) if step.hints else "",
            )
            for number, step in enumerate(step_reports(recording)[:_MOST_ROWS])
        ]
        heading = (
            "step",
            "ms",
            "to device",
            "to host",
            "UM, % of time",
            "fault batches",
            "hints late",
        )
        parts.append(_table(heading, steps, numbers=6))
    return parts


def _pictures(recording: Recording, report: MeasuredReport) -> list[str]:
    from umem.telemetry.pictures import classes_figure, residency_over_run_figure, transfers_figure

    figures: dict[str, Callable[[], Figure]] = {}
    if recording.residency is not None:
        figures["Bytes on the device over the recording"] = partial(
            residency_over_run_figure, recording
        )
    if recording.records.is_transfer().any():
        figures["Rate of transfers over the recording"] = partial(transfers_figure, recording)
    if report.traffic:
        figures["Bytes moved by direction, cause and class"] = partial(
            classes_figure, recording, report
        )
    try:
        return [_image(draw(), words) for words, draw in figures.items()]
    except UnsupportedError as error:
        return [f'<p class="note">{_text(str(error))}</p>']


def _image(figure: Figure, words: str) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    data = base64.b64encode(picture.getvalue()).decode()
    return f'<p><img alt="{_text(words)}" src="data:image/png;base64,{data}"></p>'


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int) -> str:
    """A table whose last columns are numbers."""
    first = len(heading) - numbers

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ("" if place < first else ' class="number"' for place in range(len(cells)))
        return "".join(
            f"<{tag}{kind}>{_text(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table>\n<tr>{line('th', heading)}</tr>\n{body}\n</table>"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _text(words: str) -> str:
    return escape(words if len(words) <= _MOST_TEXT else f"{words[:_MOST_TEXT]}...", quote=True)
