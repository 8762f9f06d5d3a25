"""What a benchmark run leaves behind: its data types and its file."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Literal

from umem_bench.results_file import Record, read_results, write_results

__all__ = [
    "ALLOCATORS",
    "AllocatorName",
    "BenchmarkName",
    "Machine",
    "Measurement",
    "Run",
    "Settings",
    "median_s",
    "read_run",
    "write_run",
]

AllocatorName = Literal["torch", "umem", "rmm-pool", "rmm-managed"]
BenchmarkName = Literal["alloc", "step", "core"]

ALLOCATORS: tuple[AllocatorName, ...] = ("torch", "umem", "rmm-pool", "rmm-managed")
"""The allocators compared, in the order of a round and of the tables' columns."""


class Machine(Record):
    """Where the benchmarks ran; None for what is not there."""

    gpu: str | None
    driver: str | None
    cuda: str | None
    torch: str | None
    rmm: str | None
    umem: str
    python: str
    system: str
    cpu: str
    cpu_count: int


class Settings(Record):
    """How the benchmarks ran; sizes in bytes."""

    policy: str
    rounds: int
    quick: bool
    worker_managed_limit_bytes: int


class Measurement(Record):
    """One allocator in one case of a benchmark.

    `rounds_s` has one time for each round, in seconds: of one allocation and its free (`alloc`,
    `core`), or the median training step of the round (`step`). It is empty if `error` says why the
    case did not run. Peaks, in bytes, are those of the timed steps, None where the allocator does
    not count them. `loss_hex` is the loss, in hexadecimal, after a few steps under torch's
    deterministic algorithms.
    """

    benchmark: BenchmarkName
    case: str
    allocator: AllocatorName
    rounds_s: tuple[float, ...] = ()
    peak_reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    loss_hex: str | None = None
    error: str | None = None


class Run(Record):
    """One run of `umem bench`: the content of a results file."""

    format: Literal["umem-bench-1"] = "umem-bench-1"
    date: str
    git_commit: str | None
    machine: Machine
    settings: Settings
    measurements: tuple[Measurement, ...]


def median_s(measurement: Measurement) -> float | None:
    """Median over the rounds, in seconds; None if the case did not run."""
    return statistics.median(measurement.rounds_s) if measurement.rounds_s else None


def write_run(run: Run, path: Path) -> None:
    """Write a results file; see :func:`umem_bench.results_file.write_results`."""
    write_results(run, path)


def read_run(path: Path) -> Run:
    """Read a results file.

    Raises
    ------
    ResultsFileError
        If the file cannot be read, or is not one that `umem bench --output` wrote.
    """
    return read_results(Run, path, "umem bench --output")
