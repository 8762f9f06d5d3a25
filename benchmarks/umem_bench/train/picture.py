"""Training speed by device budget, variant against variant."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from umem.core.errors import UmemError
from umem.core.units import format_bytes
from umem.telemetry.figures import GREY, new_figure, styled
from umem_bench.train.cells import METHOD_WORDS, batches
from umem_bench.train.figures import fits, shown_of, stock_of, tokens_per_s
from umem_bench.train.results import (
    BUDGETED,
    VARIANTS,
    Method,
    Outcome,
    TrainingRun,
    Variant,
    Workload,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["training_figure"]

_NO_BARS: tuple[Variant, ...] = ("stock", "stock-again")
"""One is a line; the other is the same, and shows only whether the machine drifts."""

# Okabe and Ito's palette and more: umem's are blues and greens, what others do is warm.
_COLOURS: dict[Variant, str] = {
    "umem-planned": "#0072B2",
    "umem-backward-step": "#8CD3B6",
    "umem-lookahead": "#56B4E9",
    "umem-fault": "#009E73",
    "umem-optimizer-host": "#003F63",
    "backward-step": "#8C510A",
    "save-on-cpu": "#F0E442",
    "bnb-paged-adamw": "#E69F00",
    "torchao-offload": "#D55E00",
    "deepspeed-offload": "#CC79A7",
    "rmm-pool": "#999999",
}
_GROUP_WIDTH = 0.84
_UNFIT_ALPHA = 0.35
_NOTE_CHARACTERS = 68


@styled
def training_figure(run: TrainingRun) -> Figure:
    """Draw tokens per second in groups by budget, one panel for each workload and method.

    The stock variant, with everything resident, is a line. A variant that has more on the device
    than a budget, or that nobody counts for, is drawn pale and hatched in that budget's group.
    Where umem gave up there is no bar, and its reason stands below.

    Parameters
    ----------
    run
        At least one variant beside the stock one measured, or given up.

    Raises
    ------
    UmemError
        If nothing is there to be drawn.
    UnsupportedError
        If matplotlib is missing.
    """
    panels: list[tuple[Workload, Method, list[Outcome]]] = []
    for workload in run.settings.workloads:
        for method in workload.methods:
            entries = shown_of(run, workload.name, method)
            if any(it.variant not in _NO_BARS for it in entries):  # else nothing is compared
                panels.append((workload, method, entries))
    found = {it.variant for _, _, entries in panels for it in entries}
    shown: list[Variant] = [it for it in VARIANTS if it not in _NO_BARS and it in found]
    if not shown:
        raise UmemError("the run has no variant to draw beside the stock one")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.6 * columns + 2.2, 4.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (workload, method, entries) in zip(grid, panels, strict=False):
        _panel(axes, run, workload, method, entries, shown)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[::columns]:
        axes.set_ylabel("tokens/s", fontsize=9)
    machine = run.machine
    figure.suptitle(
        f"{machine.gpu or machine.cpu}, torch {machine.torch}",
        x=0.01,
        ha="left",
        fontsize=9,
        color=GREY,
    )
    figure.legend(
        handles=_legend(run, shown),
        loc="outside right center",
        fontsize=8,
        frameon=False,
    )
    return figure


def _panel(
    axes: Axes,
    run: TrainingRun,
    workload: Workload,
    method: Method,
    entries: list[Outcome],
    shown: list[Variant],
) -> None:
    budgets = workload.budgets_percent
    width = _GROUP_WIDTH / len(shown)
    for group, percent in enumerate(budgets):
        for outcome in entries:
            told = outcome.variant in BUDGETED
            if outcome.variant in _NO_BARS or (told and outcome.budget_percent != percent):
                continue
            number = shown.index(outcome.variant)
            place = group + (number - (len(shown) - 1) / 2) * width
            if outcome.state == "off":
                axes.annotate(
                    "off",
                    (place, 0.02),
                    xycoords=("data", "axes fraction"),
                    rotation=90,
                    ha="center",
                    va="bottom",
                    fontsize=8,
                    color=_COLOURS[outcome.variant],
                )
                continue
            unfit = not fits(run, outcome, percent)
            axes.bar(
                place,
                tokens_per_s(run, outcome) or 0.0,
                width * 0.92,
                color=_COLOURS[outcome.variant],
                alpha=_UNFIT_ALPHA if unfit else None,
                hatch="////" if unfit else None,
                edgecolor="white",
            )
    stock = stock_of(run, workload.name, method)
    labels = [f"{percent:g} %" for percent in budgets]
    if stock is not None:
        axes.axhline(
            tokens_per_s(run, stock) or 0.0, color="black", linewidth=1.2, linestyle=(0, (5, 2))
        )
        if whole_bytes := stock.peak_allocated_bytes:
            labels = [
                f"{label}\n{format_bytes(int(percent / 100 * whole_bytes))}"
                for label, percent in zip(labels, budgets, strict=True)
            ]
    axes.set_xticks(np.arange(len(budgets)), labels, fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(
        f"device budget, of the working set{_reasons(entries)}",
        fontsize=8,
    )
    axes.set_title(f"{METHOD_WORDS[method]}\n{batches(workload.model)}", fontsize=9)


def _reasons(entries: list[Outcome]) -> str:
    """A line for each reason that umem gave up for."""
    who: dict[str, list[str]] = {}
    for outcome in entries:
        if outcome.state == "off":
            name = f"{outcome.variant} at {outcome.budget_percent:g} %"
            who.setdefault(outcome.reason or "", []).append(name)
    return "".join(
        "\n" + fill(f"off: {', '.join(names)}: {reason}", _NOTE_CHARACTERS)
        for reason, names in who.items()
    )


def _legend(run: TrainingRun, shown: list[Variant]) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = []
    if any(it.variant == "stock" and it.state == "measured" for it in run.outcomes):
        handles.append(
            Line2D([], [], color="black", linestyle=(0, (5, 2)), label="stock, all resident")
        )
    handles += [Patch(facecolor=_COLOURS[variant], label=variant) for variant in shown]
    pale = Patch(facecolor=GREY, alpha=_UNFIT_ALPHA, hatch="////", edgecolor="white")
    pale.set_label("hatched: more on the device\nthan the budget, or not counted")
    return [*handles, pale]
