"""What users read of the benchmark: results files, limits, and what tables say of wrong rows.

The figures here are made up. The pages have tables of real ones: see test_readme.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training_runs import GIB, MIGRATION, made_up_header, made_up_run, result
from typer.testing import CliRunner
from umem_bench import allocators, planning
from umem_bench.cli import app
from umem_bench.generate import run as generations
from umem_bench.generate import tables as generate_tables
from umem_bench.load import run as loads
from umem_bench.load import tables as load_tables
from umem_bench.machine import git_commit
from umem_bench.results import (
    GenerateResult,
    GenerateSettings,
    LoadParts,
    LoadResult,
    LoadSettings,
    Measurement,
    ResultsFileError,
    Run,
    ScaleResult,
    ScaleSettings,
    TrainingResult,
    read_results,
    write_results,
)
from umem_bench.scale import run as scales
from umem_bench.scale import tables as scale_tables
from umem_bench.tables import markdown, notes_table
from umem_bench.training.tables import (
    CARD_MARGIN_BYTES,
    checks,
    fits,
    tables,
    working_set_bytes,
)

from umem import UmemError

CASE = "1 MiB, 1 thread"
STEP = "SFT, small"
MARGIN = CARD_MARGIN_BYTES


def report(run: Run, path: Path, *words: str, status: int = 0) -> str:
    """What `umem bench report` prints of a run."""
    write_results(run, path)
    done = CliRunner().invoke(app, ["report", str(path), *words])
    assert done.exit_code == status, done.output
    return done.stdout


def passed(found: Any) -> list[bool | None]:
    return [it.passed for it in found]


def rows_of(shown: Any, run: Run) -> dict[str, tuple[str, ...]]:
    """The first table of a suite, by variant."""
    return {row[0]: tuple(row) for row in next(iter(shown.tables(run))).rows}


# ---- allocators ----


def alloc(allocator: str, *rounds_us: float, error: str | None = None) -> Measurement:
    times_s = tuple(it * 1e-6 for it in rounds_us)
    return Measurement(
        benchmark="alloc", case=CASE, subject=allocator, rounds_s=times_s, error=error
    )


def step(
    allocator: str, step_s: float, reserved_bytes: int | None, loss: float = 9.0
) -> Measurement:
    figures = {"peak_reserved_bytes": reserved_bytes, "peak_allocated_bytes": GIB}
    return Measurement(
        benchmark="step",
        case=STEP,
        subject=allocator,
        rounds_s=(step_s * 0.99, step_s, step_s * 1.02),
        figures={name: it for name, it in figures.items() if it and reserved_bytes},
        loss_hex=loss.hex(),
    )


def of_allocators(*measurements: Measurement) -> Run:
    return Run(made_up_header("allocators", {"policy": "sft", "rounds": 3}), measurements)


def test_reasons_are_short_and_words_to_the_left() -> None:
    failed: Any = SimpleNamespace(state="out of memory", reason=40 * "word ", notes=())
    (table,) = notes_table([("7b, stock", "8 GiB", failed)])
    *_, rule, row = markdown(table).splitlines()
    assert rule == "| --- | ---: | --- | --- |"
    assert row == f"| 7b, stock | 8 GiB | out of memory | {31 * 'word '}… |"


@pytest.mark.parametrize(
    ("missed", "detail", "measurements"),
    [
        (f"alloc: {CASE}, time", "1.210x", [alloc("torch", 1), alloc("umem", 1.21)]),
        (f"alloc: {CASE}", "ran out", [alloc("torch", 1), alloc("umem", error="ran out")]),
        (
            f"step: {STEP}, least of the rounds",
            "1.040x",
            [step("torch", 0.1, GIB), step("umem", 0.104, GIB)],
        ),
        (
            f"step: {STEP}, peak reserved",
            "1.125x",
            [step("torch", 0.1, 2 * GIB), step("umem", 0.1, 2 * GIB + GIB // 4)],
        ),
        (
            f"step: {STEP}, peak reserved",
            "not measured",
            [step("torch", 0.1, GIB), step("umem", 0.1, None)],
        ),
        (
            f"step: {STEP}, loss",
            "umem 0x1.0",
            [step("torch", 0.1, GIB), step("umem", 0.1, GIB, loss=8.0)],
        ),
        (f"step: {STEP}", "needs both torch and umem", [step("umem", 0.1, GIB)]),
        # Of two processes with torch's cache the slower one counts.
        (
            f"step: {STEP}, least of the rounds",
            "1.019x",
            [step("torch", 0.1, GIB), step("umem", 0.109, GIB), step("torch-again", 0.107, GIB)],
        ),
    ],
)
def test_a_missed_limit_fails(
    tmp_path: Path, missed: str, detail: str, measurements: list[Measurement]
) -> None:
    (failed,) = (it for it in allocators.checks(of_allocators(*measurements)) if not it.passed)
    shown = report(of_allocators(*measurements), tmp_path / "run.jsonl", "--check", status=1)

    assert detail in failed.detail
    assert f"FAIL  {missed}" in shown


# ---- files and provenance ----


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        (b"", "line 1"),
        (b"{", "line 1"),
        (b"\xff\xfe", "line 1"),
        (b'{"format": "umem-bench-1"}', "line 1.*format"),
        (b"\x1f\x8b cut", "gzip"),
        (b'%(header)s\n{"kind": "measurement"}', r"line 2.*measurement\.benchmark"),
    ],
)
def test_files_without_results_are_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "other.jsonl"
    if content is not None:
        made = of_allocators().header.model_dump_json().encode()
        path.write_bytes(content.replace(b"%(header)s", made))

    with pytest.raises(ResultsFileError, match=words):
        read_results(path)


@pytest.mark.parametrize(
    ("benchmark", "words"), [(None, "cannot be read"), ("systems", r"matrix\.py --report")]
)
def test_a_file_that_is_no_report_is_an_error(tmp_path: Path, benchmark: Any, words: str) -> None:
    path = tmp_path / "systems.jsonl"
    if benchmark:
        made = made_up_header("scale", {}).model_copy(update={"benchmark": benchmark})
        path.write_text(made.model_dump_json())

    with pytest.raises(UmemError, match=words):
        CliRunner().invoke(app, ["report", str(path)], catch_exceptions=False)


def test_the_commit_is_the_checkouts_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"ls-files": "machine.py", "rev-parse": "0123456789ab", "status": "M a"}
    monkeypatch.setattr("umem_bench.machine._git", lambda command, *_: said[command])
    assert git_commit({"UMEM_COMMIT": "fedcba9876543210"}) == "0123456789ab, changed"

    monkeypatch.setattr("umem_bench.machine._git", lambda *_: None)
    assert git_commit({}) is None
    assert git_commit({"UMEM_COMMIT": "0123456789abcdef" * 2}) == "0123456789ab"
    for wrong in ("", "main", "0123", "0123456789ab; rm"):
        with pytest.raises(UmemError, match="UMEM_COMMIT"):
            git_commit({"UMEM_COMMIT": wrong})


# ---- training ----


@pytest.mark.parametrize(
    ("entry", "fitted"),
    [
        # Stock's tensors take 10 GiB of the card, and its process 1 more.
        (result("stock", card_peak_bytes=11 * GIB, outside_bytes=GIB), [100]),
        (result("save-on-cpu", card_peak_bytes=7 * GIB + MARGIN - 1), [100, 60]),
        (result("save-on-cpu", card_peak_bytes=7 * GIB + MARGIN), [100]),
        # Whatever the allocator of a variant counts.
        (result("bnb-paged-adamw", card_peak_bytes=9 * GIB, paged_state_bytes=0), [100]),
        (result("rmm-pool", peak_bytes=None, card_peak_bytes=4 * GIB), [100, 60, 30]),
        (result("umem-planned", percent=60.0, card_peak_bytes=7 * GIB), [100, 60]),
        (result("umem-planned", percent=60.0, card_peak_bytes=7 * GIB + MARGIN), []),
        # A further context of umem's is no excuse.
        (result("umem-planned", percent=60.0, card_peak_bytes=8 * GIB, base_bytes=2 * GIB), []),
    ],
)
def test_nvmls_peak_counts_where_it_is_known(entry: TrainingResult, fitted: list[float]) -> None:
    stock = result("stock", peak_bytes=8 * GIB, card_peak_bytes=11 * GIB, outside_bytes=GIB)
    run = made_up_run(stock, entry)

    assert [it for it in (100, 60, 30) if fits(run, entry, it)] == fitted
    assert working_set_bytes(stock) == 10 * GIB


@pytest.mark.parametrize(
    ("deterministic", "words"), [(True, "10.2500 differs"), (False, "10.2500")]
)
def test_losses_differ_where_they_must_not(deterministic: bool, words: str) -> None:
    other = result("umem-planned", percent=60.0, losses_hex=((10.75).hex(), (10.25).hex()))

    _, steps = tables(made_up_run(result("stock"), other, deterministic=deterministic))

    assert steps.rows[1][-1] == words


def planned(step_s: float, fault_batches: int = 1, **more: Any) -> TrainingResult:
    moved = MIGRATION.model_copy(update={"fault_batches": fault_batches, "predicted_bytes": None})
    asked: dict[str, Any] = {"percent": 60.0, "plan_running": True, "migration": moved}
    return result("umem-planned", step_s, **(asked | more))


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (planned(0.11, 12), []),
        (planned(0.118), ["stock's"]),
        (planned(0.15), ["demand paging's", "stock's"]),
        (planned(0.11, 13), ["fault batches"]),
        (planned(0.11, predicted_step_s=0.1), []),
        (planned(0.11, predicted_step_s=0.09), ["step of the predicted"]),
        (planned(0.11, migration=MIGRATION), ["bytes to_device of the predicted"]),
        (planned(0.11, resident_bytes=7 * GIB), ["within its budget"]),
        (planned(0.11, plan_running=False), ["umem-planned at 60 %"]),
        (planned(0.11, state="off", reason="too large", steps_s=()), ["umem-planned at 60 %"]),
    ],
)
def test_plans_are_held_against_limits(ours: TrainingResult, missed: list[str]) -> None:
    paged = result("umem-fault", 0.36, percent=60.0, migration=planned(1, 1200).migration)

    found = [it for it in checks(made_up_run(result("stock"), paged, ours)) if not it.passed]

    assert len(found) == len(missed)
    for check, words in zip(found, missed, strict=True):
        assert words in check.subject


# ---- scale ----


def at_scale(variant: str, step_s: float = 1.0, **changes: Any) -> ScaleResult:
    """A row of 7B; umem's has a budget of 70 GiB and is just within it."""
    made: dict[str, Any] = {
        "case": "llama-2-7b-fp32",
        "variant": variant,
        "state": "measured",
        "budget_bytes": 70 * GIB if variant.startswith("umem") else None,
        "steps_s": (step_s * 0.9, step_s, step_s * 1.2),
        "wall_s": 3.1 * step_s,
        "first_step_s": 9.0,
        "card_peak_bytes": 71 * GIB,
        "base_bytes": GIB // 2,
        "outside_bytes": GIB,
        "host_bytes": 50 * GIB,
        "losses_hex": ((10.5).hex(), (10.25).hex()),
        "process_s": 30.0,
    }
    return ScaleResult.model_validate(made | changes)


