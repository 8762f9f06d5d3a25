"""Pictures of predictions and of recordings, drawn by matplotlib in one style.

Each function that draws raises :class:`UnsupportedError` if matplotlib is missing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from umem.core.classes import TensorClass
from umem.core.errors import UmemError, UnsupportedError
from umem.core.install import install_command
from umem.core.report import MigrationReport
from umem.core.units import time_unit
from umem.io.files import write_file
from umem.telemetry.records import Integers
from umem.telemetry.reports import MeasuredRun

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from umem.trace import Trace

__all__ = [
    "CLASS_COLOURS",
    "require_matplotlib",
    "residency_figure",
    "residency_over_run_figure",
    "save",
]

_FORMATS = ("png", "svg")

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
_DOTS_PER_INCH = 144
_SIZE_INCHES = (8.0, 4.0)
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": GREY,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.size": 8,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


def require_matplotlib() -> None:
    """Check that pictures can be made.

    Raises UnsupportedError if matplotlib is missing; the message says how to install it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            f"pictures need matplotlib, which is not installed: {install_command('plots')}"
        ) from None


def _picture(
    times: npt.NDArray[np.float64],
    resident_bytes: Integers,
    end: float,
    capacity_bytes: int,
    mark: Callable[[Axes, float, str], None],
) -> Figure:
    """Draw rows of residency over time as areas stacked by class, the first class lowest.

    Each row holds from its time on, the last one until `end`. The unit follows from the capacity;
    `mark` gets the axes, the unit's bytes and its name.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    is_large = capacity_bytes >= 1 << 30
    unit_bytes, unit_name = (1 << 30, "GiB") if is_large else (1 << 20, "MiB")
    shown = [member for member in TensorClass if resident_bytes[:, member.number].any()]
    rows = np.vstack([resident_bytes, resident_bytes[-1:]]) / unit_bytes
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)  # without pyplot
        axes = figure.subplots()
        if shown:
            axes.stackplot(
                np.append(times, end),
                *(rows[:, member.number] for member in shown),
                labels=[member.value.replace("_", " ") for member in shown],
                colors=[CLASS_COLOURS[member] for member in shown],
                step="post",
                linewidth=0,
                # Thousands of rows; as paths they would make a vector picture of megabytes.
                rasterized=True,
            )
        highest = max(capacity_bytes / unit_bytes, rows.sum(axis=1).max())
        axes.set_xlim(0, max(end, 1e-12))
        axes.set_ylim(0, 1.15 * max(highest, 1e-9))
        axes.set_ylabel(f"on the device, {unit_name}")
        mark(axes, unit_bytes, unit_name)
        handles, labels = axes.get_legend_handles_labels()
        title = "tensor class"
        figure.legend(handles[::-1], labels[::-1], loc="outside right center", title=title)
        return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture to a ``.png`` or ``.svg``, in one piece; its folder is made if missing.

    Raises UmemError if the ending is another one, or the file cannot be written.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in _FORMATS:
        raise UmemError(f"{path}: a picture's name ends in .{' or .'.join(_FORMATS)}")
    picture = io.BytesIO()
    # Without a date, the same report gives the same picture.
    figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_file(path, picture.getvalue())


def _note(axes: Axes, words: str, place: tuple[float, float], **options: object) -> None:
    """Write on white, so that lines do not cross the words."""
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.annotate(words, place, bbox=paper, **options)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- predictions


_PASSES = ("forward", "backward", "optimizer")
"""First words of the names of recorded phases."""

_MOST_PASSES = 12
_NARROWEST_PASS = 0.05


def residency_figure(report: MigrationReport, trace: Trace | None = None) -> Figure:
    """Draw the bytes on the device over the step, stacked by class, under the budget's line.

    Passes are marked if there is a trace whose phases are named by pass, as recorded phases are.

    Raises UmemError if the report has no timeline.
    """
    timeline = report.timeline
    if timeline is None:
        raise UmemError(
            f"the report on {report.workload} with {report.planner} has no timeline to draw: "
            "simulate with timeline=True"
        )
    factor, unit = time_unit(report.step_s)
    edges = np.append(timeline.phase_start_s, timeline.phase_end_s[-1:]) * factor

    def mark(axes: Axes, unit_bytes: float, unit_name: str) -> None:
        budget = timeline.budget_bytes / unit_bytes
        axes.axhline(budget, color="black", linewidth=1.0, linestyle=(0, (5, 2)))
        _note(
            axes,
            f"device budget {budget:.4g} {unit_name}",
            (0.995, budget),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
        )
        axes.set_xlim(0, max(edges[-1], report.step_s * factor))
        if trace is not None:
            _mark_passes(axes, trace, edges)
        axes.set_xlabel(f"time in the step, {unit}")
        axes.set_title(
            f"predicted: {report.workload}, planner {report.planner}, policy {report.policy}, on "
            f"{report.hardware}\nstep {report.step_s * factor:.3g} {unit}, all resident "
            f"{report.ideal_s * factor:.3g} {unit}"
        )

    return _picture(edges[:-1], timeline.resident_bytes, edges[-1], timeline.budget_bytes, mark)


def _mark_passes(axes: Axes, trace: Trace, edges: npt.NDArray[np.float64]) -> None:
    """Write the pass above the axes, with a line where the next one begins."""
    words = [name.split(maxsplit=1)[0] if name else "" for name in trace.phase_names]
    # Phases between two passes, such as zeroing of gradients, belong to the pass before them.
    passes = ((phase, word) for phase, word in enumerate(words) if word in _PASSES)
    begins = [next(group) for _, group in groupby(passes, key=itemgetter(1))]
    # Recomputation alternates between passes too often to mark them.
    if not 1 < len(begins) <= _MOST_PASSES:
        return
    starts = [edges[phase] for phase, _ in begins] + [edges[-1]]
    for (_, word), start, end in zip(begins, starts[:-1], starts[1:], strict=True):
        if start > edges[0]:
            axes.axvline(start, color=GREY, linewidth=0.8)
        if end - start >= _NARROWEST_PASS * edges[-1]:
            middle = (start + end) / 2, 0.995
            across = ("data", "axes fraction")
            _note(axes, word, middle, xycoords=across, ha="center", va="top", color=GREY)


# ---------------------------------------------------------------------------------- recordings

_MOST_MARKS = 60
_LONGEST_TITLE = 120


def residency_over_run_figure(run: MeasuredRun) -> Figure:
    """Draw the bytes on the device over the recording, stacked by class.

    Raises UmemError if the recording has no residency.
    """
    residency, report = run.residency, run.steps[0]
    if residency is None:
        raise UmemError(f"the recording of {report.workload} has no residency to draw")
    factor, unit = time_unit(run.duration_s)
    end = max(run.duration_s, residency.time_ns[-1] * 1e-9) * factor
    times = np.asarray(residency.time_ns * 1e-9 * factor, np.float64)
    how = "by the hint engine's own count" if report.source == "hints" else "measured"
    words = f"{how}: {report.workload}, policy {report.policy}, on {report.hardware}"
    # Names come from files, and matplotlib reads a dollar sign as mathematics.
    shown = "".join(mark if mark.isprintable() else "?" for mark in words[:_LONGEST_TITLE])

    def mark(axes: Axes, *_: object) -> None:
        if len(run.step_start_s) <= _MOST_MARKS:
            for start_s in run.step_start_s:
                axes.axvline(start_s * factor, color=GREY, linewidth=0.5)
        axes.set_xlabel(f"time of the recording, {unit}")
        axes.set_title(shown.replace("$", r"\$"))

    return _picture(times, residency.resident_bytes, end, residency.total_peak_bytes(), mark)
