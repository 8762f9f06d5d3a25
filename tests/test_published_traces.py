"""Published traces: umem's planners beside the published times, the results file and its page."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_runs import made_up_header
from umem_bench.published import (
    BUDGETS_PERCENT,
    MACHINE,
    OWN_ADDRESSES,
    PLANNERS,
    PUBLISHED,
    SETTINGS,
    compare,
    tables,
)
from umem_bench.results import Measurement, Run, read_results
from umem_bench.tables import beside, markdown

from umem.core.errors import TraceError
from umem.hardware import load_hardware

CHECKOUT = Path(__file__).resolve().parents[1]
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
def fresh(folder: Path) -> Run:
    return Run(made_up_header("published", SETTINGS), tuple(compare(folder)))


def plans(run: Run, name: str, percent: int = 100) -> dict[str, dict[str, float]]:
    """Figures by planner."""
    found = beside(run.measurements(f"{percent} %"))[name]
    return {subject.strip("`"): it.figures for subject, it in found.items()}


# ------------------------------------------------------------------------- beside the published


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_run_holds_against_the_published_times(fresh: Run, name: str) -> None:
    trace = beside(fresh.measurements("trace"))[name]["published"].figures
    published_s = {it: trace[f"{it}_ms"] * 1e-3 for it in PUBLISHED}
    assert trace["resident_s"] == pytest.approx(published_s["ideal"], rel=1e-4)
    own = plans(fresh, name)
    planned_s, bound_s = own["planned"]["step_s"], own["planned"]["lower_bound_s"]
    assert bound_s * (1 - 1e-9) <= planned_s <= 1.02 * max(bound_s, trace["resident_s"])
    assert planned_s <= 1.02 * published_s["g10"]
    assert planned_s < published_s["deepum"]
    paging = own[OWN_ADDRESSES.strip("`")]
    assert paging["step_s"] == pytest.approx(published_s["naive_um_lru"], rel=0.02)

    device_bytes = load_hardware(MACHINE).device_bytes
    tight = [it for it in TIGHT_PERCENT if device_bytes * it // 100 < trace["peak_live_bytes"]]
    assert len(tight) >= 3
    for percent in TIGHT_PERCENT:
        own = plans(fresh, name, percent)
        if percent in tight:
            for planner in ("fault", "lookahead"):
                assert own["planned"]["step_s"] < own[planner]["step_s"], (planner, percent)
        else:
            assert own["planned"]["step_s"] == pytest.approx(trace["resident_s"])


@pytest.mark.slow
def test_the_committed_results_are_those_of_a_fresh_run(fresh: Run) -> None:
    committed = read_results(CHECKOUT / "benchmarks" / "results" / "published-traces.jsonl")

    assert len(committed.results) == len(fresh.results)
    for was, now in zip(committed.results, fresh.results, strict=True):
        assert isinstance(was, Measurement)
        assert isinstance(now, Measurement)
        assert (was.benchmark, was.case, was.subject) == (now.benchmark, now.case, now.subject)
        for figure in {"step_s", "lower_bound_s", "peak_live_bytes"} & set(now.figures):
            assert was.figures[figure] == pytest.approx(now.figures[figure], rel=1e-3)


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


@pytest.mark.slow
def test_a_small_trace_is_compared(write: Callable[[dict[str, Any]], Path]) -> None:
    said: list[str] = []
    run = Run(made_up_header("published", SETTINGS), tuple(compare(write(document()), said.append)))

    assert said == ["small.json.gz: planning and simulating"]
    (trace,) = run.measurements("trace")
    expected = {"ideal_ms": 3.0, "deepum_ms": 4.5, "allocated_bytes": 3 << 20,
                "peak_live_bytes": 3 << 20}  # fmt: skip
    assert expected.items() <= trace.figures.items()
    assert len(run.results) == 2 + len(BUDGETS_PERCENT) * (len(PLANNERS) + 2)
    steps_s = [it.figures["step_s"] for it in run.results[1:] if isinstance(it, Measurement)]
    assert steps_s == pytest.approx([3e-3] * len(steps_s))
    shown = "\n".join(map(markdown, tables(run)))
    # What was not published is left out.
    assert "published: G10" not in shown
    assert "| published: DeepUM | 4.5 | — |" in shown


@pytest.mark.parametrize("published", [{}, {"ideal": "fast"}])
def test_a_trace_without_published_times_is_refused(
    write: Callable[[dict[str, Any]], Path], published: dict[str, Any]
) -> None:
    with pytest.raises(TraceError, match=r"small\.json\.gz: published: none of ideal, naive_um"):
        compare(write(document(published=published)))
