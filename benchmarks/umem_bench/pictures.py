"""Draws the pictures of the pages: `python -m umem_bench.pictures docs/pictures`.

``residency-7b.svg`` and ``timeline-7b.svg`` show the plan that ``umem simulate`` makes of a
training. Each file has the colours of a light and of a dark page, and takes those that the reader's
system asks for.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from umem.capture.offline import model_trace
from umem.hardware import load_hardware
from umem.policy import load_policy, resolve
from umem.predict.stream_prediction import StreamPrediction, predict_stream
from umem.streaming.plan import LaneReport, LaneTasks, simulate_lanes, simulate_plan, step_timing

__all__ = ["main"]

# Okabe and Ito's colours, which people with any common colour blindness can tell apart, and
# brighter ones for a dark page. Rules go by the light colour, so no two names have the same.
_LIGHT = {
    "ink": "#1f2328",
    "muted": "#59636e",
    "grid": "#d1d9e0",
    "weights": "#0072b2",
    "state": "#009e73",
    "slots": "#8fd6bd",
    "gradients": "#e69f00",
    "activations": "#d55e00",
    "forward": "#56b4e9",
    "other": "#8c959f",
}
_DARK = {
    "ink": "#e6edf3",
    "muted": "#9aa4af",
    "grid": "#3d444d",
    "weights": "#4aa3df",
    "state": "#2cb78f",
    "slots": "#1c6b55",
    "gradients": "#f2b632",
    "activations": "#f07f3c",
    "forward": "#a5d8f7",
    "other": "#6e7681",
}
_C = _LIGHT
_STYLE: dict[str, Any] = {
    "axes.edgecolor": _C["muted"],
    "axes.labelcolor": _C["ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": _C["ink"],
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "font.size": 10.5,
    "grid.color": _C["grid"],
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.hashsalt": "umem",
    "text.color": _C["ink"],
    "xtick.color": _C["muted"],
    "ytick.color": _C["muted"],
    "xtick.labelcolor": _C["ink"],
    "ytick.labelcolor": _C["ink"],
}
_WIDTH_INCHES = 5.6  # words that a telephone's page can still show


@dataclass(frozen=True)
class _Interval:
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class _Step:
    """A planned step, and when each of its tasks runs; 0 is the return of the step before."""

    prediction: StreamPrediction
    step_s: float
    lanes: Sequence[Sequence[_Interval]]
    """By lane of the simulator, in the order of its tasks."""


def planned_step(model: str = "llama-2-7b", policy: Any = "sft") -> _Step:
    """Plan a training for an H100, by default the picture's, as ``umem simulate`` does."""
    hardware = load_hardware("h100-sxm")
    trace = model_trace(model, "sft", precision="fp32-autocast", batch=4, seq=2048, checkpoint=True)
    kept: list[tuple[LaneTasks, LaneReport]] = []

    def keep(tasks: LaneTasks, machine: Any) -> LaneReport:
        report = simulate_lanes(tasks, machine)
        kept.append((tasks, report))
        return report

    prediction = predict_stream(trace, hardware, resolve(load_policy(policy), hardware))
    plan, step = prediction.plan, prediction.step
    # The simulator reports sums; a picture needs each task.
    with mock.patch.object(step_timing, "simulate_lanes", keep):
        simulate_plan(step.units, plan, hardware=hardware, other_s=step.other_s)
    ((tasks, report),) = kept
    return _Step(prediction, report.step_s, _intervals(tasks, report))


def _intervals(tasks: LaneTasks, report: LaneReport) -> list[list[_Interval]]:
    """When each task runs: it begins when its lane is free and what it waits for is done."""
    step_s, ends = report.step_s, report.end_s
    found = []
    for lane, waits in enumerate(tasks.waits):
        row = []
        for number, others in enumerate(waits):
            before = ends[lane][number - 1] if number else ends[lane][-1] - step_s
            done = [ends[at][count - 1] - steps * step_s for at, count, steps in others]
            begin = max([before, *done])
            row.append(_Interval(begin + step_s, ends[lane][number] + step_s))
        found.append(row)
    return found


def timeline_figure(step: _Step) -> Figure:
    """What the device computes and what both directions of the link carry, over one step."""
    lane = step_timing._Lane
    units = len(step.prediction.step.units)
    passes = step.lanes[lane.PASSES]
    resident, forward = passes[:1], passes[1 : 1 + units]
    backward, clipping = passes[1 + units : 1 + 2 * units], passes[1 + 2 * units :]
    rows = [
        ("passes", [(forward, "forward"), (backward, "weights"), (clipping, "other")]),
        ("updates", [(resident, "state"), (step.lanes[lane.UPDATES], "state")]),
        ("copies to device", [(step.lanes[lane.STATE_IN], "gradients")]),
        ("copies to host", [(step.lanes[lane.STATE_OUT], "activations")]),
    ]
    figure = Figure(figsize=(_WIDTH_INCHES, 2.9), layout="constrained")
    axes = figure.subplots()
    for number, (_, parts) in enumerate(rows):
        for intervals, colour in parts:
            spans = [span for it in intervals for span in _within(it, step.step_s)]
            axes.broken_barh(
                [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans],
                (number - 0.34, 0.68),
                color=_C[colour],
                linewidth=0.5,
            )
    for words, intervals in (("forward pass", forward), ("backward pass", backward)):
        middle = 0.5e3 * (intervals[0].begin_s + intervals[-1].end_s)
        axes.text(middle, -0.45, words, ha="center", va="bottom", color=_C["muted"])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -1.05)
    axes.set_xlim(0, 1e3 * step.step_s)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms since optimizer.step(); gaps in the first row are waits")
    _title(figure, f"One step of {1e3 * step.step_s:,.0f} ms, predicted for an H100")
    return figure


