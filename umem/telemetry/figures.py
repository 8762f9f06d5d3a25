"""What all pictures share: colours, fonts, the time axis, and their way to a file."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from umem.core.classes import TensorClass
from umem.core.errors import UmemError, UnsupportedError
from umem.core.report import Direction, MigrationReport, Timeline
from umem.core.units import time_unit
from umem.io.files import replace_file
from umem.planning.prediction import published_share

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from umem.hardware import Hardware
    from umem.trace import Trace

__all__ = [
    "CLASS_COLOURS",
    "FORMATS",
    "GREY",
    "NOTE_POINTS",
    "PAPER",
    "TEXT_POINTS",
    "class_legend",
    "class_words",
    "link_figure",
    "new_figure",
    "require_matplotlib",
    "require_timeline",
    "residency_figure",
    "save",
    "shares_figure",
    "size_unit",
    "stack_classes",
    "style",
    "title",
]

FORMATS = ("png", "svg")

# Okabe and Ito's palette, which people with any common colour blindness can tell apart.
CLASS_COLOURS: Mapping[TensorClass, str] = MappingProxyType(
    {
        TensorClass.WEIGHTS: "#0072B2",
        TensorClass.FROZEN_WEIGHTS: "#56B4E9",
        TensorClass.GRADIENTS: "#E69F00",
        TensorClass.OPTIMIZER_STATE: "#009E73",
        TensorClass.ACTIVATIONS: "#D55E00",
        TensorClass.OTHER: "#999999",
    }
)

GREY = "#555555"
TEXT_POINTS = 9
NOTE_POINTS = 8
PAPER: Mapping[str, str | float] = MappingProxyType(
    {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
)
"""Box behind a note, so that lines do not cross it."""
_DOTS_PER_INCH = 144


def require_matplotlib() -> None:
    """Check that pictures can be made.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing; the message says how to install it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "pictures need matplotlib, which is not installed: pip install 'umem[plots]'"
        ) from None


def require_timeline(report: MigrationReport) -> Timeline:
    """Timeline of a report.

    Raises
    ------
    UmemError
        If it has none.
    """
    if report.timeline is None:
        raise UmemError(
            f"the report on {report.workload} with {report.planner} has no timeline to draw: "
            "simulate with timeline=True"
        )
    return report.timeline


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Make an empty figure that knows nothing of pyplot.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(axes: Axes) -> None:
    """Leave out what carries no information, and set the size of the numbers."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=NOTE_POINTS)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def title(report: MigrationReport) -> str:
    """What a picture of one report is of."""
    factor, unit = time_unit(report.step_s)
    return (
        f"predicted: {report.workload}, planner {report.planner}, policy {report.policy}, on "
        f"{report.hardware}\nstep {report.step_s * factor:.3g} {unit}, all resident "
        f"{report.ideal_s * factor:.3g} {unit}"
    )


def class_words(tensor_class: TensorClass) -> str:
    """Name of a class as a legend has it."""
    return tensor_class.value.replace("_", " ")


def size_unit(size_bytes: int) -> tuple[int, str]:
    """Bytes of the unit that an axis up to a size is best read in, and the unit's name."""
    return (1 << 30, "GiB") if size_bytes >= 1 << 30 else (1 << 20, "MiB")


def stack_classes(
    axes: Axes,
    times: npt.NDArray[np.float64],
    resident: npt.NDArray[np.float64],
    end: float,
) -> None:
    """Draw what is on the device over time as areas, stacked by class, the first one lowest.

    Parameters
    ----------
    axes
    times : float64[K]
        From when on a row holds, in the unit of the axis.
    resident : float64[K, 6]
        By class number, in the unit of the axis.
    end
        Until when the last row holds.
    """
    shown = [member for member in TensorClass if resident[:, member.number].any()]
    if not shown:
        return
    rows = np.vstack([resident, resident[-1:]])
    axes.stackplot(
        np.append(times, end),
        *(rows[:, member.number] for member in shown),
        labels=[class_words(member) for member in shown],
        colors=[CLASS_COLOURS[member] for member in shown],
        step="post",
        linewidth=0,
        # Thousands of rows; as paths they would make a vector picture of megabytes.
        rasterized=True,
    )


