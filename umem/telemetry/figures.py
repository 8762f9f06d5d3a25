"""Pictures of predictions and of recordings, drawn by matplotlib in one style.

Each function that draws raises :class:`UnsupportedError` if matplotlib is missing.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from umem.core.classes import TensorClass
from umem.core.errors import UmemError, UnsupportedError
from umem.core.install import install_command
from umem.core.report import MigrationReport, Timeline
from umem.core.units import time_unit
from umem.io.files import write_file
from umem.telemetry.records import (
    Integers,
    Recording,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from umem.trace import Trace

__all__ = [
    "CLASS_COLOURS",
    "new_figure",
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
_DASHED = (0, (5, 2))
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

_P = ParamSpec("_P")
_T = TypeVar("_T")


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


def styled(draw: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that draws a figure: it draws in the style of umem's pictures."""

    @functools.wraps(draw)
    def in_style(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        require_matplotlib()
        from matplotlib import rc_context

        with rc_context(_STYLE):  # type: ignore[arg-type]
            return draw(*args, **kwargs)

    return in_style


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Make an empty figure, without pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
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


def _limit_line(axes: Axes, limit: float, words: str, place: float = 0.995) -> None:
    """Draw a dashed line at a limit, with words above it that end at `place` of the width."""
    axes.axhline(limit, color="black", linewidth=1.0, linestyle=_DASHED)
    _note(
        axes,
        words,
        (place, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
    )


def _legend(figure: Figure, axes: Axes, title: str, *, is_stacked: bool = False) -> None:
    """Explain the colours beside the axes; of stacked areas the topmost first."""
    handles, labels = axes.get_legend_handles_labels()
    order = slice(None, None, -1 if is_stacked else 1)
    figure.legend(handles[order], labels[order], loc="outside right center", title=title)


def _size_unit(size_bytes: int) -> tuple[int, str]:
    """Bytes and name of the unit for an axis up to a size."""
    return (1 << 30, "GiB") if size_bytes >= 1 << 30 else (1 << 20, "MiB")


def _draw_residency(
    axes: Axes,
    times: npt.NDArray[np.float64],
    resident_bytes: Integers,
    end: float,
    capacity_bytes: int,
) -> None:
    """Draw rows of residency over time as areas stacked by class, the first class lowest.

    Each row holds from its time on, the last one until `end`. The unit follows from the capacity.
    """
    unit_bytes, unit_name = _size_unit(capacity_bytes)
    shown = [member for member in TensorClass if resident_bytes[:, member.number].any()]
    rows = np.vstack([resident_bytes, resident_bytes[-1:]]) / unit_bytes
    if shown:
        axes.stackplot(
            np.append(times, end),
            *(rows[:, member.number] for member in shown),
            labels=[_words(member.value) for member in shown],
            colors=[CLASS_COLOURS[member] for member in shown],
            step="post",
            linewidth=0,
            # Thousands of rows; as paths they would make a vector picture of megabytes.
            rasterized=True,
        )
    highest = max(capacity_bytes / unit_bytes, rows.sum(axis=1).max())
    axes.set_ylim(0, 1.15 * max(highest, 1e-9))
    axes.set_ylabel(f"on the device, {unit_name}")


def _words(name: str) -> str:
    return name.replace("_", " ")


# --------------------------------------------------------------------------------- predictions


_PASSES = ("forward", "backward", "optimizer")
"""First words of the names of recorded phases."""

_MOST_PASSES = 12
_NARROWEST_PASS = 0.05


@styled
def residency_figure(report: MigrationReport, trace: Trace | None = None) -> Figure:
    """Draw the bytes on the device over the step, stacked by class, under the budget's line.

    Passes are marked if there is a trace whose phases are named by pass, as recorded phases are.

    Raises UmemError if the report has no timeline.
    """
    timeline = _require_timeline(report)
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    factor, unit = time_unit(report.step_s)
    budget_bytes = timeline.budget_bytes
    edges = np.append(timeline.phase_start_s, timeline.phase_end_s[-1:]) * factor
    _draw_residency(axes, edges[:-1], timeline.resident_bytes, edges[-1], budget_bytes)
    unit_bytes, unit_name = _size_unit(budget_bytes)
    budget = budget_bytes / unit_bytes
    _limit_line(axes, budget, f"device budget {budget:.4g} {unit_name}")
    axes.set_xlim(0, max(edges[-1], report.step_s * factor))
    if trace is not None:
        _mark_passes(axes, trace, edges)
    axes.set_xlabel(f"time in the step, {unit}")
    axes.set_title(_predicted_title(report))
    _legend(figure, axes, "tensor class", is_stacked=True)
    return figure


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


def _require_timeline(report: MigrationReport) -> Timeline:
    if report.timeline is None:
        raise UmemError(
            f"the report on {report.workload} with {report.planner} has no timeline to draw: "
            "simulate with timeline=True"
        )
    return report.timeline


def _predicted_title(report: MigrationReport) -> str:
    factor, unit = time_unit(report.step_s)
    return (
        f"predicted: {report.workload}, planner {report.planner}, policy {report.policy}, on "
        f"{report.hardware}\nstep {report.step_s * factor:.3g} {unit}, all resident "
        f"{report.ideal_s * factor:.3g} {unit}"
    )


# ---------------------------------------------------------------------------------- recordings

_MOST_MARKS = 60
_LONGEST_TITLE = 120


@styled
def residency_over_run_figure(recording: Recording) -> Figure:
    """Draw the bytes on the device over the recording, stacked by class.

    Raises UmemError if the recording has no residency.
    """
    residency = recording.residency
    if residency is None:
        raise UmemError(f"the recording of {recording.workload} has no residency to draw")
    figure = new_figure(8.0, 3.6)
    axes = figure.subplots()
    factor, unit = time_unit(recording.duration_ns * 1e-9)
    peak_bytes = residency.total_peak_bytes()
    end = max(recording.duration_ns, int(residency.time_ns[-1])) * 1e-9 * factor
    times = np.asarray(residency.time_ns * 1e-9 * factor, np.float64)
    _draw_residency(axes, times, residency.resident_bytes, end, peak_bytes)
    _mark_steps(axes, recording, factor)
    axes.set_xlim(0, max(end, 1e-12))
    axes.set_xlabel(f"time of the recording, {unit}")
    axes.set_title(_measured_title(recording))
    _legend(figure, axes, "tensor class", is_stacked=True)
    return figure


def _mark_steps(axes: Axes, recording: Recording, factor: float) -> None:
    """Draw a line where each step begins, unless there are too many."""
    if 0 < recording.step_count <= _MOST_MARKS:
        for start in recording.step_start_ns:
            axes.axvline(start * 1e-9 * factor, color=GREY, linewidth=0.5)


def _measured_title(recording: Recording) -> str:
    how = "by the hint engine's own count" if recording.source == "hints" else "measured"
    words = f"{how}: {recording.workload}, policy {recording.policy}, on {recording.hardware}"
    # Names come from files, and matplotlib reads a dollar sign as mathematics.
    shown = "".join(mark if mark.isprintable() else "?" for mark in words[:_LONGEST_TITLE])
    return shown.replace("$", r"\$")
