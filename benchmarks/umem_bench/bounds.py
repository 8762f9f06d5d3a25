"""Planned steps held against the fluid bound, for published traces and Llama models."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umem import load_hardware, load_policy, load_trace
from umem_bench.published import MACHINE
from umem_bench.results import Measurement, Run, median
from umem_bench.tables import Check, Table, at_most, provenance, seconds

if TYPE_CHECKING:
    from umem import Hardware, Trace

__all__ = [
    "BUDGETS_PERCENT",
    "MODELS",
    "MODEL_PERCENT",
    "SETTINGS",
    "checks",
    "heading",
    "run_bounds",
    "tables",
]

SETTINGS: dict[str, Any] = {"policy": "managed-all", "batch": 2, "seq": 2048}

BUDGETS_PERCENT = (100, 75, 50, 35, 25)
"""Shares of the device's memory for published traces, on the machine that they were made for."""

MODELS = ("llama-2-7b", "llama-2-13b")
MODES = ("sft", "lora")
MODEL_MACHINES = ("gh200-96", "h200")
MODEL_PERCENT = 60

LIMIT = 1.05
"""Planned steps are to take at most this many times the fluid bound."""

_OVER_IDEAL = ("step_s", "without_write_backs_s", "quick_s", "fluid_s")


def run_bounds(
    folder: Path, models: tuple[str, ...] = MODELS, on_progress: Callable[[str], None] = print
) -> list[Measurement]:
    """Plan, simulate and bound every published trace of a folder, and steps of models."""
    found: list[Measurement] = []
    for path in sorted(folder.glob("*.json.gz")):
        trace = load_trace(path)
        for percent in BUDGETS_PERCENT:
            on_progress(f"{trace.name}, {percent} % of {MACHINE.stem}")
            found.append(_measure(trace, load_hardware(MACHINE), percent))
    for trace in _recorded(models, on_progress):
        for machine in MODEL_MACHINES:
            on_progress(f"{trace.name}, {MODEL_PERCENT} % of {machine}")
            found.append(_measure(trace, load_hardware(machine), MODEL_PERCENT))
    return found


def _recorded(models: tuple[str, ...], on_progress: Callable[[str], None]) -> Iterator[Trace]:
    from umem.capture.offline import model_trace

    for model in models:
        for mode in MODES:
            on_progress(f"recording {model}, {mode}")
            yield model_trace(model, mode, batch=SETTINGS["batch"], seq=SETTINGS["seq"])


def _measure(trace: Trace, hardware: Hardware, percent: int) -> Measurement:
    from umem.hardware import with_durations
    from umem.pages.plan import plan
    from umem.pages.simulate import simulate
    from umem.policy import resolve
    from umem_bench.fluid_bound import fluid_bound_s

    budget_bytes = hardware.device_bytes * percent // 100
    rules = dataclasses.replace(
        resolve(load_policy(SETTINGS["policy"]), hardware, environ={}),
        device_budget_bytes=budget_bytes,
    )
    timed = with_durations(trace, hardware)
    plan(timed, hardware, rules)  # compiles, or loads what is compiled
    began_s = time.process_time()
    schedule = plan(timed, hardware, rules)
    plan_s = time.process_time() - began_s
    moved = plan(timed, hardware, rules, may_write_back=False)
    report = simulate(timed, schedule, hardware, rules)
    return Measurement(
        benchmark=f"{percent} % of {hardware.name}",
        case=trace.name,
        subject="planned",
        rounds_s=(plan_s,),
        figures={
            "step_s": report.step_s,
            "ideal_s": report.ideal_s,
            "quick_s": report.lower_bound_s,
            "fluid_s": fluid_bound_s(timed, hardware, budget_bytes),
            "without_write_backs_s": simulate(timed, moved, hardware, rules).step_s,
        },
    )


def heading(run: Run) -> str:
    """One line that says with what the plans were made."""
    settings = run.header.settings
    assert isinstance(settings, dict)
    return provenance(
        run.header,
        "predicted",
        f"policy {settings['policy']}",
        f"Llama at batch {settings['batch']}, sequence {settings['seq']}",
    )


def tables(run: Run) -> Iterator[Table]:
    """Steps and bounds over the time with everything resident."""
    columns = (
        "step", "device memory", "all resident", "`planned`", "without write-backs",
        "quick bound", "fluid bound",
        "`planned` over the fluid bound", "planning (CPU)",
    )  # fmt: skip
    yield Table(
        "Predicted steps, and bounds below every step, over the time with everything resident",
        columns,
        [
            (
                it.case,
                it.benchmark,
                seconds(it.figures["ideal_s"]),
                *(f"{it.figures[name] / it.figures['ideal_s']:.3f}" for name in _OVER_IDEAL),
                f"{it.figures['step_s'] / it.figures['fluid_s']:.3f}",
                seconds(median(it.rounds_s)),
            )
            for it in run.results
            if isinstance(it, Measurement)
        ],
    )


def checks(run: Run) -> Iterator[Check]:
    """Hold each planned step against the fluid bound."""
    for it in run.results:
        assert isinstance(it, Measurement)
        subject = f"{it.case}, {it.benchmark}: planned over the fluid bound"
        yield at_most(subject, it.figures["step_s"], it.figures["fluid_s"], LIMIT)
