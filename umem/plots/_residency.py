"""What is on the device over a step, by tensor class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from umem.plots._figure import (
    GREY,
    NOTE_POINTS,
    PAPER,
    TEXT_POINTS,
    class_legend,
    new_figure,
    require_timeline,
    size_unit,
    stack_classes,
    style,
    title,
)
from umem.report import MigrationReport
from umem.units import time_unit

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from umem.trace import Trace

__all__ = ["residency_figure"]

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
