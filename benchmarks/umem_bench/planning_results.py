"""What `umem bench planning` leaves behind: its data types and its file."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Literal

from umem_bench.results_file import Record, read_results, write_results

__all__ = [
    "FirstUse",
    "GrowthPoint",
    "PlannerTimes",
    "PlanningMachine",
    "PlanningRun",
    "PlanningSettings",
    "SimulatorTimes",
    "WorkloadTimes",
    "median_s",
    "read_planning",
    "write_planning",
]


class PlanningMachine(Record):
    """Where the benchmark ran; versions are None for what is not installed."""

    cpu: str
    cpu_count: int
    system: str
    python: str
    umem: str
    numpy: str | None
    numba: str | None
    torch: str | None
    transformers: str | None


class PlanningSettings(Record):
    """What was planned, for which machine."""

    hardware: str
    policy: str
    window: int
    batch: int
    seq: int
    rounds: int


class FirstUse(Record):
    """All planners, each once with a simulation, in a new process: seconds."""

    compiling_s: float
    """Nothing was compiled before."""
    cached_s: float
    """The compiled functions were in numba's cache."""


class PlannerTimes(Record):
    """One planner on one workload. Times in seconds, by round; sizes in bytes."""

    planner: str
    plan_s: tuple[float, ...]
    simulate_s: tuple[float, ...]
    simulations: int
    """Steps to steady state that were simulated to find the plan."""
    hints: int
    plan_bytes: int
    store_s: tuple[float, ...]
    load_s: tuple[float, ...]
    step_s: float
    ideal_s: float
    lower_bound_s: float


class SimulatorTimes(Record):
    """One way to simulate demand paging."""

    simulator: str
    unit_bytes: int | None
    """What it moves as a whole; None for a tensor."""
    units: int
    step_s: tuple[float, ...]
    """Time that it takes for one step, seconds, by round."""
    to_device_bytes: int


class WorkloadTimes(Record):
    """One workload; times in seconds, sizes in bytes."""

    name: str
    model: str
    mode: str
    ranks: int
    """That share the state of the model; 1 if it is whole."""
    phases: int
    tensors: int
    accesses: int
    record_s: float
    trace_bytes: int
    peak_live_bytes: int
    budget_bytes: int
    key_s: tuple[float, ...]
    planners: tuple[PlannerTimes, ...]
    simulators: tuple[SimulatorTimes, ...]


class GrowthPoint(Record):
    """Planning and simulating a network of so many layers."""

    layers: int
    phases: int
    tensors: int
    accesses: int
    blocks: int
    planner: str
    times_s: tuple[float, ...]
    """Planning and one simulation, by round: time of the processor."""
    simulations: int
    """In all, that one included."""


class PlanningRun(Record):
    """One run of `umem bench planning`: the content of its file."""

    format: Literal["umem-bench-planning-1"] = "umem-bench-planning-1"
    date: str
    machine: PlanningMachine
    settings: PlanningSettings
    first_use: FirstUse | None
    workloads: tuple[WorkloadTimes, ...]
    growth: tuple[GrowthPoint, ...]


def median_s(times_s: tuple[float, ...]) -> float:
    """Median over the rounds."""
    return statistics.median(times_s)


def write_planning(run: PlanningRun, path: Path) -> None:
    """Write a results file; see :func:`umem_bench.results_file.write_results`."""
    write_results(run, path)


def read_planning(path: Path) -> PlanningRun:
    """Read a results file.

    Raises
    ------
    ResultsFileError
        If the file cannot be read, or is not one that `umem bench planning --output` wrote.
    """
    return read_results(PlanningRun, path, "umem bench planning --output")
