"""The benchmark of text generation: its rows, the script, real processes, tables."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_runs import GIB, made_up_header
from typer.testing import CliRunner
from umem_bench.cli import app
from umem_bench.generate.measure import GenerateJob, measure
from umem_bench.generate.run import BUDGETS_BYTES, CASES, host_bytes, parse_rows, run_generate
from umem_bench.generate.tables import bound_s, checks, heading, is_over_budget, tables
from umem_bench.llama import build_for_inference
from umem_bench.results import (
    GENERATE_VARIANTS,
    GenerateResult,
    GenerateSettings,
    Run,
    read_results,
    write_results,
)

from umem import UmemError, UnsupportedError
from umem.cuda import bindings
from umem.streaming import WeightStatus
from umem.streaming.weights.streamed_weights import WeightCounts

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 0, reason="it is about a machine without a GPU"
)


def settings(**changes: Any) -> GenerateSettings:
    asked: dict[str, Any] = {
        "cases": CASES,
        "budgets_bytes": BUDGETS_BYTES,
        "tokens": 32,
        "rounds": 3,
    }
    return GenerateSettings.model_validate(asked | changes)


def result(variant: str, median_s: float = 0.1, **changes: Any) -> GenerateResult:
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


def made_up_run(*results: GenerateResult, **changes: Any) -> Run:
    return Run(made_up_header("generate", settings(**changes)), results)


def test_of_experts_the_chosen_ones_that_were_not_cached_bound_a_token() -> None:
    row = result("umem", case="qwen3-30b-a3b", streamed_bytes=int(55e9), cached_share=0.4)
    assert bound_s(made_up_run(row), row) == pytest.approx(8 / 128 * 0.6)
    row = row.model_copy(update={"cached_share": None})
    assert bound_s(made_up_run(row), row) == pytest.approx(8 / 128)


@pytest.mark.parametrize(
    ("case", "parameters"),
    [("llama-2-7b", 6.738e9), ("code-llama-34b", 33.74e9), ("qwen3-30b-a3b", 30.53e9)],
)
def test_shapes_are_those_of_the_published_models(case: Any, parameters: float) -> None:
    assert CASES[case].weight_bytes == pytest.approx(2 * parameters, rel=1e-3)


# ---- rows ----


def test_rows_are_named_by_case_and_variant() -> None:
    assert parse_rows("tiny,llama-2-7b:umem,tiny:stock") == [
        ("tiny", "stock"),
        ("llama-2-7b", "umem"),
    ]
    whole = parse_rows("")
    assert parse_rows("llama-2-7b") == whole[:3]
    assert whole == [(case, variant) for case in BUDGETS_BYTES for variant in GENERATE_VARIANTS[:3]]
    assert parse_rows("llama-2-7b:zero-inference") == [("llama-2-7b", "zero-inference")]


@pytest.mark.parametrize(
    "words",
    [
        ["--rows", "llama-3:umem"],
        ["--rows", "llama-2-7b:swap"],
        ["--rows", "tiny:umem"],
        ["--tokens", "4"],
        ["--host", "much"],
    ],
)
def test_unknown_choices_end_with_status_2(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["generate", *words]).exit_code == 2


def test_sizes_are_known_before_a_row_starts() -> None:
    tiny = CASES["tiny"]
    cpu = torch.device("cpu")
    matrices = [it for it in build_for_inference(tiny, cpu, cpu).parameters() if it.ndim > 1]
    assert sorted(tiny.matrix_sizes) == sorted(it.numel() for it in matrices)
    assert tiny.weight_bytes == sum(it.nbytes for it in matrices)
    mixture = TINY_EXPERTS
    every = build_for_inference(mixture, cpu, cpu).parameters()
    assert mixture.weight_bytes == sum(it.nbytes for it in every if it.ndim > 1)

    weights = 2 * 6_738_149_376
    assert host_bytes(settings(), ("llama-2-7b", "stock")) == 0
    assert host_bytes(settings(), ("llama-2-7b", "umem")) == weights - 8 * GIB
    assert host_bytes(settings(), ("llama-2-7b", "accelerate")) == weights


# ---- runs with made-up answers ----


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[GenerateJob]:
    """The jobs that were given to processes, on a GPU of 80 GiB; stock of 34B has no room."""
    seen: list[GenerateJob] = []

    def ask(_: object, job: GenerateJob, card: Any, *__: float, **___: float) -> dict[str, Any]:
        seen.append(job)
        assert card == job.card
        if job.model == CASES["code-llama-34b"] and job.variant == "stock":
            return {"state": "failed", "reason": "OutOfMemoryError: CUDA out of memory.\n\nHint"}
        return {"state": "measured", "token_s": (0.1, 0.1, 0.1), "process_s": 20.0}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bindings, "device_pci_address", lambda _: "0000:01:00.0")
    monkeypatch.setattr(bindings, "nvml_memory_bytes", lambda _: (80 * GIB, 79 * GIB))
    monkeypatch.setattr(
        "umem_bench.generate.run.header", lambda name, asked, *_: made_up_header(name, asked)
    )
    monkeypatch.setattr("umem_bench.generate.run.ask_worker", ask)
    return seen


def run(rows: str, asked: GenerateSettings | None = None, **options: Any) -> Run:
    limits = {"seconds_limit": 500.0, "host_limit_bytes": 100 * GIB}
    return run_generate(asked or settings(), parse_rows(rows), lambda _: None, **(limits | options))


def test_every_row_has_its_budget(jobs: list[GenerateJob]) -> None:
    found = run("llama-2-7b,code-llama-34b:stock,code-llama-34b:umem")

    budgets = [None, 8 * GIB, 8 * GIB, None, 16 * GIB]
    assert [job.budget_bytes for job in jobs] == budgets
    assert [it.budget_bytes for it in found.generations] == budgets
    # Running out of memory is a result.
    stock = found.generations[3]
    assert (stock.state, stock.reason) == (
        "out of memory", "OutOfMemoryError: CUDA out of memory."
    )  # fmt: skip
    assert {job.limit_s <= 480 for job in jobs} == {True}


def test_rows_without_room_or_time_are_left_out_by_name(jobs: list[GenerateJob]) -> None:
    small = run("llama-2-7b:accelerate", host_limit_bytes=12 * GIB).generations[0]
    # A made-up process of 7B takes 20 s, and one of 13B more.
    late = run("llama-2-7b:umem,llama-2-13b:umem", seconds_limit=30.0).generations

    assert small.state == "left out"
    for fact in ("12.55 GiB", "12 GiB", "16 GiB", "--host"):
        assert fact in str(small.reason)
    assert [it.state for it in late] == ["measured", "left out"]
    assert "--continue" in str(late[1].reason)
    assert len(jobs) == 1


def test_a_run_goes_on_with_what_its_file_lacks(jobs: list[GenerateJob], tmp_path: Path) -> None:
    path = tmp_path / "generate.jsonl"
    first = run("llama-2-7b:umem", on_results=lambda it: write_results(it, path))

    both = run("llama-2-7b:stock,llama-2-7b:umem", earlier=read_results(path))
    again = run("llama-2-7b:umem", earlier=both, again=True)

    assert read_results(path) == first
    assert [it.variant for it in both.generations] == ["umem", "stock"]
    assert len(again.generations) == 2
    assert [job.variant for job in jobs] == ["umem", "stock", "umem"]
    with pytest.raises(UmemError, match=r"cannot be continued.*tokens"):
        run("llama-2-7b", settings(tokens=16), earlier=first)


@needs_no_gpu
def test_large_cases_need_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="GPU"):
        run("tiny,llama-2-7b:umem")


# ---- the script ----


TINY_EXPERTS = CASES["tiny"].model_copy(
    update={"intermediate": 64, "head_dim": 32, "experts": 8, "experts_per_token": 2}
)


class _Weights:
    """What umem says of weights: each time the next of some statuses."""

    def __init__(self, *statuses: WeightStatus) -> None:
        self.statuses = list(statuses)

    def status(self) -> WeightStatus:
        return self.statuses.pop(0)


def status(**changes: Any) -> WeightStatus:
    asked: dict[str, Any] = {
        "budget_bytes": GIB,
        "plans": 2,
        "resident_bytes": 3000,
        "streamed_bytes": 2000,
        "in_place_bytes": 0,
        "buffer_bytes": 1000,
        "cache_bytes": 0,
        "cached_experts": (0, 0),
        "other_bytes": 500,
        "counts": WeightCounts(),
        "moved_outputs": 0,
    }
    return WeightStatus(**(asked | changes))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every variant generates on the CPU: what umem and accelerate were asked for."""
    found: dict[str, Any] = {"statuses": [status(), status()]}
    for name in ("UMEM_POLICY", "UMEM_DEVICE_BUDGET", "UMEM_PLANNER", "UMEM_MANAGED_LIMIT"):
        monkeypatch.setenv(name, "another's")
    monkeypatch.setattr(
        "umem_bench.generate.measure.select",
        lambda *asked: found.update(umem=(os.environ["UMEM_DEVICE_BUDGET"], *asked)),
    )
    monkeypatch.setattr(
        "umem_bench.generate.measure.manage_weights",
        lambda _: _Weights(found["statuses"].pop(0)),
    )

    def place(_: object, **asked: Any) -> dict[str, str]:
        found["accelerate"] = asked["max_memory"]
        return {"": "cpu"}

    monkeypatch.setattr("accelerate.infer_auto_device_map", place)

    def initialize(model: torch.nn.Module, config: dict[str, Any]) -> tuple[Any, ...]:
        found["deepspeed"] = config["zero_optimization"]
        return SimpleNamespace(module=model), None, None, None

    # transformers looks for DeepSpeed when it is loaded, and must not find the stand-in.
    importlib.import_module("transformers.integrations.deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "another's")
    return found


def generated(variant: str, **changes: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "model": CASES["tiny"],
        "variant": variant,
        "budget_bytes": None if variant == "stock" else GIB,
        "tokens": 6,
        "rounds": 2,
        "limit_s": 1000.0,
        "card": None,
    }
    (answer,) = measure(GenerateJob.model_validate(asked | changes))
    return answer


@pytest.mark.slow
def test_all_variants_generate_by_the_same_script(seen: dict[str, Any]) -> None:
    stock = generated("stock")
    assert "UMEM_DEVICE_BUDGET" not in os.environ
    umem, accelerate = generated("umem"), generated("accelerate")
    deepspeed = generated("zero-inference")

    for it in (umem, accelerate, deepspeed):
        assert (it["tokens_hash"], it["logits_hash"]) == (
            stock["tokens_hash"], stock["logits_hash"]
        )  # fmt: skip
        assert not it["notes"]
    assert len(stock["token_s"]) == 2
    assert seen["umem"] == (str(GIB), "umem", "inference", GIB)
    assert seen["accelerate"][0] == GIB - (512 << 20)
    assert seen["accelerate"]["cpu"] >= CASES["tiny"].weight_bytes
    assert seen["deepspeed"]["stage"] == 3
    assert seen["deepspeed"]["offload_param"]["device"] == "cpu"
    assert 2 * seen["deepspeed"]["stage3_max_live_parameters"] == GIB - (512 << 20)
    assert os.environ["WORLD_SIZE"] == "1"
    assert os.environ["UMEM_MANAGED_LIMIT"] == str(GIB)
    assert {"UMEM_POLICY", "UMEM_PLANNER", "UMEM_DEVICE_BUDGET"}.isdisjoint(os.environ)
    figures = {"streamed_bytes": 2000, "resident_bytes": 3000, "buffer_bytes": 1000, "plans": 2}
    assert figures.items() <= umem.items()
    assert figures.keys().isdisjoint(stock)
    # Other tokens have other logits.
    more = generated("stock", tokens=7)
    assert more["tokens_hash"] != stock["tokens_hash"]
    assert more["logits_hash"] != stock["logits_hash"]


@pytest.mark.slow
def test_a_mixture_of_experts_tells_how_many_were_cached(seen: dict[str, Any]) -> None:
    seen["statuses"] = [
        status(cached_experts=(5, 5), cache_bytes=10),
        status(cached_experts=(8, 6), cache_bytes=10),
    ]
    stock, umem = (generated(it, model=TINY_EXPERTS) for it in ("stock", "umem"))
    assert stock["logits_hash"] == umem["logits_hash"]
    assert (umem["cache_bytes"], umem["cached_share"]) == (10, 3 / 4)


@pytest.mark.slow
def test_what_speaks_against_a_row_is_noted(seen: dict[str, Any]) -> None:
    seen["statuses"] = [status(plans=2), status(plans=3, streamed_bytes=0)]

    late = generated("umem", rounds=3, limit_s=0.0)

    assert len(late["token_s"]) == 1
    for words in ("1 of 3 rounds", "placed weights 1 times", "streams no weights"):
        assert words in str(late["notes"])


# ---- real processes ----


@needs_no_gpu
@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_a_process_generates_text_and_its_file_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests may run beside it
    path = tmp_path / "generate.jsonl"
    words = ["generate", "--rows", "tiny", "--tokens", "6", "--rounds", "2", "-o", str(path)]

    done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    made = read_results(path)
    (stock,) = made.generations
    assert (stock.state, len(stock.token_s)) == ("measured", 2)
    assert stock.built_s
    assert stock.first_s
    assert stock.tokens_hash
    assert stock.logits_hash
    assert stock.host_process_bytes
    assert made.header.packages["transformers"]
    shown = CliRunner().invoke(app, ["report", str(path), "--markdown", "--tables", "tiny"])
    assert "| stock |" in shown.stdout


# ---- tables ----


def rows_of(made: Run) -> dict[str, tuple[str, ...]]:
    table, *_ = tables(made)
    return {row[0]: tuple(row) for row in table.rows}


def test_rows_are_beside_their_bound() -> None:
    left: dict[str, Any] = {"state": "left out", "reason": "no room", "token_s": ()}
    made = made_up_run(result("umem", 0.1), result("stock", 0.01), result("accelerate", **left))

    rows = rows_of(made)

    assert list(rows) == ["stock", "umem"]
    assert rows["umem"] == (
        "umem", "100 [90 to 120]", "80", "1.25x", "1.5", "9 GiB (1 GiB)", "8 GiB", "same bits"
    )  # fmt: skip
    assert rows["stock"][1:4] == ("10 [9 to 12]", "—", "—")
    assert rows["stock"][-2:] == ("—", "—")
    shape, notes = list(tables(made))
    assert "12.55 GiB" in shape.title
    assert notes.rows == [("llama-2-7b, accelerate", "8 GiB", "left out", "no room")]
    for words in ("Made-up GPU", "3 rounds", "greedy"):
        assert words in heading(made)
    assert [it.passed for it in checks(made)] == [True, True]


def test_the_bound_is_the_slower_of_computing_and_copying() -> None:
    umem = result("umem")
    assert bound_s(made_up_run(umem), umem) == pytest.approx(0.08)
    assert bound_s(made_up_run(umem, result("stock", 0.09)), umem) == pytest.approx(0.09)
    assert bound_s(made_up_run(umem), result("accelerate")) is None


def test_a_row_over_its_budget_is_marked_and_not_compared() -> None:
    changes = {"card_peak_bytes": 9 * GIB + (65 << 20)}
    umem = result("umem", **changes)
    made = made_up_run(umem, result("stock"), result("accelerate", **changes))

    for variant in ("umem", "accelerate"):
        assert rows_of(made)[variant][3] == "over its budget"
        assert "over its budget" in rows_of(made)[variant][5]
    # Every process has what stock's has beside tensors.
    assert not is_over_budget(made_up_run(umem, result("stock", outside_bytes=2 * GIB)), umem)
    assert [it.passed for it in checks(made)] == [False, True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logits_hash": "0c"}, "logits differ"),
        ({"tokens_hash": "0c"}, "tokens differ"),
        ({"tokens_hash": "0c", "logits_hash": "0c"}, "tokens and logits differ"),
    ],
)
def test_tokens_and_logits_are_compared_bit_by_bit(changes: dict[str, Any], words: str) -> None:
    made = made_up_run(result("umem", **changes), result("stock"))

    assert rows_of(made)["umem"][-1] == words
    assert [it.passed for it in checks(made)] == [True, False]


def test_without_stock_bits_are_not_compared() -> None:
    out = result("stock", state="out of memory", reason="CUDA out of memory", token_s=())
    # Of its base only the context is known then.
    made = made_up_run(result("umem", card_peak_bytes=17 * GIB // 2), out)

    assert rows_of(made)["umem"][-1] == "—"
    assert [it.passed for it in checks(made)] == [True]
    failed = made_up_run(result("umem", state="failed", reason="broken", token_s=()))
    assert [it.passed for it in checks(failed)] == [None]


def test_a_report_reads_a_file_and_holds_it_against_limits(tmp_path: Path) -> None:
    path = tmp_path / "generate.jsonl"
    write_results(made_up_run(result("umem"), result("stock")), path)

    words = ["report", str(path), "--markdown", "--tables", "llama-2-7b", "--check"]
    done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    assert "| umem | 100 [90 to 120] | 100 | 1.00x |" in done.stdout
    assert "pass  llama-2-7b, umem: tokens and logits: same bits" in done.stdout
