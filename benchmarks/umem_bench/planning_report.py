"""The results of `umem bench planning` as tables, and against the targets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from umem.core.units import format_bytes
from umem_bench.planning_results import FirstUse, GrowthPoint, PlannerTimes, PlanningRun, median_s
from umem_bench.report import Check, Grid

__all__ = ["MAX_GROWTH", "MAX_PLANNING_S", "checks", "grids", "growth_exponent", "heading"]

MAX_PLANNING_S = 3.0
"""Target: planning and one simulation of `TARGET_WORKLOAD`, compiled."""

TARGET_WORKLOAD = "llama-2-7b-sft"
TARGET_PLANNER = "planned"

MAX_GROWTH = 0.15
"""Target: exponent of the phases' number n in time / (n log n). Room for noise and for caches."""

GPUS_PER_NODE = 4
JOBS = ((64, 1, 1), (1024, 8, 2), (4096, 16, 4), (16384, 16, 4))
"""GPUs, pipeline stages and shapes of batches of the jobs that the last table works out."""


def heading(run: PlanningRun) -> str:
    """One line that says where, when and with what a run was made."""
    machine, settings = run.machine, run.settings
    versions = {
        "Python": machine.python,
        "umem": machine.umem,
        "NumPy": machine.numpy,
        "numba": machine.numba,
        "torch": machine.torch,
        "transformers": machine.transformers,
    }
    parts = [
        f"{machine.cpu}, {machine.cpu_count} cores",
        *(f"{name} {version}" for name, version in versions.items() if version),
        f"plans for {settings.hardware}, policy {settings.policy}",
        f"batch {settings.batch}, sequence {settings.seq}, window {settings.window}",
        f"medians of {settings.rounds} rounds",
        run.date,
    ]
    return ", ".join(parts)


def grids(run: PlanningRun) -> Iterator[Grid]:
    """The tables of a run."""
    yield _workloads(run)
    yield _plans(run)
    if run.first_use:
        yield _first_use(run.first_use)
    yield _simulators(run)
    if run.growth:
        yield _growth(run)
    yield _reuse(run)
    if any(workload.ranks > 1 for workload in run.workloads):
        yield _jobs(run)


def checks(run: PlanningRun) -> Iterator[Check]:
    """Hold a run against the targets; what was not measured fails."""
    subject = f"{TARGET_WORKLOAD}, {TARGET_PLANNER}: planning and a simulation"
    times = next(
        (
            times
            for workload in run.workloads
            if workload.name == TARGET_WORKLOAD
            for times in workload.planners
            if times.planner == TARGET_PLANNER
        ),
        None,
    )
    if times is None:
        yield Check(subject, False, "not measured")
    else:
        took_s = median_s(times.plan_s) + median_s(times.simulate_s)
        yield Check(
            subject,
            took_s < MAX_PLANNING_S,
            f"{_seconds(took_s)}, below {_seconds(MAX_PLANNING_S)}",
        )
    if not run.growth:
        yield Check("growth", False, "not measured")
    for planner in _growth_planners(run):
        exponent = growth_exponent(run.growth, planner)
        yield Check(
            f"growth with {planner}",
            exponent <= MAX_GROWTH,
            f"time / (n log n) goes with n to the power of {exponent:.2f}, at most {MAX_GROWTH}",
        )


def growth_exponent(points: tuple[GrowthPoint, ...], planner: str) -> float:
    """Exponent e of time / (n log n) ~ n**e for n phases, fitted by least squares.

    Time is the least of the rounds, for one simulation: how many plans a search tries is up to the
    workload, within a bound that does not depend on n.
    """
    own = [point for point in points if point.planner == planner]
    count = np.array([point.phases for point in own], float)
    time_s = np.array([min(point.times_s) / point.simulations for point in own])
    return float(np.polyfit(np.log(count), np.log(time_s / (count * np.log(count))), 1)[0])


def _workloads(run: PlanningRun) -> Grid:
    rows = [
        (
            workload.name,
            f"{workload.phases:,}",
            f"{workload.tensors:,}",
            f"{workload.accesses:,}",
            format_bytes(workload.peak_live_bytes),
            format_bytes(workload.budget_bytes),
            _seconds(workload.record_s),
            format_bytes(workload.trace_bytes),
        )
        for workload in run.workloads
    ]
    columns = ("workload", "phases", "tensors", "uses", "live at the peak")
    return Grid("Traces", (*columns, "device budget", "recording it", "trace file"), tuple(rows))


def _plans(run: PlanningRun) -> Grid:
    rows = [
        (
            workload.name,
            times.planner,
            _seconds(median_s(times.plan_s)),
            _seconds(median_s(times.simulate_s)),
            str(times.simulations),
            f"{times.hints:,}",
            format_bytes(times.plan_bytes),
            _seconds(times.step_s),
            f"{times.step_s / times.lower_bound_s:.3f}",
        )
        for workload in run.workloads
        for times in workload.planners
    ]
    columns = ("workload", "planner", "planning", "a simulation", "simulated on the way", "hints")
    return Grid(
        f"Plans for {run.settings.hardware}, policy {run.settings.policy}, compiled",
        (*columns, "plan file", "predicted step", "over the lower bound"),
        tuple(rows),
    )


