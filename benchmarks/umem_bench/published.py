"""umem's planners beside published ones, on traces that were published with their times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from umem._version import __version__
from umem.core.errors import UmemError
from umem.core.report import Direction
from umem_bench.results_file import Record, read_results, write_results

if TYPE_CHECKING:
    from umem.hardware import Hardware
    from umem.policy import Policy
    from umem.simulation import Addresses
    from umem.trace import Trace

__all__ = [
    "BUDGETS_PERCENT",
    "HARDWARE",
    "PLANNERS",
    "POLICY",
    "PUBLISHED",
    "Comparison",
    "Outcome",
    "Workload",
    "compare",
    "read_comparison",
    "write_comparison",
]

HARDWARE = "a100-g10"
"""The machine that the traces were published for."""

POLICY = "managed"

BUDGETS_PERCENT = (100, 90, 75, 50, 25)
"""Shares of the device's memory to plan for."""

PLANNERS = ("fault", "lookahead", "oracle", "planned")

PUBLISHED = ("ideal", "naive_um_lru", "deepum", "g10")
"""Times that the traces came with, by their names there."""

_WINDOW = 8
_MAX_TRACES = 64

_UNLIMITED_BYTES_PER_S = 1e15
"""A terabyte in a millisecond."""


class Outcome(Record):
    """One planner with one share of the device's memory."""

    planner: str
    budget_percent: int
    addresses: Literal["reused", "own"] = "reused"
    unlimited: Direction | None = None
    """The direction of the link that costs no time, to see which one holds the step up."""
    step_s: float
    lower_bound_s: float
    to_device_bytes: int
    to_host_bytes: int
    hint_count: int
    stall_s: dict[str, float]

    @property
    def regret(self) -> float:
        """Step time over the lower bound."""
        return self.step_s / self.lower_bound_s


class Workload(Record):
    """One trace: what was published of it, and what umem makes of it."""

    name: str
    published_ms: dict[str, float]
    """Milliseconds of an iteration, by what was published."""
    ideal_s: float
    allocated_bytes: int
    """All tensors of a step, each with memory of its own."""
    peak_live_bytes: int
    """Most that is allocated at once."""
    peak_at_s: float
    """When that is, with everything resident."""
    persistent_bytes: int
    outcomes: tuple[Outcome, ...]


class Comparison(Record):
    """The content of a results file."""

    format: Literal["umem-published-1"] = "umem-published-1"
    umem: str
    hardware: str
    policy: str
    device_bytes: int
    window: int
    workloads: tuple[Workload, ...]


def compare(folder: Path, progress: Callable[[str], None] = lambda _: None) -> Comparison:
    """Plan and simulate every published trace of a folder.

    Parameters
    ----------
    folder
        Holds ``*.json.gz`` in the exchange format, with published times of :data:`HARDWARE`.
    progress
        Called with the name of each trace before it is planned.

    Raises
    ------
    UmemError
        If the folder holds no trace, or more than 64; TraceError for one that cannot be read, or
        with which no times were published.
    """
    from umem.hardware import load_hardware
    from umem.policy import load_policy
    from umem.trace import load_trace

    paths = sorted(folder.glob("*.json.gz"))
    if not 1 <= len(paths) <= _MAX_TRACES:
        raise UmemError(
            f"{folder}: {len(paths)} files *.json.gz: give a folder of 1 to {_MAX_TRACES} "
            "published traces"
        )
    hardware, policy = load_hardware(HARDWARE), load_policy(POLICY)
    workloads = []
    for path in paths:
        progress(f"{path.name}: planning and simulating")
        workloads.append(_workload(load_trace(path), path, hardware, policy))
    return Comparison(
        umem=__version__,
        hardware=hardware.name,
        policy=policy.name,
        device_bytes=hardware.device_bytes,
        window=_WINDOW,
        workloads=tuple(workloads),
    )


def _workload(trace: Trace, path: Path, hardware: Hardware, policy: Policy) -> Workload:
    import numpy as np

    from umem.core.errors import TraceError
    from umem.trace import require_durations

    published_ms = {
        name: float(trace.metadata[f"published_{name}"])
        for name in PUBLISHED
        if isinstance(trace.metadata.get(f"published_{name}"), int | float)
    }
    if not published_ms:
        raise TraceError(
            f"{path}: published: none of {', '.join(PUBLISHED)}: give a trace with published times"
        )
    outcomes = [_outcome(trace, hardware, policy, "fault", 100, addresses="own")]
    for percent in BUDGETS_PERCENT:
        outcomes += [_outcome(trace, hardware, policy, name, percent) for name in PLANNERS]
        outcomes += [
            _outcome(trace, hardware, policy, "planned", percent, unlimited="to_device"),
            _outcome(trace, hardware, policy, "planned", percent, unlimited="to_host"),
        ]
    duration_s = require_durations(trace)
    change = np.zeros(trace.phase_count + 1, np.int64)
    np.add.at(change, trace.first_phase, trace.tensor_bytes)
    np.subtract.at(change, trace.last_phase + 1, trace.tensor_bytes)
    live_bytes = np.cumsum(change)[:-1]
    peak = int(live_bytes.argmax())
    return Workload(
        name=trace.name,
        published_ms=published_ms,
        ideal_s=float(duration_s.sum()),
        allocated_bytes=int(trace.tensor_bytes.sum()),
        peak_live_bytes=int(live_bytes[peak]),
        peak_at_s=float(duration_s[:peak].sum()),
        persistent_bytes=int(trace.tensor_bytes[trace.persistent].sum()),
        outcomes=tuple(outcomes),
    )


def _outcome(
    trace: Trace,
    hardware: Hardware,
    policy: Policy,
    planner: str,
    budget_percent: int,
    *,
    addresses: Addresses = "reused",
    unlimited: Direction | None = None,
) -> Outcome:
    from umem.planning import plan
    from umem.policy import resolve
    from umem.simulation import simulate

    resolved = resolve(policy, hardware.device_bytes, environ={})
    budget_bytes = hardware.device_bytes * budget_percent // 100
    resolved = dataclasses.replace(resolved, device_budget_bytes=budget_bytes)
    if unlimited is not None:
        names = ("link_bytes_per_s", f"{unlimited}_bytes_per_s")
        changes: dict[str, Any] = dict.fromkeys(names, _UNLIMITED_BYTES_PER_S)
        hardware = dataclasses.replace(hardware, **changes)
    schedule = plan(trace, hardware, resolved, planner, window=_WINDOW)
    report = simulate(trace, schedule, hardware, resolved, addresses=addresses)
    return Outcome(
        planner=planner,
        budget_percent=budget_percent,
        addresses=addresses,
        unlimited=unlimited,
        step_s=report.step_s,
        lower_bound_s=report.lower_bound_s,
        to_device_bytes=report.moved_bytes("to_device"),
        to_host_bytes=report.moved_bytes("to_host"),
        hint_count=report.hint_count,
        stall_s=dict(report.stall_s),
    )


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write a results file; see :func:`umem_bench.results_file.write_results`."""
    write_results(comparison, path, indent=1)


def read_comparison(path: Path) -> Comparison:
    """Read a results file.

    Raises
    ------
    ResultsFileError
        If it cannot be read, or is not one that `umem bench published --output` wrote.
    """
    return read_results(Comparison, path, "umem bench published --output")
