"""umem's planners beside published ones, on traces that were published with their times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from umem import TraceError, UmemError, load_hardware, load_policy, load_trace
from umem_bench.results import Measurement, Run
from umem_bench.tables import NOTHING, Table, beside, provenance

if TYPE_CHECKING:
    from umem import Hardware, Policy, Trace

__all__ = [
    "BUDGETS_PERCENT",
    "OWN_ADDRESSES",
    "PLANNERS",
    "PUBLISHED",
    "SETTINGS",
    "compare",
    "heading",
    "tables",
]

SETTINGS: dict[str, Any] = {"hardware": "a100-g10", "policy": "managed"}
"""The machine that the traces were published for; a policy without a budget of its own."""

BUDGETS_PERCENT = (100, 90, 75, 50, 25)
"""Shares of the device's memory to plan for."""

PLANNERS = ("fault", "lookahead", "oracle", "planned")

PUBLISHED = {
    "ideal": "all resident",
    "naive_um_lru": "demand paging (`naive_um_lru`)",
    "deepum": "DeepUM",
    "g10": "G10",
}
"""Times that the traces came with, by their names there."""

OWN_ADDRESSES = "`fault`, own addresses"
"""Demand paging as published: every tensor has an address of its own and is never freed."""

FREE_LINK = {
    "to_device": "`planned`, if moving to the device took no time",
    "to_host": "`planned`, if moving to the host took no time",
}
"""The plan with one direction of the link for free, to see which one holds the step up."""

_MAX_TRACES = 64
_UNLIMITED_BYTES_PER_S = 1e15


def compare(folder: Path, progress: Callable[[str], None] = lambda _: None) -> list[Measurement]:
    """Plan and simulate every published trace of a folder.

    Parameters
    ----------
    folder
        Holds 1 to 64 traces ``*.json.gz`` in the exchange format, with published times.
    progress
        Called with the name of each trace before it is planned.

    Raises
    ------
    UmemError
        If the folder holds no trace, or more than 64; TraceError for one that cannot be read, or
        with which no times were published.
    """
    paths = sorted(folder.glob("*.json.gz"))
    if not 1 <= len(paths) <= _MAX_TRACES:
        raise UmemError(
            f"{folder}: {len(paths)} files *.json.gz: give a folder of 1 to {_MAX_TRACES} "
            "published traces"
        )
    hardware, policy = load_hardware(SETTINGS["hardware"]), load_policy(SETTINGS["policy"])
    found: list[Measurement] = []
    for path in paths:
        progress(f"{path.name}: planning and simulating")
        trace = load_trace(path)
        found.append(_trace(trace, path, hardware))
        found.append(_plan(trace, hardware, policy, "fault", 100, OWN_ADDRESSES))
        for percent in BUDGETS_PERCENT:
            for planner in PLANNERS:
                found += [_plan(trace, hardware, policy, planner, percent, f"`{planner}`")]
            for direction, subject in FREE_LINK.items():
                names = ("link_bytes_per_s", f"{direction}_bytes_per_s")
                fast: dict[str, Any] = dict.fromkeys(names, _UNLIMITED_BYTES_PER_S)
                faster = dataclasses.replace(hardware, **fast)
                found.append(_plan(trace, faster, policy, "planned", percent, subject))
    return found


def _trace(trace: Trace, path: Path, hardware: Hardware) -> Measurement:
    from umem.trace import require_durations

    published = {
        f"{name}_ms": float(trace.metadata[f"published_{name}"])
        for name in PUBLISHED
        if isinstance(trace.metadata.get(f"published_{name}"), int | float)
    }
    if not published:
        raise TraceError(
            f"{path}: published: none of {', '.join(PUBLISHED)}: give a trace with published times"
        )
    duration_s = require_durations(trace)
    change = np.zeros(trace.phase_count + 1, np.int64)
    np.add.at(change, trace.first_phase, trace.tensor_bytes)
    np.subtract.at(change, trace.last_phase + 1, trace.tensor_bytes)
    live_bytes = np.cumsum(change)[:-1]
    peak = int(live_bytes.argmax())
    return Measurement(
        benchmark="trace",
        case=trace.name,
        subject="published",
        figures={
            **published,
            "resident_s": float(duration_s.sum()),
            "allocated_bytes": int(trace.tensor_bytes.sum()),
            "persistent_bytes": int(trace.tensor_bytes[trace.persistent].sum()),
            "peak_live_bytes": int(live_bytes[peak]),
            "device_bytes": hardware.device_bytes,
            "peak_at_s": float(duration_s[:peak].sum()),
        },
    )


