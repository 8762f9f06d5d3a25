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
from typer.testing import CliRunner
from umem_bench import _first_plan, planning
from umem_bench._python_lru import PythonLru
from umem_bench._scaled import peak_live_bytes, share_of_state, with_layers
from umem_bench.cli.commands import app
from umem_bench.planning_report import (
    MAX_GROWTH,
    MAX_PLANNING_S,
    checks,
    grids,
    growth_exponent,
    heading,
)
from umem_bench.planning_results import GrowthPoint, PlanningRun, read_planning, write_planning
from umem_bench.report import markdown
from umem_bench.results_file import ResultsFileError

from umem.capture.offline import model_trace
from umem.capture.offline import models as _models
from umem.core.classes import TensorClass
from umem.core.errors import PlanError, TraceError, UmemError
from umem.hardware import Hardware
from umem.planning import PLANNERS
from umem.policy import load_policy, resolve
from umem.trace import Trace, save_trace, trace_fingerprint

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "plans-at-scale.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results" / "planning.json"
MIB = 2**20


@pytest.fixture(scope="module")
def tiny() -> Trace:
    return model_trace("llama-tiny", "sft", batch=2, seq=64)


@pytest.fixture(scope="module")
def run() -> PlanningRun:
    return planning.run_planning(
        ["llama-tiny"],
        ["sft", "lora"],
        rounds=2,
        growth_model="llama-tiny",
        growth_layers=[3, 6, 12],
        first_use=False,
        on_progress=lambda _: None,
    )


# --- traces made from a recorded one ---


def test_the_same_number_of_layers_gives_the_same_trace(tiny: Trace) -> None:
    same = with_layers(tiny, 4)

    assert trace_fingerprint(same) == trace_fingerprint(tiny)
    assert same.phase_names == tiny.phase_names
    assert same.tensor_names == tiny.tensor_names


@pytest.mark.parametrize("layers", [2, 7])
def test_another_number_of_layers_is_what_would_be_recorded(
    tiny: Trace, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(_models._SHAPES["llama-tiny"], layers=layers)
    monkeypatch.setitem(_models._SHAPES, "llama-tiny", shape)

    made = with_layers(tiny, layers)

    recorded = model_trace("llama-tiny", "sft", batch=2, seq=64)
    assert trace_fingerprint(made) == trace_fingerprint(recorded)
    assert made.phase_names == recorded.phase_names
    assert made.tensor_names == recorded.tensor_names
    assert made.name == f"llama-tiny-sft, {layers} layers"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("forward model.layers.0: one more", "its layers are not all the same"),
        ("forward model: of no layer", "a pass does not go through all layers one after another"),
    ],
)
def test_layers_that_differ_cannot_be_repeated(tiny: Trace, name: str, reason: str) -> None:
    first = next(i for i, name in enumerate(tiny.phase_names) if "layers.1" in name)
    names = (*tiny.phase_names[:first], name, *tiny.phase_names[first + 1 :])

    with pytest.raises(TraceError, match=f"{reason}; record a network of equal layers"):
        with_layers(replace(tiny, phase_names=names), 8)


def test_a_trace_without_layers_cannot_have_more(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace({"a": (MIB, "weights")}, [(1e-3, ["a"], [])])

    with pytest.raises(TraceError, match="has 0 numbered layers, and 8 are asked for"):
        with_layers(trace, 8)


def test_ranks_share_the_state_and_nothing_else(tiny: Trace) -> None:
    share = share_of_state(tiny, 3)

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
        {
            "w": (10, "weights"),
            "a": (5, "activations", False),
            "b": (7, "activations", False),
        },
        [(1e-3, ["w"], ["a"]), (1e-3, ["a"], []), (1e-3, ["w"], ["b"])],
    )

    assert peak_live_bytes(trace) == 17


# --- paging in plain Python ---


