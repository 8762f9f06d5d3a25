"""Pictures of a recording: what crossed the link when, and whose it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import UM_CAUSES, Cause, Direction, MeasuredReport
from umem.core.units import format_bytes, time_unit
from umem.telemetry.figures import (
    CLASS_COLOURS,
    GREY,
    NOTE_POINTS,
    TEXT_POINTS,
    class_legend,
    class_words,
    new_figure,
    size_unit,
    stack_classes,
    style,
)
from umem.telemetry.recording import Recording
from umem.telemetry.records import CAUSE_OF_NUMBER, DIRECTION_OF_KIND, TRANSFERS, RecordKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["classes_figure", "link_bytes", "residency_over_run_figure", "transfers_figure"]

_BINS = 400

_CAUSE_COLOURS: dict[Cause, str] = {
    "hint": "#0072B2",
    "fault": "#D55E00",
    "speculation": "#E69F00",
    "eviction": "#CC79A7",
    "counter": "#009E73",
    "unknown": "#999999",
}
_ENGINE_CAUSES: tuple[Cause, ...] = ("copy",)
"""The hint engine counts its copies too, which no profiler shows as transfers."""

_MOST_MARKS = 60
_LONGEST_TITLE = 120


def link_bytes(recording: Recording, bins: int) -> npt.NDArray[np.float64]:
    """Bytes that moved in each of some equal parts of the recording.

    A transfer counts evenly over its time.

    Returns
    -------
    float64[3, 6, bins]
        By direction (:data:`umem.telemetry.TRANSFERS`), cause and part.
    """
    records = recording.records.taken(recording.records.is_transfer())
    causes = len(CAUSE_OF_NUMBER)
    edges = np.linspace(0.0, max(recording.duration_ns, 1), bins + 1)
    moved = np.zeros((len(TRANSFERS), causes, bins))
    start, length = records.start_ns, np.maximum(records.end_ns - records.start_ns, 1)
    for kind in TRANSFERS:
        for cause in range(causes):
            rows = np.flatnonzero((records.kind == kind) & (records.cause == cause))
            if len(rows):
                moved[kind, cause] = _spread(start[rows], length[rows], records.bytes[rows], edges)
    return moved


def _spread(
    start: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    size_bytes: npt.NDArray[np.int64],
    edges: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    # Bytes moved until t are a sum of ramps: their slope changes at starts and ends only.
    rate = size_bytes / length
    times = np.concatenate([start, start + length]).astype(np.float64)
    change = np.concatenate([rate, -rate])
    order = np.argsort(times, kind="stable")
    times, slope = times[order], np.cumsum(change[order])
    until = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(times))])
    # What goes on after the last edge counts in the last part.
    at_edges = np.interp(edges, times, until)
    at_edges[-1] = float(size_bytes.sum())
    return np.diff(at_edges)


def transfers_figure(recording: Recording) -> Figure:
    """Draw the rate of unified-memory transfers over the recording, by direction and cause.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    """
    moved = link_bytes(recording, _BINS)
    directions = [kind for kind in TRANSFERS if kind < RecordKind.BETWEEN_DEVICES]
    if moved[RecordKind.BETWEEN_DEVICES].any():
        directions.append(RecordKind.BETWEEN_DEVICES)
    figure = new_figure(8.0, 2.3 * len(directions))
    panels = figure.subplots(len(directions), 1, sharex=True, sharey=True)
    factor, unit = time_unit(recording.duration_ns * 1e-9)
    edges = np.linspace(0.0, recording.duration_ns * 1e-9 * factor, _BINS + 1)
    bin_s = max(recording.duration_ns, 1) * 1e-9 / _BINS
    for kind, axes in zip(directions, panels, strict=True):
        style(axes)
        below = np.zeros(_BINS)
        for number, cause in enumerate(CAUSE_OF_NUMBER):
            if not moved[:, number].any():
                continue
            above = below + moved[kind, number] / bin_s / 1e9
            axes.stairs(
                above, edges, baseline=below, fill=True, color=_CAUSE_COLOURS[cause], label=cause
            )
            below = above
        _mark_steps(axes, recording, factor)
        words = DIRECTION_OF_KIND[kind].replace("to_", "to the ").replace("_", " ")
        axes.set_ylabel(f"{words}, GB/s", fontsize=TEXT_POINTS)
    panels[0].set_xlim(0, edges[-1])
    panels[-1].set_xlabel(f"time of the recording, {unit}", fontsize=TEXT_POINTS)
    panels[0].set_title(_title(recording), fontsize=TEXT_POINTS, loc="left", color=GREY)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside right center",
        fontsize=NOTE_POINTS,
        frameon=False,
        title="cause",
        title_fontsize=NOTE_POINTS,
    )
    return figure


def classes_figure(recording: Recording, report: MeasuredReport) -> Figure:
    """Draw the bytes that moved in a step as bars by direction and cause, stacked by class.

    Parameters
    ----------
    recording, report
        A recording, and its typical step.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    """
    rows: list[tuple[Direction, Cause]] = [
        (direction, cause)
        for direction in DIRECTION_OF_KIND.values()
        for cause in (*UM_CAUSES, *_ENGINE_CAUSES)
        if report.moved_bytes(direction, cause)
    ]
    figure = new_figure(8.0, 1.3 + 0.35 * len(rows))
    axes = figure.subplots()
    style(axes)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    below = np.zeros(len(rows))
    for member in TensorClass:
        widths = np.array(
            [
                sum(
                    it.bytes
                    for it in report.traffic
                    if (it.direction, it.cause, it.tensor_class) == (*row, member)
                )
                for row in rows
            ],
            np.float64,
        )
        if widths.any():
            colour = CLASS_COLOURS[member]
            axes.barh(
                np.arange(len(rows)),
                widths / 1e9,
                left=below,
                color=colour,
                label=class_words(member),
            )
            below += widths / 1e9
    for place, row in enumerate(rows):
        axes.annotate(
            f" {format_bytes(report.moved_bytes(*row))}",
            (below[place], place),
            va="center",
            fontsize=NOTE_POINTS,
        )
    names = [f"{direction.replace('_', ' ')}: {cause}" for direction, cause in rows]
    axes.set_yticks(np.arange(len(rows)), names, fontsize=NOTE_POINTS)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * below.max(initial=1e-9))
    what = "in a step" if recording.step_count else "in the whole recording"
    axes.set_xlabel(f"moved {what}, GB", fontsize=TEXT_POINTS)
    axes.set_title(_title(recording), fontsize=TEXT_POINTS, loc="left", color=GREY)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside right center",
        fontsize=NOTE_POINTS,
        frameon=False,
        title="tensor class",
        title_fontsize=NOTE_POINTS,
    )
    return figure


def residency_over_run_figure(recording: Recording) -> Figure:
    """Draw the bytes on the device over the recording, stacked by class.

    Raises
    ------
    UmemError
        If nobody kept books of what was on the device.
    UnsupportedError
        If matplotlib is missing.
    """
    residency = recording.residency
    if residency is None:
        raise UmemError(
            f"the recording of {recording.workload} has no residency to draw: nobody kept books"
        )
    figure = new_figure(8.0, 3.6)
    axes = figure.subplots()
    style(axes)
    factor, unit = time_unit(recording.duration_ns * 1e-9)
    peak = residency.total_peak_bytes()
    unit_bytes, unit_name = size_unit(peak)
    end_ns = max(recording.duration_ns, int(residency.time_ns[-1]))
    end = end_ns * 1e-9 * factor
    times = np.asarray(residency.time_ns * 1e-9 * factor, np.float64)
    stack_classes(axes, times, residency.resident_bytes / unit_bytes, end)
    _mark_steps(axes, recording, factor)
    axes.set_xlim(0, max(end, 1e-12))
    axes.set_ylim(0, 1.15 * max(peak / unit_bytes, 1e-9))
    axes.set_xlabel(f"time of the recording, {unit}", fontsize=TEXT_POINTS)
    axes.set_ylabel(f"on the device, {unit_name}", fontsize=TEXT_POINTS)
    axes.set_title(_title(recording), fontsize=TEXT_POINTS, loc="left", color=GREY)
    class_legend(figure, axes)
    return figure


def _mark_steps(axes: Axes, recording: Recording, factor: float) -> None:
    """Draw a line where each step begins, unless there are too many."""
    if 0 < recording.step_count <= _MOST_MARKS:
        for start in recording.step_start_ns:
            axes.axvline(start * 1e-9 * factor, color=GREY, linewidth=0.5)


def _title(recording: Recording) -> str:
    how = "by the hint engine's own count" if recording.source == "hints" else "measured"
    words = f"{how}: {recording.workload}, policy {recording.policy}, on {recording.hardware}"
    # Names come from files, and matplotlib reads a dollar sign as mathematics.
    shown = "".join(mark if mark.isprintable() else "?" for mark in words[:_LONGEST_TITLE])
    return shown.replace("$", r"\$")