def _plan(
    trace: Trace, hardware: Hardware, policy: Policy, planner: str, percent: int, subject: str
) -> Measurement:
    from umem.planning import plan
    from umem.policy import resolve
    from umem.simulation import simulate

    rules = dataclasses.replace(
        resolve(policy, hardware.device_bytes, environ={}),
        device_budget_bytes=hardware.device_bytes * percent // 100,
    )
    schedule = plan(trace, hardware, rules, planner)
    addresses: Any = "own" if subject == OWN_ADDRESSES else "reused"
    report = simulate(trace, schedule, hardware, rules, addresses=addresses)
    return Measurement(
        benchmark=f"{percent} %",
        case=trace.name,
        subject=subject,
        figures={
            "step_s": report.step_s,
            "lower_bound_s": report.lower_bound_s,
            "to_device_bytes": report.moved_bytes("to_device"),
            "to_host_bytes": report.moved_bytes("to_host"),
        },
    )


# ---- tables ----


def heading(run: Run) -> str:
    """One line that says with what a comparison was made."""
    settings = run.header.settings
    assert isinstance(settings, dict)
    return provenance(
        run.header, f"hardware {settings['hardware']}", f"policy {settings['policy']}"
    )


def tables(run: Run) -> Iterator[Table]:
    """The traces, umem's times beside published ones, and two tables by budget for each trace."""
    traces = {it.case: it.figures for it in run.measurements("trace")}
    plans = {
        case: {
            percent: beside(run.measurements(f"{percent} %")).get(case, {})
            for percent in BUDGETS_PERCENT
        }
        for case in traces
    }
    sizes = {
        "all tensors of a step, GB": "allocated_bytes",
        "of these, from step to step, GB": "persistent_bytes",
        "allocated at once, at most, GB": "peak_live_bytes",
        "memory of the device, GB": "device_bytes",
    }
    yield Table(
        "The traces",
        ("", *traces),
        [
            *((words, *(f"{it[key] / 1e9:.1f}" for it in traces.values()))
              for words, key in sizes.items()),
            ("time until most is allocated, ms", *(_ms(it["peak_at_s"]) for it in traces.values())),
        ],
    )  # fmt: skip
    yield _beside_published(traces, plans)
    for case, by_percent in plans.items():
        budgets = ("", *(f"{percent} %" for percent in BUDGETS_PERCENT))
        yield Table(
            f"{case}: a step with a share of the device's memory, ms",
            budgets,
            [
                *(_row(f"`{it}`", by_percent, f"`{it}`", _step)
                  for it in PLANNERS),
                _row("lower bound", by_percent, "`planned`", _bound),
                _row("regret of `planned`", by_percent, "`planned`", _regret),
                *(
                    _row(f"moved to the {it}, GB", by_percent, "`planned`", partial(_moved, it))
                    for it in ("host", "device")
                ),
                *(_row(f"regret of {it}", by_percent, it, _regret) for it in FREE_LINK.values()),
            ],
        )  # fmt: skip


_Figures = dict[str, float]
_Plans = dict[int, dict[str, Measurement]]


def _beside_published(traces: dict[str, _Figures], plans: dict[str, _Plans]) -> Table:
    def published(name: str) -> tuple[str, ...]:
        times = (it.get(f"{name}_ms") for it in traces.values())
        return (f"published: {PUBLISHED[name]}", *(f"{it:,.1f}" if it else NOTHING for it in times))

    def ours(
        subject: str, cell: Callable[[_Figures], str] = lambda it: _ms(it["step_s"])
    ) -> tuple[str, ...]:
        return tuple(cell(by_percent[100][subject].figures) for by_percent in plans.values())

    return Table(
        "A step with all of the device, ms",
        ("", *traces),
        [
            published("ideal"),
            ("umem: all resident", *(_ms(it["resident_s"]) for it in traces.values())),
            published("naive_um_lru"),
            (f"umem: {OWN_ADDRESSES}", *ours(OWN_ADDRESSES)),
            ("umem: `fault`", *ours("`fault`")),
            published("deepum"),
            ("umem: `lookahead`", *ours("`lookahead`")),
            ("umem: `oracle`", *ours("`oracle`")),
            published("g10"),
            ("umem: `planned`", *ours("`planned`")),
            ("lower bound", *ours("`planned`", _bound)),
            ("regret of `planned`", *ours("`planned`", _regret)),
        ],
    )


def _row(
    label: str, by_percent: _Plans, subject: str, cell: Callable[[_Figures], str]
) -> tuple[str, ...]:
    return (label, *(cell(it[subject].figures) for it in by_percent.values()))


def _step(figures: _Figures) -> str:
    return _ms(figures["step_s"])


def _bound(figures: _Figures) -> str:
    return _ms(figures["lower_bound_s"])


def _moved(where: str, figures: _Figures) -> str:
    return f"{figures[f'to_{where}_bytes'] / 1e9:.1f}"


def _regret(figures: _Figures) -> str:
    return f"{figures['step_s'] / figures['lower_bound_s']:.3f}"


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:,.1f}"
