"""Tokens per second beside the card's peak memory, variant beside variant, for each case."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umem import UmemError
from umem_bench.results import Run, ScaleCase, ScaleVariant
from umem_bench.scale.tables import is_over_budget, measured, of_variant, title, tokens_per_s
from umem_bench.training.picture import OVER_BUDGET_STYLE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["scale_figure"]

_COLOURS: dict[ScaleVariant, str] = {
    "umem": "#0072B2",
    "umem-backward": "#8CD3B6",
    "umem-waiting": "#56B4E9",
    "stock": "#999999",
    "torchao": "#D55E00",
    "deepspeed": "#CC79A7",
    "deepspeed-3": "#882255",
    "fsdp-offload": "#E69F00",
    "save-on-cpu": "#F0E442",
}
_GIB = 1 << 30


def scale_figure(run: Run) -> Figure:
    """Draw each case in a row: speeds with the floor as a line, and peaks with the budgets.

    A variant over its budget is drawn pale and hatched.
    """
    cases = [
        case
        for case in run.scale_settings.cases
        if any(it.variant in _COLOURS for it in measured(run, case))
    ]
    if not cases:
        raise UmemError("the run has no variant to draw beside the floor")
    figure = new_figure(run, 9, 2.6 * len(cases) + 0.4)
    grid = figure.subplots(len(cases), 2, squeeze=False)
    for (speeds, peaks), case in zip(grid, cases, strict=True):
        _draw(speeds, peaks, run, case)
    return figure


def _draw(speeds: Any, peaks: Any, run: Run, case: ScaleCase) -> None:
    rows = [it for it in measured(run, case) if it.variant in _COLOURS]
    names = [it.variant for it in rows]
    for number, it in enumerate(rows):
        style: Any = {"color": _COLOURS[it.variant], "edgecolor": "white"}
        if is_over_budget(run, it):
            style |= OVER_BUDGET_STYLE
        speeds.barh(number, tokens_per_s(run, it), **style)
        peaks.barh(number, (it.card_peak_bytes or 0) / _GIB, **style)
        if it.budget_bytes is not None:
            ends = [number - 0.4, number + 0.4]
            peaks.plot([it.budget_bytes / _GIB] * 2, ends, color="black")
    floor = of_variant(run, case, "floor")
    if floor is not None:
        speeds.axvline(tokens_per_s(run, floor), color="black", linestyle="--")
    speeds.set_title(title(run, case), fontsize=9, loc="left")
    speeds.set_xlabel("tokens/s; dashed: no optimizer step", fontsize=8)
    peaks.set_xlabel("card's peak by NVML, GiB; line: budget", fontsize=8)
    for axes in (speeds, peaks):
        axes.set_yticks(range(len(names)), names if axes is speeds else [])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
