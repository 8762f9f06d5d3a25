"""What crosses the link over a step, each way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from umem.plots._figure import (
    GREY,
    NOTE_POINTS,
    PAPER,
    TEXT_POINTS,
    new_figure,
    require_timeline,
    style,
    title,
)
from umem.report import Direction, MigrationReport
from umem.units import time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from umem.hardware import Hardware

__all__ = ["link_figure"]

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
