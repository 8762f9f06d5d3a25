"""Training speed by budget, variant beside variant."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

from umem import UmemError, UnsupportedError
from umem_bench.results import BUDGETED, VARIANTS, Method, Run, Variant, Workload
from umem_bench.training.tables import batches, fits, panels, shown, stock_of, tokens_per_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["OVER_BUDGET_STYLE", "new_figure", "training_figure"]

# Okabe and Ito's palette and more: umem's are blues and greens, the others' are warm. Stock is a
# line, and its repetition is not drawn.
_COLOURS: dict[Variant, str] = {
    "umem": "#0072B2",
    "umem-backward-step": "#8CD3B6",
    "umem-planned": "#332288",
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
OVER_BUDGET_STYLE: dict[str, Any] = {"alpha": 0.35, "hatch": "////"}
_NOTE_CHARACTERS = 68


def new_figure(run: Run, width: float, height: float) -> Figure:
    """An empty figure of so many inches, which names a run's machine.

    Raises ``UnsupportedError`` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(f"matplotlib is missing ({error}): pip install matplotlib") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    machine, torch = run.header.machine, run.header.packages.get("torch")
    figure.suptitle(f"{machine.gpu or machine.cpu}, torch {torch}", x=0.01, ha="left", fontsize=9)
    return figure


def training_figure(run: Run) -> Figure:
    """Draw tokens per second in groups by budget, one panel for each workload and method.

    The stock variant, with everything resident, is a line. A variant that has more resident memory
    than a budget, or whose memory is not counted, is drawn pale and hatched in that budget's group.
    Where umem gave up there is no bar, and its reason stands below.
    """
    known = panels(run)
    found = {it.variant for panel in known for it in shown(run, panel[0].name, panel[1])}
    variants = [it for it in VARIANTS if it in found and it in _COLOURS]
    if not variants:
        raise UmemError("the run has no variant to draw beside the stock one")
    columns = min(2, len(known))
    rows = -(-len(known) // columns)
    figure = new_figure(run, 4.6 * columns + 2.2, 4.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(known) :]:
        axes.set_axis_off()
    for axes, (workload, method) in zip(grid, known, strict=False):
        _panel(axes, run, workload, method, variants)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = "hatched: more resident than\nthe budget, or not counted"
    handles = [
        Line2D([], [], color="black", linestyle="--", label="stock, all resident"),
        *(Patch(facecolor=_COLOURS[it], label=it) for it in variants),
        Patch(facecolor="grey", label=words, **OVER_BUDGET_STYLE),
    ]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8)
    return figure


def _panel(
    axes: Any, run: Run, workload: Workload, method: Method, variants: list[Variant]
) -> None:
    budgets = sorted(workload.budgets_percent, reverse=True)
    width = _GROUP_WIDTH / len(variants)
    reasons: dict[str, list[str]] = {}
    for result in shown(run, workload.name, method):
        if result.variant not in variants:
            continue
        offset = (variants.index(result.variant) - (len(variants) - 1) / 2) * width
        for group, percent in enumerate(budgets):
            if result.variant in BUDGETED and result.budget_percent != percent:
                continue
            if result.state == "off":
                who = f"{result.variant} at {percent:g} %"
                reasons.setdefault(result.reason or "", []).append(who)
                continue
            axes.bar(
                group + offset,
                tokens_per_s(run, result),
                width * 0.92,
                color=_COLOURS[result.variant],
                edgecolor="white",
                **({} if fits(run, result, percent) else OVER_BUDGET_STYLE),
            )
    stock = stock_of(run, workload.name, method)
    if stock is not None:
        axes.axhline(tokens_per_s(run, stock), color="black", linestyle="--")
    axes.set_xticks(range(len(budgets)), [f"{percent:g} %" for percent in budgets])
    words = [
        fill(f"off: {', '.join(names)}: {reason}", _NOTE_CHARACTERS)
        for reason, names in reasons.items()
    ]
    label = "\n".join(["budget of resident memory, of the working set", *words])
    axes.set_xlabel(label, fontsize=7)
    axes.set_ylabel("tokens/s")
    axes.set_title(batches(workload, method).replace(", ", "\n", 1), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
