"""umem's planners beside published ones, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from umem.core.report import Direction
from umem_bench.published import PLANNERS, Comparison, Outcome, Workload
from umem_bench.report import Grid

__all__ = ["grids", "heading"]

_STALLS = {
    "room": "waiting for room",
    "prefetch": "waiting for prefetches",
    "fault": "waiting for faults",
    "mapped": "slowed by memory used in place",
    "copy": "slowed by copies",
}


def heading(comparison: Comparison) -> str:
    """One line that says with what a comparison was made."""
    return (
        f"umem {comparison.umem}, hardware {comparison.hardware}, policy {comparison.policy}, "
        f"window of {comparison.window} phases"
    )


def grids(comparison: Comparison) -> Iterator[Grid]:
    """The tables: the traces, our times beside published ones, and two by budget for each trace."""
    yield _sizes(comparison)
    yield _beside_published(comparison)
    for workload in comparison.workloads:
        yield _by_budget(workload)
        yield _losses(workload)


def _sizes(comparison: Comparison) -> Grid:
    rows: list[tuple[str, Callable[[Workload], str]]] = [
        ("all tensors of a step, GB", lambda workload: _gb(workload.allocated_bytes)),
        ("of these, from step to step, GB", lambda workload: _gb(workload.persistent_bytes)),
        ("allocated at once, at most, GB", lambda workload: _gb(workload.peak_live_bytes)),
        ("memory of the device, GB", lambda _: _gb(comparison.device_bytes)),
        ("time until most is allocated, ms", lambda workload: _ms(workload.peak_at_s)),
    ]
    return _by_workload("The traces", comparison, rows)


def _beside_published(comparison: Comparison) -> Grid:
    rows: list[tuple[str, Callable[[Workload], str]]] = [
        ("published: all resident", _published("ideal")),
        ("umem: all resident", lambda workload: _ms(workload.ideal_s)),
        ("published: demand paging (`naive_um_lru`)", _published("naive_um_lru")),
        ("umem: `fault`, own addresses", lambda workload: _ms(_paging(workload).step_s)),
        ("umem: `fault`", _step("fault")),
        ("published: DeepUM", _published("deepum")),
        ("umem: `lookahead`", _step("lookahead")),
        ("umem: `oracle`", _step("oracle")),
        ("published: G10", _published("g10")),
        ("umem: `planned`", _step("planned")),
        ("lower bound", lambda workload: _ms(_planned(workload)[0].lower_bound_s)),
        ("regret of `planned`", lambda workload: f"{_planned(workload)[0].regret:.4f}"),
    ]
    return _by_workload("A step with all of the device, ms", comparison, rows)


def _by_budget(workload: Workload) -> Grid:
    planned = _planned(workload)
    rows = [
        (f"`{planner}`", *(_ms(outcome.step_s) for outcome in _outcomes(workload, planner)))
        for planner in PLANNERS
    ]
    rows.append(("lower bound", *(_ms(outcome.lower_bound_s) for outcome in planned)))
    rows.append(("regret of `planned`", *(f"{outcome.regret:.3f}" for outcome in planned)))
    title = f"{workload.name}: a step with a share of the device's memory, ms"
    return Grid(title, _budgets(planned), tuple(rows))


def _losses(workload: Workload) -> Grid:
    planned = _planned(workload)
    rows = [
        ("moved to the host, GB", *(_gb(outcome.to_host_bytes) for outcome in planned)),
        ("moved to the device, GB", *(_gb(outcome.to_device_bytes) for outcome in planned)),
        *(
            (f"{words}, ms", *(_ms(outcome.stall_s[cause]) for outcome in planned))
            for cause, words in _STALLS.items()
            if any(outcome.stall_s[cause] > 0 for outcome in planned)
        ),
        *(
            (
                f"regret, if moving to the {direction.removeprefix('to_')} took no time",
                *(f"{outcome.regret:.3f}" for outcome in _planned(workload, direction)),
            )
            for direction in _DIRECTIONS
        ),
    ]
    title = f"{workload.name}: what `planned` moves, and what holds it up"
    return Grid(title, _budgets(planned), tuple(rows))


_DIRECTIONS: tuple[Direction, ...] = ("to_device", "to_host")


def _budgets(outcomes: list[Outcome]) -> tuple[str, ...]:
    return ("", *(f"{outcome.budget_percent} %" for outcome in outcomes))


def _by_workload(
    title: str, comparison: Comparison, rows: list[tuple[str, Callable[[Workload], str]]]
) -> Grid:
    return Grid(
        title,
        ("", *(workload.name for workload in comparison.workloads)),
        tuple((label, *map(cell, comparison.workloads)) for label, cell in rows),
    )


def _published(name: str) -> Callable[[Workload], str]:
    return lambda workload: (
        f"{workload.published_ms[name]:,.1f}" if name in workload.published_ms else "—"
    )


def _step(planner: str) -> Callable[[Workload], str]:
    return lambda workload: _ms(_outcomes(workload, planner)[0].step_s)


def _planned(workload: Workload, unlimited: Direction | None = None) -> list[Outcome]:
    return _outcomes(workload, "planned", unlimited)


def _outcomes(
    workload: Workload, planner: str, unlimited: Direction | None = None
) -> list[Outcome]:
    """Those of a planner by budget, the whole device first."""
    return [
        outcome
        for outcome in workload.outcomes
        if (outcome.planner, outcome.addresses, outcome.unlimited) == (planner, "reused", unlimited)
    ]


def _paging(workload: Workload) -> Outcome:
    return next(outcome for outcome in workload.outcomes if outcome.addresses == "own")


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:,.1f}"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f}"