@pytest.mark.parametrize(
    ("unit_bytes", "units", "moved_bytes"),
    [(None, 3, 8 * MIB), (2 * MIB, 5, 6 * MIB), (MIB, 9, 5 * MIB)],
)
def test_python_evicts_what_was_used_longest_ago(
    make_trace: Callable[..., Trace], unit_bytes: int | None, units: int, moved_bytes: int
) -> None:
    trace = make_trace(
        {"a": (4 * MIB, "weights"), "b": (4 * MIB, "weights"), "t": (MIB, "other", False)},
        [(1e-3, ["a"], ["t"]), (1e-3, ["b"], []), (1e-3, ["b"], [])],
    )
    fits = PythonLru(trace, 9 * MIB, unit_bytes)
    tight = PythonLru(trace, 6 * MIB, unit_bytes)

    assert fits.unit_count == tight.unit_count == units
    assert fits.step() == 8 * MIB, "the state comes to the device once"
    assert fits.step() == 0
    tight.step()
    assert [tight.step(), tight.step()] == [moved_bytes, moved_bytes]


def test_python_refuses_a_phase_that_does_not_fit(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace({"a": (4 * MIB, "weights")}, [(1e-3, ["a"], [])])

    with pytest.raises(PlanError, match="phase 0 does not fit 1048576 bytes"):
        PythonLru(trace, MIB, MIB).step()


def test_python_pages_what_the_engine_pages(
    tiny: Trace, machine: Hardware, make_trace: Callable[..., Trace]
) -> None:
    from umem.planning import plan
    from umem.simulation import simulate

    sizes = {f"w{number}": (4 * MIB, "optimizer_state") for number in range(5)}
    trace = make_trace(sizes, [(1e-3, [name], [name]) for name in sizes])
    policy = resolve(load_policy("rmm-managed"), machine.device_bytes)
    policy = replace(policy, device_budget_bytes=12 * MIB)
    schedule = plan(trace, machine, policy, "fault")
    report = simulate(trace, schedule, machine, policy)

    python = PythonLru(trace, 12 * MIB, machine.block_bytes)
    python.step()

    assert python.step() == report.moved_bytes("to_device") == 20 * MIB


# --- a run ---


def test_a_run_measures_every_planner(run: PlanningRun) -> None:
    assert [(it.model, it.mode, it.ranks) for it in run.workloads] == [
        ("llama-tiny", "sft", 1),
        ("llama-tiny", "lora", 1),
    ]
    assert run.machine.cpu
    assert run.machine.numba
    for workload in run.workloads:
        assert tuple(it.planner for it in workload.planners) == PLANNERS
        for times in workload.planners:
            rounds = (times.plan_s, times.simulate_s, times.store_s, times.load_s)
            assert all(len(it) == 2 and min(it) > 0 for it in rounds)
            assert times.step_s >= times.lower_bound_s > 0
            assert times.plan_bytes > 0
        found = {it.planner: it.simulations for it in workload.planners}
        assert found["fault"] == found["lookahead"] == found["oracle"] == 0
        assert found["planned"] >= 1
        umem, blocks, tensors = workload.simulators
        assert umem.units == blocks.units >= tensors.units == workload.tensors


def test_growth_is_measured_on_memories_that_grow(run: PlanningRun) -> None:
    assert [(it.layers, it.planner) for it in run.growth] == [
        (layers, planner) for layers in (3, 6, 12) for planner in PLANNERS
    ]
    phases = [it.phases for it in run.growth[:: len(PLANNERS)]]
    assert phases[2] - phases[1] == 2 * (phases[1] - phases[0]) > 0


def test_a_step_that_no_machine_holds_is_shared(
    machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model_trace("llama-tiny", "sft", batch=planning.BATCH, seq=planning.SEQ)
    share = share_of_state(whole, planning.RANKS)
    between_bytes = (peak_live_bytes(whole) + peak_live_bytes(share)) // 2
    small = replace(machine, device_bytes=50 * MIB, host_bytes=between_bytes - 45 * MIB)
    monkeypatch.setattr(planning, "load_hardware", lambda _: small)

    run = planning.run_planning(
        ["llama-tiny"], ["sft"], rounds=1, growth_layers=(), first_use=False, on_progress=print
    )

    (workload,) = run.workloads
    assert workload.ranks == planning.RANKS
    assert workload.name == f"llama-tiny-sft, 1/{planning.RANKS} of the state"
    assert workload.peak_live_bytes == peak_live_bytes(share)
    assert any(grid.title.startswith("Jobs worked out") for grid in grids(run))


def test_a_file_comes_back_as_it_was(run: PlanningRun, tmp_path: Path) -> None:
    path = tmp_path / "new" / "planning.json"
    write_planning(run, path)

    assert read_planning(path) == run


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not a file of `umem bench planning --output`: the file: Invalid JSON"),
        ('{"format": "umem-bench-1"}', "planning --output`: format: Input should be"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "planning.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ResultsFileError, match=re.escape(reason)):
        read_planning(path)


def test_first_plans_of_a_process_are_timed(
    tiny: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_trace(tiny, tmp_path / "trace.npz")

    _first_plan.main(str(tmp_path / "trace.npz"), "gh200-96", "sft")

    assert float(capsys.readouterr().out) > 0


def test_a_process_that_cannot_plan_says_why(tiny: Trace) -> None:
    with pytest.raises(UmemError, match=r"first plans of a new process failed: .*no-such-machine"):
        _first_plan.time_first_use(tiny, "no-such-machine", "sft", print)


# --- targets ---


def point(phases: int, planner: str, time_s: float, simulations: int = 1) -> GrowthPoint:
    return GrowthPoint(
        layers=phases // 100,
        phases=phases,
        tensors=phases,
        accesses=2 * phases,
        blocks=3 * phases,
        planner=planner,
        times_s=(time_s, 1.5 * time_s),
        simulations=simulations,
    )


def grows(planner: str, power: float, simulations: int = 1) -> tuple[GrowthPoint, ...]:
    return tuple(
        point(n, planner, 1e-6 * simulations * n * np.log(n) * n**power, simulations)
        for n in (1000, 10_000, 100_000)
    )


def test_the_exponent_is_that_beyond_n_log_n() -> None:
    points = grows("fault", 0.0) + grows("planned", 0.5, simulations=9)

    assert growth_exponent(points, "fault") == pytest.approx(0.0, abs=1e-9)
    assert growth_exponent(points, "planned") == pytest.approx(0.5)


def test_checks_hold_planning_and_growth_against_targets(run: PlanningRun) -> None:
    assert [it.detail for it in checks(run.model_copy(update={"growth": ()}))] == [
        "not measured",
        "not measured",
    ]
    sft = run.workloads[0]
    slow = tuple(
        it.model_copy(update={"plan_s": (2.0, 9.0, 2.9), "simulate_s": (0.2,)})
        for it in sft.planners
    )
    target = sft.model_copy(update={"name": "llama-2-7b-sft"})
    made_up = run.model_copy(
        update={
            "workloads": (target, target.model_copy(update={"planners": slow})),
            "growth": grows("fault", 0.1) + grows("planned", 0.2),
        }
    )

    quick, fault, planned = checks(made_up)

    assert quick.passed
    assert fault.passed
    assert not planned.passed
    assert planned.detail.endswith(f"to the power of 0.20, at most {MAX_GROWTH}")
    late = made_up.model_copy(update={"workloads": made_up.workloads[1:]})
    assert not next(checks(late)).passed
    assert next(checks(late)).detail == "3.1 s, below 3 s"


# --- the command ---


def test_the_command_shows_a_file_and_fails_on_a_missed_target(
    run: PlanningRun, tmp_path: Path
) -> None:
    path = tmp_path / "planning.json"
    write_planning(run, path)

    shown = CliRunner().invoke(app, ["planning", "--report", str(path), "--markdown"])
    as_json = CliRunner().invoke(app, ["planning", "--report", str(path), "--json"])
    held = CliRunner().invoke(app, ["planning", "--report", str(path), "--check"])

    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(heading(run))
    for grid in grids(run):
        assert markdown(grid) in shown.stdout
    assert json.loads(as_json.stdout)["workloads"][0]["model"] == "llama-tiny"
    assert held.exit_code == 1
    assert "FAIL  llama-2-7b-sft, planned: planning and a simulation: not measured" in held.stdout


def test_the_command_refuses_unknown_models() -> None:
    done = CliRunner().invoke(app, ["planning", "--models", "llama-3"])

    assert done.exit_code == 2
    assert "'llama-3' is none of llama-tiny, llama-2-7b" in " ".join(done.output.split())


@pytest.mark.slow
def test_the_targets_hold_here(tmp_path: Path) -> None:
    path = tmp_path / "planning.json"
    words = ["planning", "--models", "llama-2-7b", "--quick", "-o", str(path), "--check"]

    done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    assert max(it.phases for it in read_planning(path).growth) > 9000


# --- the page ---


def test_the_pages_tables_are_those_of_the_committed_run() -> None:
    found = re.search(
        r"<!-- umem bench planning --report (\S+) --markdown -->\n(.*?)\n<!-- end of report -->",
        PAGE,
        re.DOTALL,
    )
    assert found, "docs/plans-at-scale.md holds no report"
    assert ROOT / found.group(1) == RESULTS
    results = read_planning(RESULTS)
    tables = "\n\n".join(map(markdown, grids(results)))
    assert found.group(2).strip() == f"{heading(results)}\n\n{tables}"


def test_the_committed_run_is_whole_and_meets_the_targets() -> None:
    results = read_planning(RESULTS)

    assert {it.model for it in results.workloads} == set(planning.DEFAULT_MODELS)
    assert {it.layers for it in results.growth} == set(planning.GROWTH_LAYERS)
    assert max(it.phases for it in results.growth) > 100_000
    assert results.first_use
    assert results.first_use.compiling_s > results.first_use.cached_s
    assert {it.ranks for it in results.workloads} == {1, planning.RANKS}
    missed = [it for it in checks(results) if not it.passed]
    assert missed == []


def test_the_page_names_the_targets_and_the_share() -> None:
    text = " ".join(PAGE.split())

    assert f"takes less than {MAX_PLANNING_S:.0f} s once compiled" in text
    assert f"no exponent of growth is above {MAX_GROWTH}." in text
    assert f"the share of one rank of {planning.RANKS}:" in text


def test_the_pages_way_of_sharing_plans_once(
    machine: Hardware, make_trace: Callable[..., Trace], tmp_path: Path
) -> None:
    found = re.search(r"```python\n(from umem\.planner.*?)```", PAGE, re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(found.group(1), names)
    sizes = {f"w{number}": (4 * MIB, "optimizer_state") for number in range(5)}
    trace = make_trace(sizes, [(1e-3, [name], [name]) for name in sizes])
    policy = replace(
        resolve(load_policy("sft"), machine.device_bytes), device_budget_bytes=12 * MIB
    )

    made = names["shared_plan"](tmp_path / "here", trace, machine, policy)
    (file,) = (tmp_path / "here").iterdir()
    made_at_ns = file.stat().st_mtime_ns
    renamed = replace(policy, name="another name")
    read = names["shared_plan"](tmp_path / "here", trace, machine, renamed)
    names["shared_plan"](tmp_path / "elsewhere", trace, machine, policy)

    assert made.hint_count == read.hint_count > 0
    assert [it.stat().st_mtime_ns for it in (tmp_path / "here").iterdir()] == [made_at_ns]
    assert (tmp_path / "elsewhere" / file.name).read_bytes() == file.read_bytes()
