"""The benchmark of recording, planning and simulating, and the page on plans at scale."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import made_up_header
from typer.testing import CliRunner
from umem_bench import bounds, planning
from umem_bench.cli import app
from umem_bench.results import Measurement, Run, read_results
from umem_bench.tables import markdown

from umem import Hardware, TensorClass, Trace, load_policy
from umem.capture.offline import model_trace
from umem.pages.plan import PLANNERS
from umem.policy import resolve

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20


@pytest.fixture(scope="module")
def tiny() -> Trace:
    return model_trace("llama-tiny", "sft", batch=2, seq=64)


@pytest.mark.slow
def test_ranks_share_the_state_and_nothing_else(tiny: Trace) -> None:
    share = planning.share_of_state(tiny, 3)

    for member in TensorClass:
        for persistent in (True, False):
            which = (tiny.tensor_class == member.number) & (tiny.persistent == persistent)
            shared = member in ("weights", "gradients", "optimizer_state") or (
                member == "other" and not persistent
            )
            expected = tiny.tensor_bytes[which]
            expected = np.ceil(expected / 3).astype(np.int64) if shared else expected
            assert share.tensor_bytes[which].tolist() == expected.tolist(), (member, persistent)
    optimizer = np.array([name.startswith("optimizer ") for name in tiny.phase_names])
    assert optimizer.any()
    assert (share.memory_bytes[optimizer] < tiny.memory_bytes[optimizer]).all()
    assert (share.memory_bytes[~optimizer] == tiny.memory_bytes[~optimizer]).all()
    assert (share.flops[~optimizer] == tiny.flops[~optimizer]).all()
    assert share.name == "llama-tiny-sft, 1/3 of the state"


def test_the_peak_counts_what_lives_at_once(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace(
        {"w": (10, "weights"), "a": (5, "activations", False), "b": (7, "activations", False)},
        [(1e-3, ["w"], ["a"]), (1e-3, ["a"], []), (1e-3, ["w"], ["b"])],
    )

    assert planning.live_bytes(trace) == 17


@pytest.mark.slow
def test_a_run_measures_every_planner(tmp_path: Path) -> None:
    path = tmp_path / "planning.jsonl"
    words = [
        "planning",
        "--models",
        "llama-tiny",
        "--modes",
        "sft,lora",
        "--quick",
        "--rounds",
        "2",
    ]

    done = CliRunner().invoke(app, [*words, "--output", str(path)])

    assert done.exit_code == 0, done.output
    run = read_results(path)
    names = ("llama-tiny-lora", "llama-tiny-sft")
    recorded = {it.case: it for it in run.measurements("recording")}
    assert sorted(recorded) == sorted(names)
    plans = {(it.case, it.subject): it for it in run.measurements("plan")}
    assert set(plans) == {(name, planner) for name in names for planner in PLANNERS}
    for it in plans.values():
        assert len(it.rounds_s) == 2
        assert it.figures["step_s"] >= it.figures["lower_bound_s"] * (1 - 1e-9)
        assert it.figures["plan_bytes"] > 0
    assert "Recorded steps" in done.stdout


@pytest.mark.slow
def test_a_step_that_no_machine_holds_is_shared(
    machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = planning.SETTINGS
    whole = model_trace("llama-tiny", "sft", batch=settings["batch"], seq=settings["seq"])
    share = planning.share_of_state(whole, planning.RANKS)
    between_bytes = (planning.live_bytes(whole) + planning.live_bytes(share)) // 2
    small = replace(machine, device_bytes=50 * MIB, host_bytes=between_bytes - 45 * MIB)
    monkeypatch.setattr("umem.load_hardware", lambda _: small)

    recorded, *_ = planning.run_planning(
        ["llama-tiny"], ["sft"], rounds=1, first_plans=False, on_progress=lambda _: None
    )

    assert recorded.case == f"llama-tiny-sft, 1/{planning.RANKS} of the state"
    assert recorded.figures["peak_live_bytes"] == planning.live_bytes(share)


@pytest.mark.parametrize(("plan_s", "passed"), [(2.8, True), (2.95, False)])
def test_planning_is_held_against_its_limit(plan_s: float, passed: bool) -> None:
    figures = {"simulate_s": 0.1, "store_s": 1e-3, "load_s": 5e-4, "plan_bytes": 2048,
               "hints": 1234, "step_s": 0.42, "lower_bound_s": 0.4}  # fmt: skip
    planned = Measurement(
        benchmark="plan",
        case="llama-2-7b-sft",
        subject="planned",
        rounds_s=(plan_s,),
        figures=figures,
    )
    settings = planning.SETTINGS | {"rounds": 1}
    run = Run(made_up_header("planning", settings), (planned,))

    (check,) = planning.checks(run)
    _, plans = planning.tables(run)

    assert check.passed is passed
    assert markdown(plans).splitlines()[-1] == (
        f"| llama-2-7b-sft | planned | {plan_s:.3g} s | 100 ms | 1,234 | 420 ms | 1.050 | 2 KiB "
        "| 1 ms | 500 µs |"
    )
    assert "plans for gh200-96, policy managed" in planning.heading(run)
    (check,) = planning.checks(Run(run.header, ()))
    assert check.passed is None


def test_the_command_refuses_unknown_models() -> None:
    done = CliRunner().invoke(app, ["planning", "--models", "llama-3"])

    assert done.exit_code == 2
    assert "llama-tiny, llama-2-7b" in " ".join(done.output.split())


def test_the_pages_way_of_sharing_plans_once(
    machine: Hardware, make_trace: Callable[..., Trace], tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "plans-at-scale.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(from umem\.pages.*?)```", page, re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(found.group(1), names)
    sizes = {f"w{number}": (4 * MIB, "optimizer_state") for number in range(5)}
    trace = make_trace(sizes, [(1e-3, [name], [name]) for name in sizes])
    policy = replace(resolve(load_policy("managed"), machine), device_budget_bytes=12 * MIB)

    made = names["shared_plan"](tmp_path / "here", trace, machine, policy)
    (file,) = (tmp_path / "here").iterdir()
    made_at_ns = file.stat().st_mtime_ns
    renamed = replace(policy, name="another name")
    read = names["shared_plan"](tmp_path / "here", trace, machine, renamed)
    names["shared_plan"](tmp_path / "elsewhere", trace, machine, policy)

    assert made.hint_count == read.hint_count > 0
    assert [it.stat().st_mtime_ns for it in (tmp_path / "here").iterdir()] == [made_at_ns]
    assert (tmp_path / "elsewhere" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_plans_are_held_against_bounds(tmp_path: Path) -> None:
    document = {
        "format": "umem-trace/1",
        "name": "small",
        "tensors": [{"id": 1, "bytes": MIB, "class": "weights", "persistent": True}],
        "phases": [{"name": "forward", "duration_us": 1000, "reads": [1], "writes": [1]}],
    }
    (tmp_path / "small.json.gz").write_text(json.dumps(document), encoding="utf-8")
    results = tmp_path / "bounds.jsonl"
    words = ["bounds", str(tmp_path), "--models", "none", "--output", str(results), "--check"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = [it for it in read_results(results).results if isinstance(it, Measurement)]
    assert [it.benchmark for it in found] == [
        f"{percent} % of a100-g10" for percent in bounds.BUDGETS_PERCENT
    ]
    for it in found:
        assert it.figures["step_s"] == pytest.approx(1e-3)
        assert it.figures["fluid_s"] == pytest.approx(1e-3, rel=1e-5)
