"""umem's planners beside published ones, on traces that were published with their times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umem import TraceError, UmemError, load_hardware, load_policy, load_trace
from umem_bench.planning import live_bytes
from umem_bench.results import Measurement, Run
from umem_bench.tables import NOTHING, Table, beside, provenance

if TYPE_CHECKING:
    from umem import Hardware, Policy, Trace

__all__ = [
    "BUDGETS_PERCENT",
    "MACHINE",
    "OWN_ADDRESSES",
    "PLANNERS",
    "PUBLISHED",
    "SETTINGS",
    "compare",
    "heading",
    "tables",
]

MACHINE = Path(__file__).with_name("a100-g10.yaml")
"""The profile of the machine that the traces were published for."""

SETTINGS: dict[str, Any] = {"hardware": MACHINE.stem, "policy": "managed-all"}
"""The machine that the traces were published for; a policy without a budget of its own."""

BUDGETS_PERCENT = (100, 90, 75, 50, 25)
"""Shares of the device's memory to plan for."""

PLANNERS = ("fault", "lookahead", "planned")

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
    """Plan and simulate every published trace of a folder: 1 to 64 files in the exchange format.

    Raises
    ------
    UmemError
        If the folder holds none, or more than 64; TraceError for one without published times.
    """
    paths = sorted(folder.glob("*.json.gz"))
    if not 1 <= len(paths) <= _MAX_TRACES:
        raise UmemError(
            f"{folder}: {len(paths)} files *.json.gz: give a folder of 1 to {_MAX_TRACES} "
            "published traces"
        )
    hardware, policy = load_hardware(MACHINE), load_policy(SETTINGS["policy"])
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
    return Measurement(
        benchmark="trace",
        case=trace.name,
        subject="published",
        figures={
            **published,
            "resident_s": float(require_durations(trace).sum()),
            "allocated_bytes": int(trace.tensor_bytes.sum()),
            "peak_live_bytes": live_bytes(trace),
            "device_bytes": hardware.device_bytes,
        },
    )


def _plan(
    trace: Trace, hardware: Hardware, policy: Policy, planner: str, percent: int, subject: str
) -> Measurement:
    from umem.pages.plan import plan
    from umem.pages.simulate import simulate
    from umem.policy import resolve

    rules = dataclasses.replace(
        resolve(policy, hardware, environ={}),
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
    """For each trace, steps by planner and share of the device's memory, beside published ones."""
    budgets = [f"{percent} %" for percent in BUDGETS_PERCENT]
    for trace in run.measurements("trace"):
        found = {it: beside(run.measurements(it)).get(trace.case, {}) for it in budgets}
        rows = [
            (f"published: {words}", f"{trace.figures[f'{name}_ms']:,.1f}", *[NOTHING] * 4)
            for name, words in PUBLISHED.items()
            if f"{name}_ms" in trace.figures
        ]
        for subject in dict.fromkeys(name for own in found.values() for name in own):
            cells = (found[it].get(subject) for it in budgets)
            rows.append((subject, *(NOTHING if it is None else _step(it) for it in cells)))
        planned = [found[it]["`planned`"].figures for it in budgets]
        rows.append(("lower bound", *(_ms(it["lower_bound_s"]) for it in planned)))
        sizes = (_gb(trace.figures[f"{it}_bytes"]) for it in ("peak_live", "allocated"))
        for where in ("host", "device"):
            moved = (_gb(it[f"to_{where}_bytes"]) for it in planned)
            rows.append((f"`planned`: moved to the {where}, GB", *moved))
        words = "{} GB live at most, {} GB in all, on a device of ".format(*sizes)
        yield Table(
            f"{trace.case}: a step with a share of the device's memory, ms (over the lower bound); "
            f"{words}{_gb(trace.figures['device_bytes'])} GB",
            ("", *budgets),
            rows,
        )


def _step(it: Measurement) -> str:
    step_s, bound_s = it.figures["step_s"], it.figures["lower_bound_s"]
    return f"{_ms(step_s)} ({step_s / bound_s:.3f})"


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:,.1f}"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f}"
