"""Published traces: umem's planners beside the published times, the results file and its page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from umem_bench import published_report
from umem_bench.cli.commands import app
from umem_bench.published import (
    BUDGETS_PERCENT,
    PLANNERS,
    PUBLISHED,
    Comparison,
    Outcome,
    Workload,
    compare,
    read_comparison,
    write_comparison,
)
from umem_bench.report import markdown
from umem_bench.results_file import ResultsFileError

from umem.core.errors import TraceError, UmemError
from umem.core.schedule import HintOp
from umem.hardware import load_hardware
from umem.planning.planners import _ideal_clock, _pose
from umem.planning.problem import place
from umem.policy import load_policy, resolve
from umem.trace import find_gaps, load_trace

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results" / "published-traces.json"
PAGE = CHECKOUT / "docs" / "published-traces.md"

NAMES = ("bert-base-b256", "vit-b768")
TIGHT_PERCENT = tuple(percent for percent in BUDGETS_PERCENT if percent < 100)


@pytest.fixture(scope="module")
def folder() -> Path:
    usual = CHECKOUT.parent / "shared" / "traces"
    path = Path(os.environ.get("UMEM_SHARED_TRACES", usual))
    if not all((path / f"{name}.json.gz").is_file() for name in NAMES):
        pytest.skip(f"no published traces in {path}; UMEM_SHARED_TRACES can name the folder")
    return path


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Comparison:
    return compare(folder)


@pytest.fixture(scope="module")
def committed() -> Comparison:
    return read_comparison(RESULTS)


def workload(comparison: Comparison, name: str) -> Workload:
    (found,) = (entry for entry in comparison.workloads if entry.name == name)
    return found


def outcome(
    entry: Workload, planner: str, percent: int = 100, addresses: str = "reused"
) -> Outcome:
    (found,) = (
        one
        for one in entry.outcomes
        if (one.planner, one.budget_percent, one.addresses) == (planner, percent, addresses)
        and one.unlimited is None
    )
    return found


# ------------------------------------------------------------------------- beside the published


def check_against_published(entry: Workload) -> None:
    published_s = {name: entry.published_ms[name] * 1e-3 for name in PUBLISHED}
    assert entry.ideal_s == pytest.approx(published_s["ideal"], rel=1e-4)

    planned = outcome(entry, "planned")
    assert planned.step_s <= 1.02 * max(planned.lower_bound_s, entry.ideal_s)
    assert planned.step_s <= 1.02 * published_s["g10"]
    assert planned.step_s < published_s["deepum"]
    assert planned.regret <= 1.05
    assert planned.step_s >= planned.lower_bound_s * (1 - 1e-9)

    paging = outcome(entry, "fault", addresses="own")
    assert paging.step_s == pytest.approx(published_s["naive_um_lru"], rel=0.02)


def check_tight_budgets(entry: Workload) -> None:
    peak = entry.peak_live_bytes
    device_bytes = load_hardware("a100-g10").device_bytes
    tight = [percent for percent in TIGHT_PERCENT if device_bytes * percent // 100 < peak]
    assert len(tight) >= 3
    for percent in tight:
        planned = outcome(entry, "planned", percent)
        for planner in ("fault", "lookahead", "oracle"):
            assert planned.step_s < outcome(entry, planner, percent).step_s, (planner, percent)
        assert planned.step_s >= planned.lower_bound_s
    for percent in set(TIGHT_PERCENT) - set(tight):
        assert outcome(entry, "planned", percent).step_s == pytest.approx(entry.ideal_s)


@pytest.mark.parametrize("name", NAMES)
def test_the_results_hold_against_the_published_times(committed: Comparison, name: str) -> None:
    check_against_published(workload(committed, name))
    check_tight_budgets(workload(committed, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_run_holds_against_the_published_times(fresh: Comparison, name: str) -> None:
    check_against_published(workload(fresh, name))
    check_tight_budgets(workload(fresh, name))


@pytest.mark.slow
def test_the_results_file_is_a_fresh_run(committed: Comparison, fresh: Comparison) -> None:
    assert committed.model_dump(exclude={"workloads", "umem"}) == fresh.model_dump(
        exclude={"workloads", "umem"}
    )
    assert len(committed.workloads) == len(fresh.workloads)
    for old, new in zip(committed.workloads, fresh.workloads, strict=True):
        assert old.model_dump(exclude={"outcomes"}) == new.model_dump(exclude={"outcomes"})
        for was, now in zip(old.outcomes, new.outcomes, strict=True):
            case = (now.planner, now.budget_percent, now.addresses, now.unlimited)
            assert case == (was.planner, was.budget_percent, was.addresses, was.unlimited)
            assert was.step_s == pytest.approx(now.step_s, rel=1e-3), case
            assert was.lower_bound_s == pytest.approx(now.lower_bound_s, rel=1e-3), case


def test_all_planners_and_budgets_are_there(committed: Comparison) -> None:
    assert tuple(entry.name for entry in committed.workloads) == NAMES
    for entry in committed.workloads:
        for planner in PLANNERS:
            for percent in BUDGETS_PERCENT:
                assert outcome(entry, planner, percent).step_s >= entry.ideal_s * (1 - 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_what_leaves_comes_back_before_its_next_use(folder: Path, name: str) -> None:
    """On a quarter of the device, where the link cannot let everything go in time."""
    hardware = load_hardware("a100-g10")
    trace = load_trace(folder / f"{name}.json.gz")
    policy = resolve(load_policy({"extends": "managed", "device_budget": "25%"}), 40 * 2**30, {})
    problem = _pose(trace, hardware, policy, {})
    schedule = place(problem, _ideal_clock(trace), name="candidate", slack=1.05)
    gaps = find_gaps(trace)

    def interval(tensor: int, phase: int) -> int:
        phases = (phase, phase + trace.phase_count)
        (found,) = (
            gap
            for gap in np.flatnonzero(gaps.tensor == tensor)
            if any(gaps.last_use[gap] < now <= gaps.next_use[gap] for now in phases)
        )
        return int(found)

    where = {
        op: sorted(
            interval(int(tensor), int(phase))
            for tensor, phase in zip(
                schedule.hint_tensor[schedule.hint_op == op],
                schedule.hint_phase[schedule.hint_op == op],
                strict=True,
            )
        )
        for op in (HintOp.EVICT, HintOp.PREFETCH)
    }
    assert len(where[HintOp.EVICT]) > 100
    assert where[HintOp.EVICT] == where[HintOp.PREFETCH]


# ------------------------------------------------------------------------- the page


def test_the_tables_of_the_page_are_those_of_the_results(committed: Comparison) -> None:
    found = re.search(
        r"<!-- published-traces\.json -->\n(.*?)\n<!-- end of tables -->",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert found, f"{PAGE} has no tables"
    tables = [
        published_report.heading(committed),
        *map(markdown, published_report.grids(committed)),
    ]
    assert found.group(1).strip() == "\n\n".join(tables)


# ------------------------------------------------------------------------- a small trace


def document(**changes: Any) -> dict[str, Any]:
    """A step that fits everywhere, and what might have been published with it."""
    return {
        "format": "umem-trace/1",
        "name": "small",
        "published": {"unit": "ms per iteration", "ideal": 3.0, "deepum": 4.5},
        "tensors": [
            {"id": 1, "bytes": 1 << 20, "class": "weights", "persistent": True},
            {"id": 2, "bytes": 1 << 21, "class": "activations", "persistent": False},
        ],
        "phases": [
            {"name": "forward", "duration_us": 1000, "reads": [1], "writes": [2]},
            {"name": "backward", "duration_us": 2000, "reads": [1, 2], "writes": [1]},
        ],
    } | changes


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write_trace(content: dict[str, Any]) -> Path:
        (tmp_path / "small.json.gz").write_text(json.dumps(content))
        return tmp_path

    return write_trace


def test_a_small_trace_is_compared(write: Callable[[dict[str, Any]], Path], tmp_path: Path) -> None:
    said: list[str] = []
    comparison = compare(write(document()), said.append)
    assert said == ["small.json.gz: planning and simulating"]
    (entry,) = comparison.workloads
    assert entry.published_ms == {"ideal": 3.0, "deepum": 4.5}
    assert (entry.allocated_bytes, entry.persistent_bytes) == (3 << 20, 1 << 20)
    assert (entry.peak_live_bytes, entry.peak_at_s) == (3 << 20, 0.0)
    assert [one.step_s for one in entry.outcomes] == pytest.approx([3e-3] * len(entry.outcomes))
    assert len(entry.outcomes) == 1 + len(BUDGETS_PERCENT) * (len(PLANNERS) + 2)
    # What was not published is left open.
    tables = "\n".join(map(markdown, published_report.grids(comparison)))
    assert "| published: G10 | — |" in tables
    assert "| published: DeepUM | 4.5 |" in tables

    write_comparison(comparison, tmp_path / "results.json")
    assert read_comparison(tmp_path / "results.json") == comparison


def test_the_command_prints_tables_and_writes_results(
    write: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    arguments = ["published", str(write(document())), "--output", str(results)]
    answer = CliRunner().invoke(app, [*arguments, "--markdown"])
    assert answer.exit_code == 0, answer.output
    assert "| umem: `planned` | 3.0 |" in answer.stdout
    assert read_comparison(results).workloads[0].name == "small"
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0
    assert "umem: `planned`" in answer.stdout


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UmemError, match=r"0 files \*\.json\.gz: give a folder of 1 to 64"):
        compare(tmp_path)
    with pytest.raises(UmemError, match=r"0 files \*\.json\.gz"):
        compare(tmp_path / "nowhere")


@pytest.mark.parametrize("published", [{}, {"ideal": "fast"}])
def test_a_trace_without_published_times_is_refused(
    write: Callable[[dict[str, Any]], Path], published: dict[str, Any]
) -> None:
    with pytest.raises(TraceError, match=r"small\.json\.gz: published: none of ideal, naive_um"):
        compare(write(document(published=published)))


def test_a_results_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(ResultsFileError, match="cannot be read"):
        read_comparison(path)
    for content in (b"{}", b"\xff\xfe", b'{"format": "umem-bench-1"}'):
        path.write_bytes(content)
        with pytest.raises(ResultsFileError, match="not a file of `umem bench published --output`"):
            read_comparison(path)
