"""Benchmarks of small cards: what their rows are held to, and what is predicted of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_runs import GIB, have_a_card
from typer.testing import CliRunner
from umem_bench.cli import app
from umem_bench.results import LlamaShape, Measurement, Run, read_results
from umem_bench.rows import HOST_LEFT_BYTES
from umem_bench.scale import small_predictions, tables
from umem_bench.scale.run import run_scale
from umem_bench.scale.small_cards import CASES, Case, parse_rows, small_cards_settings
from umem_bench.scale.small_predictions import PREDICTED, WAYS, committed_predictions, predict_case

from umem import load_hardware

ROOT = Path(__file__).resolve().parents[1]
PROFILES = ("h200", "rtx-3090", "rtx-4090", "rtx-5090")
STEPS_S = {"umem": 10.0, "floor": 1.0, "fsdp-offload": 20.0}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, bool], Any]:
    """The jobs of an H200's processes, by variant and whether several batches make a step."""
    seen: dict[tuple[str, bool], Any] = {}

    def ask(_: object, job: Any, *__: object) -> dict[str, Any]:
        seen[job.variant, job.accumulate > 1] = job
        steps_s = (STEPS_S[job.variant],) * 2
        return {"state": "measured", "steps_s": steps_s, "wall_s": sum(steps_s), "process_s": 95.0}

    have_a_card(monkeypatch, 140, ask)
    return seen


def run(rows: str, **options: Any) -> Run:
    options = {"seconds_limit": 500.0, "host_limit_bytes": 112 * GIB - HOST_LEFT_BYTES} | options
    settings = small_cards_settings("sft", 2)
    predicted_s = committed_predictions("sft", "NVIDIA H200")
    return run_scale(settings, parse_rows(rows), lambda _: None, predicted_s=predicted_s, **options)


def test_the_usual_rows_have_every_case_and_a_floor_of_each_model() -> None:
    rows = parse_rows("")
    assert {case for case, variant in rows if variant == "umem"} == set(CASES)
    floors = {str(CASES[case].shape) for case, variant in rows if variant == "floor"}
    assert floors == {str(it.shape) for it in CASES.values()}


def test_a_budget_holds_for_others_too_and_batches_are_the_cases(jobs: Any) -> None:
    run("llama-3-8b-24gib-64k:umem,llama-3-8b-24gib-64k:fsdp-offload,llama-3-8b-24gib-8k:floor")

    assert jobs["umem", True].limit_bytes == jobs["fsdp-offload", True].limit_bytes == 24 * GIB
    assert jobs["floor", False].limit_bytes == 136 * GIB
    assert jobs["umem", True].accumulate == 8


def test_rows_stand_beside_their_predictions_whether_they_run_or_not(jobs: Any) -> None:
    made = run("llama-3-8b-24gib-64k:umem,llama-3-8b-24gib-8k:floor,qwen2.5-32b-24gib:umem")

    table, notes = tables.tables(made)
    umem, floor, large = table.rows
    # The floor of one batch, eight times.
    assert umem[5:7] == (f"{65536 / 10:,.0f}", "80 %")
    assert umem[4] == f"{100 * (made.scales[0].predicted_s or 0) / 10 - 100:+.0f} %"
    assert floor[3] != "—"
    assert large[2] == "left out"
    assert float(large[3].replace(",", "")) > 8000
    assert "host memory" in notes.rows[0][3]
    assert ("umem", False) not in jobs


@pytest.mark.usefixtures("jobs")
def test_goals_are_of_the_floor_or_of_a_larger_budget() -> None:
    rows = "llama-3-8b-24gib-64k:umem,llama-3-8b-76gib-64k:umem,llama-2-7b-fp32-76gib-4-batches"
    goals = {it.subject: it for it in tables.checks(run(rows)) if "at least" in it.subject}

    of_larger = goals["llama-3-8b-24gib-64k: at least 85 % of llama-3-8b-76gib-64k"]
    of_floor = goals["llama-2-7b-fp32-76gib-4-batches: at least 95 % of the floor"]
    assert (of_larger.passed, of_larger.detail) == (True, "100 %")
    assert (of_floor.passed, of_floor.detail) == (False, "10 %")


def test_a_row_of_short_steps_needs_less_time_than_one_of_long_ones(jobs: Any) -> None:
    rows = "llama-3-8b-24gib-64k:umem,llama-3-8b-24gib-8k:umem,llama-3-8b-16gib-64k:umem"
    first, short, long = run(rows, seconds_limit=60.0).scales

    assert (first.state, short.state, long.state) == ("measured", "measured", "left out")
    assert "--continue" in str(long.reason)
    assert jobs["umem", False].steps == 2


def test_a_step_owes_its_time_to_what_bounds_it() -> None:
    hardware = load_hardware("h200")
    shape = LlamaShape(layers=4, weights="float32", batch=4, tokens=2048)
    free = predict_case("free", Case(shape, 40 * GIB), hardware, "neither").figures
    tight = predict_case("tight", Case(shape, 4 * GIB), hardware, "neither").figures
    none = predict_case("none", Case(shape, GIB), hardware, "neither")

    assert free["computation"] == pytest.approx(1.0, abs=0.05)
    assert free["link"] == pytest.approx(0.0, abs=0.01)
    assert tight["link"] > 0.3
    assert tight["link"] + tight["computation"] == pytest.approx(1.0, abs=0.1)
    assert tight["step_s"] > free["step_s"]
    assert "device memory" in str(none.error)


@pytest.mark.slow
def test_predictions_are_written_beside_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "predicted.jsonl"
    first, second = "llama-3-8b-24gib-8k", "llama-3-8b-16gib-8k"
    for rows, option in ((first, "-o"), (f"{first},{second}", "--continue")):
        words = ["--predict", "h200", "--rows", rows, option, str(path)]
        done = CliRunner().invoke(app, ["small-cards", *words])
        assert done.exit_code == 0, done.output
    found = read_results(path).results
    assert len(found) == 2 * len(WAYS)
    committed = read_results(PREDICTED).results
    for it in found:
        assert isinstance(it, Measurement)
        (kept,) = (
            other
            for other in committed
            if isinstance(other, Measurement)
            and (other.benchmark, other.case, other.subject) == (it.benchmark, it.case, it.subject)
        )
        # Otherwise the command writes them again.
        assert it.figures == pytest.approx(kept.figures, rel=1e-6, abs=1e-6)


def test_the_committed_predictions_have_a_table_for_each_card() -> None:
    shown = small_predictions.tables(read_results(PREDICTED))
    assert {it.title.partition(",")[0].partition(":")[0] for it in shown} >= set(PROFILES)
