"""Unified memory's share of all memory operations, workload against workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from umem.plots._figure import GREY, NOTE_POINTS, TEXT_POINTS, new_figure, style
from umem.prediction import published_share
from umem.report import MigrationReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["shares_figure"]

_METRICS = (
    ("um_ops_share", "by count"),
    ("um_time_share", "by time"),
    ("um_bytes_share", "by bytes"),
)
_WORKLOAD_COLOURS = ("#56B4E9", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999")
_GROUP_WIDTH = 0.8


def shares_figure(reports: Sequence[MigrationReport]) -> Figure:
    """Draw the three shares of each report as bars, in groups by planner.

    Where one was published for a workload (:func:`umem.prediction.published_share`), the published
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