def _first_use(times: FirstUse) -> Grid:
    row = (_seconds(times.compiling_s), _seconds(times.cached_s))
    return Grid(
        "All planners once, with a simulation each, in a new process, after its imports",
        ("nothing compiled before", "from numba's cache"),
        (row,),
    )


def _simulators(run: PlanningRun) -> Grid:
    rows = []
    for workload in run.workloads:
        reference_s = median_s(workload.simulators[0].step_s)
        for times in workload.simulators:
            step_s = median_s(times.step_s)
            moved = "tensors" if times.unit_bytes is None else format_bytes(times.unit_bytes)
            rows.append(
                (
                    workload.name,
                    times.simulator,
                    f"{times.units:,} {'' if times.unit_bytes is None else 'of '}{moved}",
                    _seconds(step_s),
                    f"{workload.accesses / step_s:,.0f}",
                    f"{step_s / reference_s:.2f}x",
                    format_bytes(times.to_device_bytes),
                )
            )
    return Grid(
        "Simulators of demand paging, one step in steady state",
        (
            "workload",
            "simulator",
            "moves",
            "time",
            "uses of tensors per second",
            "time over umem's",
            "moved to the device",
        ),
        tuple(rows),
    )


def _growth(run: PlanningRun) -> Grid:
    planners = _growth_planners(run)
    rows: list[tuple[str, ...]] = []
    for layers in dict.fromkeys(point.layers for point in run.growth):
        own = {point.planner: point for point in run.growth if point.layers == layers}
        one = next(iter(own.values()))
        rows.append(
            (
                f"{layers}",
                f"{one.phases:,}",
                f"{one.tensors:,}",
                f"{one.blocks:,}",
                *(_seconds(min(own[planner].times_s)) for planner in planners),
                " / ".join(f"{own[planner].simulations}" for planner in planners),
            )
        )
    exponents = [f"{growth_exponent(run.growth, planner):+.2f}" for planner in planners]
    rows.append(("exponent", *(("",) * 3), *exponents, ""))
    return Grid(
        "Planning and a simulation by number of layers, least of the rounds; exponent of the "
        "phases' number n in time per simulation / (n log n)",
        ("layers", "phases", "tensors", "blocks of 2 MiB", *planners, "simulations in all"),
        tuple(rows),
    )


def _reuse(run: PlanningRun) -> Grid:
    rows = []
    for workload in run.workloads:
        planned = _planned(workload.planners)
        plan_s = median_s(planned.plan_s)
        reuse_s = median_s(workload.key_s) + median_s(planned.load_s)
        rows.append(
            (
                workload.name,
                _seconds(median_s(workload.key_s)),
                _seconds(plan_s),
                _seconds(median_s(planned.store_s)),
                _seconds(median_s(planned.load_s)),
                f"{plan_s / reuse_s:.0f}x",
            )
        )
    return Grid(
        "What the first process pays and what the others pay",
        ("workload", "key", "planning", "writing the plan", "reading it", "planning over reuse"),
        tuple(rows),
    )


def _jobs(run: PlanningRun) -> Grid:
    workload = next(workload for workload in run.workloads if workload.ranks > 1)
    planned = _planned(workload.planners)
    each_bytes = workload.trace_bytes + planned.plan_bytes
    plan_s = median_s(planned.plan_s)
    rows = []
    for gpus, stages, shapes in JOBS:
        nodes = gpus // GPUS_PER_NODE
        rows.append(
            (
                f"{gpus:,}",
                f"{nodes:,}",
                f"{stages} x {shapes}",
                f"{stages * shapes}",
                _seconds(stages * shapes * plan_s),
                _seconds(shapes * plan_s),
                _seconds(gpus * shapes * plan_s),
                format_bytes(stages * shapes * each_bytes),
                format_bytes(gpus * shapes * each_bytes),
                format_bytes(nodes * shapes * each_bytes),
            )
        )
    columns = ("GPUs", "nodes", "stages x shapes", "plans", "planned by one process")
    return Grid(
        f"Jobs worked out from {workload.name}, as if each stage were the whole model; "
        f"{GPUS_PER_NODE} GPUs in a node, all of them of one stage",
        (
            *columns,
            "by one of each stage",
            "CPU time if every rank planned",
            "files",
            "read if every rank reads",
            "if a node reads once",
        ),
        tuple(rows),
    )


def _planned(planners: tuple[PlannerTimes, ...]) -> PlannerTimes:
    return next(times for times in planners if times.planner == TARGET_PLANNER)


def _growth_planners(run: PlanningRun) -> tuple[str, ...]:
    return tuple(dict.fromkeys(point.planner for point in run.growth))


def _seconds(time_s: float) -> str:
    """A time in three digits."""
    scaled, unit = next(
        (time_s * factor, unit)
        for factor, unit, least in ((1.0, "s", 1.0), (1e3, "ms", 1e-3), (1e6, "µs", 0.0))
        if time_s >= least
    )
    return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