def class_legend(figure: Figure, axes: Axes) -> None:
    """Name the classes of stacked areas beside them, the topmost first, as they are stacked."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside right center",
        fontsize=NOTE_POINTS,
        frameon=False,
        title="tensor class",
        title_fontsize=NOTE_POINTS,
    )


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture in one piece: a reader sees the old file or the whole new one.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        From one of the functions of this package.
    path : path
        Ends in ``.png`` or ``.svg``; its folder is made if missing.

    Raises
    ------
    UmemError
        If the ending is another one, or the file cannot be written.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise UmemError(f"{path}: a picture's name ends in .{' or .'.join(FORMATS)}")
    picture = io.BytesIO()
    # Without a date, the same report gives the same picture.
    figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
    try:
        replace_file(path, picture.getvalue())
    except OSError as error:
        raise UmemError(
            f"{path}: cannot be written ({error.strerror}): choose another place"
        ) from None


# What crosses the link over a step, each way.

_WAYS: tuple[tuple[Direction, str], ...] = (("to_device", "#0072B2"), ("to_host", "#D55E00"))


def link_figure(report: MigrationReport, hardware: Hardware) -> Figure:
    """Draw the link's traffic over the step, each way, against the bandwidths of the hardware.

    Only bandwidths of means that moved something are drawn, or that of pages if nothing moved.

    Parameters
    ----------
    report : MigrationReport
        With a timeline.
    hardware : Hardware
        The machine of the report.

    Raises
    ------
    UmemError
        If the report has no timeline.
    UnsupportedError
        If matplotlib is missing.
    """
    timeline = require_timeline(report)
    figure = new_figure(8.0, 4.6)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    factor, unit = time_unit(report.step_s)
    edges = np.arange(len(timeline.link_bytes) + 1) * timeline.link_bin_s * factor
    rates = timeline.link_bytes / timeline.link_bin_s / 1e9
    highest = rates.max(initial=0.0)
    for way, (axes, (direction, colour)) in enumerate(zip(panels, _WAYS, strict=True)):
        style(axes)
        axes.stairs(rates[:, way], edges, fill=True, color=colour, alpha=0.85)
        for limit, name, place in _limits(report, hardware, direction):
            _limit_line(axes, limit / 1e9, name, place)
            highest = max(highest, limit / 1e9)
        words = direction.replace("_", " the ")
        axes.set_ylabel(f"{words}, GB/s", fontsize=TEXT_POINTS)
        axes.annotate(
            f"{report.moved_bytes(direction) / 1e9:,.4g} GB in the step",
            (0.005, 0.97),
            xycoords="axes fraction",
            ha="left",
            va="top",
            fontsize=NOTE_POINTS,
            bbox=PAPER,
        )
    panels[0].set_xlim(0, edges[-1])
    panels[0].set_ylim(0, 1.3 * highest)
    panels[1].set_xlabel(f"time in the step, {unit}", fontsize=TEXT_POINTS)
    panels[0].set_title(title(report), fontsize=TEXT_POINTS, loc="left", color=GREY)
    return figure


def _limits(
    report: MigrationReport, hardware: Hardware, direction: Direction
) -> list[tuple[float, str, float]]:
    """Bandwidth, name and place along the axis, of what crossed the link in this direction.

    The places differ, because bandwidths may lie close together.
    """
    inward = direction == "to_device"
    mapped = hardware.mapped_read_bytes_per_s if inward else hardware.mapped_write_bytes_per_s
    copied = hardware.copy_to_device_bytes_per_s if inward else hardware.copy_to_host_bytes_per_s
    pages = hardware.to_device_bytes_per_s if inward else hardware.to_host_bytes_per_s
    limits = []
    if report.moved_bytes(direction, "mapped"):
        limits.append((mapped, "used in place", 0.66))
    if report.moved_bytes(direction, "copy"):
        limits.append((copied, "copies", 0.33))
    by_others = report.moved_bytes(direction, "mapped") + report.moved_bytes(direction, "copy")
    if not by_others or report.moved_bytes(direction) > by_others:
        limits.append((pages, "prefetch" if inward else "eviction", 0.995))
    return limits


def _limit_line(axes: Axes, limit: float, name: str, place: float) -> None:
    axes.axhline(limit, color="black", linewidth=1.0, linestyle=(0, (5, 2)))
    axes.annotate(
        f"{name}: at most {limit:.4g} GB/s",
        (place, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=NOTE_POINTS,
        bbox=PAPER,
    )


# What is on the device over a step, by tensor class.

_PARTS = ("forward", "backward", "optimizer")
"""First words of the names of recorded phases."""

_LARGEST_PARTS = 12
_NARROWEST_PART = 0.05


def residency_figure(report: MigrationReport, trace: Trace | None = None) -> Figure:
    """Draw the bytes on the device over the step, stacked by class, under the budget's line.

    Parameters
    ----------
    report : MigrationReport
        With a timeline.
    trace : Trace, optional
        The trace of the report. Where its phases are named by pass, as recorded ones are, the
        passes are marked.

    Raises
    ------
    UmemError
        If the report has no timeline.
    UnsupportedError
        If matplotlib is missing.
    """
    timeline = require_timeline(report)
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    style(axes)
    factor, unit = time_unit(report.step_s)
    unit_bytes, unit_name = size_unit(timeline.budget_bytes)

    edges = np.append(timeline.phase_start_s, timeline.phase_end_s[-1:]) * factor
    resident = timeline.resident_bytes / unit_bytes
    stack_classes(axes, edges[:-1], resident, edges[-1])
    budget = timeline.budget_bytes / unit_bytes
    axes.axhline(budget, color="black", linewidth=1.2, linestyle=(0, (5, 2)))
    axes.annotate(
        f"device budget {budget:.4g} {unit_name}",
        (0.995, budget),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=NOTE_POINTS,
        bbox=PAPER,
    )
    axes.set_xlim(0, max(edges[-1], report.step_s * factor))
    axes.set_ylim(0, 1.15 * max(budget, resident.sum(axis=1).max()))
    if trace is not None:
        _mark_passes(axes, trace, edges)
    axes.set_xlabel(f"time in the step, {unit}", fontsize=TEXT_POINTS)
    axes.set_ylabel(f"on the device, {unit_name}", fontsize=TEXT_POINTS)
    axes.set_title(title(report), fontsize=TEXT_POINTS, loc="left", color=GREY)
    class_legend(figure, axes)
    return figure


def _mark_passes(axes: Axes, trace: Trace, edges: npt.NDArray[np.float64]) -> None:
    """Write the pass above the axes, with a line where the next one begins."""
    words = [name.split(maxsplit=1)[0] if name else "" for name in trace.phase_names]
    # Phases between two passes, such as zeroing of gradients, count with what was before them.
    begins = [(phase, word) for phase, word in enumerate(words) if word in _PARTS]
    begins = [
        begin
        for number, begin in enumerate(begins)
        if number == 0 or begin[1] != begins[number - 1][1]
    ]
    # Recomputation alternates between passes too often to say so.
    if not 1 < len(begins) <= _LARGEST_PARTS:
        return
    starts = [edges[phase] for phase, _ in begins] + [edges[-1]]
    for (_, word), start, end in zip(begins, starts[:-1], starts[1:], strict=True):
        if start > edges[0]:
            axes.axvline(start, color=GREY, linewidth=0.8)
        if end - start >= _NARROWEST_PART * edges[-1]:
            axes.annotate(
                word,
                ((start + end) / 2, 0.995),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="top",
                fontsize=NOTE_POINTS,
                color=GREY,
                bbox=PAPER,
            )


# Unified memory's share of all memory operations, workload against workload.

_METRICS = (
    ("um_ops_share", "by count"),
    ("um_time_share", "by time"),
    ("um_bytes_share", "by bytes"),
)
_WORKLOAD_COLOURS = ("#56B4E9", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999")
_GROUP_WIDTH = 0.8


def shares_figure(reports: Sequence[MigrationReport]) -> Figure:
    """Draw the three shares of each report as bars, in groups by planner.

    Where one was published for a workload (:func:`published_share`), the published
    ones stand in a group of their own in all three panels, because what they are shares of was not
    published.

    Parameters
    ----------
    reports : sequence of MigrationReport
        At least one; each pair of workload and planner once.

    Raises
    ------
    ValueError
        If there are no reports.
    UnsupportedError
        If matplotlib is missing.
    """
    if not reports:
        raise ValueError("there are no reports to draw")
    workloads = list(dict.fromkeys(report.workload for report in reports))
    planners = list(dict.fromkeys(report.planner for report in reports))
    known = {(report.planner, report.workload): report for report in reports}
    published = {report.workload: found for report in reports if (found := published_share(report))}
    groups = ["published", *planners] if published else planners

    figure = new_figure(9.0, 3.9)
    panels = figure.subplots(1, len(_METRICS), sharey=True)
    bar_width = _GROUP_WIDTH / len(workloads)
    highest = 0.0
    for axes, (metric, words) in zip(panels, _METRICS, strict=True):
        style(axes)
        for number, workload in enumerate(workloads):
            offset = (number - (len(workloads) - 1) / 2) * bar_width
            for place, group in enumerate(groups):
                if group == "published" and published:
                    if workload not in published:
                        continue
                    share, hatch = published[workload].share, "////"
                elif (group, workload) in known:
                    share, hatch = getattr(known[group, workload], metric), None
                else:
                    continue
                highest = max(highest, share)
                bars = axes.bar(
                    place + offset,
                    100 * share,
                    bar_width * 0.92,
                    color=_WORKLOAD_COLOURS[number % len(_WORKLOAD_COLOURS)],
                    hatch=hatch,
                    edgecolor="white",
                    label=workload if place == len(groups) - 1 else None,
                )
                axes.bar_label(bars, [_percent(share)], fontsize=NOTE_POINTS, padding=2)
        axes.set_xticks(np.arange(len(groups)), groups, fontsize=NOTE_POINTS)
        axes.tick_params(axis="x", length=0)
        axes.set_title(words, fontsize=TEXT_POINTS)
    panels[0].set_ylim(0, max(115 * highest, 1.0))
    panels[0].set_ylabel(
        "unified-memory transfers,\n% of all memory operations", fontsize=TEXT_POINTS
    )
    hardware = ", ".join(dict.fromkeys(report.hardware for report in reports))
    policies = ", ".join(dict.fromkeys(report.policy for report in reports))
    heading = f"predicted for {hardware}, policy {policies}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=TEXT_POINTS, color=GREY)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper right",
        ncols=len(labels),
        fontsize=NOTE_POINTS,
        frameon=False,
    )
    if published:
        figure.supxlabel(
            f"published: {next(iter(published.values())).source}; "
            "whether by count, time or bytes was not published",
            x=0.995,
            ha="right",
            fontsize=NOTE_POINTS,
            color=GREY,
        )
    return figure


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.0f}"