def _within(it: _Interval, step_s: float) -> list[tuple[float, float]]:
    """A task's parts in the window of one step: what runs past its end begins the next one."""
    shifted = ((it.begin_s + shift, it.end_s + shift) for shift in (-step_s, 0.0, step_s))
    cut = ((max(0.0, begin), min(step_s, end)) for begin, end in shifted)
    return [(begin, end) for begin, end in cut if end > begin]


_GIB = 1 << 30
_MOMENTS = 300


def residency_figure(step: _Step) -> Figure:
    """Where each class is over a step: device memory, and page-locked host memory."""
    prediction, plan = step.prediction, step.prediction.plan
    units = prediction.step.units
    times = np.linspace(0, step.step_s, _MOMENTS)
    gradients, activations = _gradients(step, times), _activations(step, times)
    state = sum(it.state_bytes for n, it in enumerate(units) if n in plan.resident)
    layers: list[tuple[str, str, Any]] = [
        ("weights", "weights", prediction.step.weight_bytes - prediction.weight_homes_bytes),
        ("optimizer state", "state", state),
        ("slots for it", "slots", plan.slots * plan.slot_bytes),
        ("gradients", "gradients", gradients),
        ("saved activations", "activations", activations),
    ]
    figure = Figure(figsize=(_WIDTH_INCHES, 4.2), layout="constrained")
    device, host = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.25))
    stack = [np.broadcast_to(sizes, times.shape) / _GIB for *_, sizes in layers]
    colours = [_C[colour] for _, colour, _ in layers]
    device.stackplot(1e3 * times, stack, colors=colours, linewidth=0)
    device.axhline(prediction.budget_bytes / _GIB, color=_C["ink"], linestyle="--", linewidth=1.2)
    device.text(
        1e3 * step.step_s, prediction.budget_bytes / _GIB + 1.5, "budget", ha="right", va="bottom"
    )
    device.set_ylabel("device, GiB")
    device.set_ylim(0, 96)
    _title(figure, "A step of Llama-2-7B, predicted for an H100")
    homes = prediction.host_bytes / _GIB
    host.fill_between(1e3 * times[[0, -1]], [homes, homes], color=_C["state"], linewidth=0)
    host.set_ylabel("host, GiB")
    host.set_ylim(0, 40)
    host.set_xlim(0, 1e3 * step.step_s)
    host.set_xlabel("ms since optimizer.step()")
    handles = [Patch(color=_C[colour], label=name) for name, colour, _ in layers]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9.5)
    return figure


def _gradients(step: _Step, times: np.ndarray) -> np.ndarray:
    """Bytes of gradients at each moment: from a unit's backward pass until its update."""
    units, plan = step.prediction.step.units, step.prediction.plan
    lane, count = step_timing._Lane, len(units)
    passes, updates = step.lanes[lane.PASSES], iter(step.lanes[lane.UPDATES])
    sizes = np.zeros(times.shape)
    for number, unit in enumerate(units):
        begin_s = passes[2 * count - number].begin_s
        end_s = passes[0].end_s + step.step_s
        if number not in plan.resident and unit.state_bytes:
            end_s = [next(updates) for _ in unit.pieces][-1].end_s
        for begin, end in _within(_Interval(begin_s, end_s), step.step_s):
            sizes += unit.gradient_bytes * ((times >= begin) & (times < end))
    return sizes


def _activations(step: _Step, times: np.ndarray) -> np.ndarray:
    """Bytes of activations at each moment: from a unit's forward pass until its backward pass."""
    units = step.prediction.step.units
    count = len(units)
    passes = step.lanes[step_timing._Lane.PASSES]
    sizes = np.zeros(times.shape)
    for number, unit in enumerate(units):
        forward, backward = passes[1 + number], passes[2 * count - number]
        sizes += unit.saved_bytes * ((times >= forward.begin_s) & (times < backward.end_s))
    return sizes


# ---- files ----


def _title(figure: Figure, words: str) -> None:
    figure.suptitle(words, x=0.01, ha="left", fontsize=11.5, weight="bold")


def with_both_schemes(svg: str) -> str:
    """Add the colours for a dark page. A program that knows no such rules shows the light ones."""
    rules = [
        f'[style*="{what}: {light}"]{{{what}:{_DARK[name]} !important}}'
        for name, light in _LIGHT.items()
        for what in ("fill", "stroke")
        if f"{what}: {light}" in svg
    ]
    style = f"<style>@media(prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    return svg.replace("<defs>", f"<defs>\n  {style}", 1)


def main(folder: Path) -> None:
    """Draw all pictures into a folder."""
    with rc_context(_STYLE):  # type: ignore[arg-type]
        step = planned_step()
        figures: dict[str, Callable[[], Figure]] = {
            "timeline-7b": lambda: timeline_figure(step),
            "residency-7b": lambda: residency_figure(step),
        }
        for name, draw in figures.items():
            text = io.StringIO()
            draw().savefig(text, format="svg", metadata={"Date": None})
            path = folder / f"{name}.svg"
            path.write_text(with_both_schemes(text.getvalue()), encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