def scale_run(*results: ScaleResult, clip: bool = True) -> Run:
    settings = ScaleSettings(
        cases=scales.CASES,
        policy="sft",
        budget_bytes=None,
        budgets_bytes=scales.BUDGETS_BYTES,
        steps=2,
        accumulate=1,
        clip=clip,
        deterministic=True,
    )
    return Run(made_up_header("scale", settings), results)


OUT = at_scale("stock", state="out of memory", reason="CUDA out of memory", steps_s=())


def test_work_beside_the_median_step_is_seen() -> None:
    made = scale_run(at_scale("umem", wall_s=3.5), at_scale("floor"))

    assert rows_of(scale_tables, made)["umem"][4] == "total disagrees"
    assert passed(scale_tables.checks(made)) == [True, False]


@pytest.mark.parametrize(
    ("rows", "clip", "words"),
    [
        ([at_scale("umem"), at_scale("stock")], True, "10.2500 same bits"),
        ([at_scale("umem", losses_hex=((10.5).hex(), (10.0).hex())), at_scale("stock")], True,
         "differs"),
        ([at_scale("umem"), OUT, at_scale("umem-waiting")], True, "same bits"),
        ([at_scale("umem"), OUT], True, "10.2500"),
        # Its weights stay as they are, so that later losses are others.
        ([at_scale("floor"), at_scale("stock")], True, " first: same bits"),
        # Other arithmetic: no clipping.
        ([at_scale("umem-backward"), at_scale("stock")], True, "10.2500"),
        ([at_scale("umem-backward"), at_scale("stock")], False, "same bits"),
    ],
)  # fmt: skip
def test_losses_at_scale_are_compared_by_bits(
    rows: list[ScaleResult], clip: bool, words: str
) -> None:
    shown = rows_of(scale_tables, scale_run(*rows, clip=clip))[rows[0].variant][-1]

    assert shown.endswith(words)


# ---- generation ----


def generated(variant: str, median_s: float = 0.1, **changes: Any) -> GenerateResult:
    """A row of 7B; those with a budget, of 8 GiB, are just within it. umem streams for 80 ms."""
    made: dict[str, Any] = {
        "case": "llama-2-7b",
        "variant": variant,
        "state": "measured",
        "budget_bytes": None if variant == "stock" else 8 * GIB,
        "token_s": (median_s * 1.2, median_s * 0.9, median_s),
        "first_s": 1.5,
        "built_s": 3.0,
        "card_peak_bytes": 9 * GIB,
        "base_bytes": GIB // 2,
        "outside_bytes": GIB,
        "tokens_hash": "0a",
        "logits_hash": "0b",
        "process_s": 30.0,
    }
    if variant == "umem":
        made |= {"streamed_bytes": 4_400_000_000, "resident_bytes": 7 * GIB, "plans": 2}
    return GenerateResult.model_validate(made | changes)


def generate_run(*results: GenerateResult) -> Run:
    settings = GenerateSettings(
        cases=generations.CASES, budgets_bytes=generations.BUDGETS_BYTES, tokens=32, rounds=3
    )
    return Run(made_up_header("generate", settings), results)


def test_the_bound_is_the_slower_of_computing_and_copying() -> None:
    umem = generated("umem")
    experts = generated("umem", case="qwen3-30b-a3b", streamed_bytes=int(55e9), cached_share=0.4)
    whole = experts.model_copy(update={"cached_share": None})
    for row, others, bound_s in (
        (umem, (), 0.08),
        (umem, (generated("stock", 0.09),), 0.09),
        # Of experts the chosen ones that were not cached.
        (experts, (), 8 / 128 * 0.6),
        (whole, (), 8 / 128),
    ):
        assert generate_tables.bound_s(generate_run(row, *others), row) == pytest.approx(bound_s)
    assert generate_tables.bound_s(generate_run(umem), generated("accelerate")) is None


# ---- loading ----


def loaded(variant: str, **changes: Any) -> LoadResult:
    """A row of 7B; umem's and accelerate's are just within their 8 GiB."""
    made: dict[str, Any] = {
        "case": "llama-2-7b",
        "variant": variant,
        "state": "measured",
        "file_bytes": 13 * GIB,
    }
    if variant == "read":
        return LoadResult.model_validate(made | {"read_s": (0.5, 0.6, 0.4)} | changes)
    made |= {
        "budget_bytes": None if variant == "stock" else 8 * GIB,
        "parts": tuple(
            LoadParts(python_s=0.1, imports_s=2.0, enable_s=0.4, load_s=load_s, pass_s=0.5)
            for load_s in (1.0, 3.0, 2.0)
        ),
        "card_peak_bytes": 9 * GIB,
        "outside_bytes": GIB,
        "host_bytes": 6 * GIB,
        "tokens_hash": "0a",
        "logits_hash": "0b",
        "process_s": 6.0,
    }
    return LoadResult.model_validate(made | changes)


def load_run(*results: LoadResult) -> Run:
    settings = LoadSettings(cases=loads.CASES, budgets_bytes=loads.BUDGETS_BYTES, rounds=2)
    return Run(made_up_header("load", settings), results)


# ---- what several suites compare ----


GENERATION = (generated, generate_run, generate_tables)
LOADING = (loaded, load_run, load_tables)


@pytest.mark.parametrize(
    ("suite", "changes", "words"),
    [
        (GENERATION, {}, "same bits"),
        (GENERATION, {"tokens_hash": "0c"}, "tokens differ"),
        (GENERATION, {"logits_hash": "0c", "tokens_hash": "0c"}, "tokens and logits differ"),
        (LOADING, {}, "same bits"),
        (LOADING, {"logits_hash": "0c"}, "logits differ"),
    ],
)
def test_tokens_and_logits_are_compared_bit_by_bit(
    suite: Any, changes: dict[str, Any], words: str
) -> None:
    row, run, shown = suite
    made = run(row("umem", **changes), row("stock"))

    assert rows_of(shown, made)["umem"][-1] == words
    assert passed(shown.checks(made)) == [True, words == "same bits"]


@pytest.mark.parametrize(
    ("shown", "row", "run", "base", "compared"),
    [
        (scale_tables, at_scale, scale_run, "floor", 4),
        (generate_tables, generated, generate_run, "stock", 3),
        (load_tables, loaded, load_run, "stock", 2),
    ],
)
def test_a_row_over_its_budget_is_marked_and_not_compared(
    shown: Any, row: Any, run: Any, base: str, compared: int
) -> None:
    over = row("umem").card_peak_bytes + (65 << 20)
    umem = row("umem", card_peak_bytes=over)
    made = run(umem, row(base))

    cells = rows_of(shown, made)["umem"]
    assert cells[compared] in ("over its budget", "—")
    assert sum("over its budget" in cell for cell in cells[compared + 1 :]) == 1
    assert passed(shown.checks(made))[0] is False
    # Every process has what the other has beside tensors.
    assert passed(shown.checks(run(umem, row(base, outside_bytes=2 * GIB))))[0] is True
    assert passed(shown.checks(run(row("umem", state="failed", reason="broken")))) == [None]


# ---- planning ----


@pytest.mark.parametrize(("plan_s", "is_fast"), [(2.8, True), (2.95, False)])
def test_planning_is_held_against_its_limit(plan_s: float, is_fast: bool) -> None:
    figures = {"simulate_s": 0.1, "hints": 1234, "step_s": 0.42, "lower_bound_s": 0.4}
    made = Measurement(
        benchmark="plan",
        case="llama-2-7b-sft",
        subject="planned",
        rounds_s=(plan_s,),
        figures=figures,
    )
    run = Run(made_up_header("planning", planning.SETTINGS | {"rounds": 1}), (made,))

    assert passed(planning.checks(run)) == [is_fast]
    assert passed(planning.checks(Run(run.header, ()))) == [None]
