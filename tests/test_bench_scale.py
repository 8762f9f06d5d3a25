"""The real-scale benchmark: its rows, the room that it leaves free, real processes, tables."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_runs import GIB, made_up_header
from typer.testing import CliRunner
from umem_bench.card import Card, MemorySampler
from umem_bench.cli import app
from umem_bench.llama import build_llama
from umem_bench.results import (
    LORA_CASES,
    Run,
    ScaleResult,
    ScaleSettings,
    read_results,
    write_results,
)
from umem_bench.scale.measure import ScaleJob, measure
from umem_bench.scale.run import (
    BUDGETS_BYTES,
    CASES,
    USUAL_VARIANTS,
    host_state_bytes,
    parse_rows,
    run_scale,
)
from umem_bench.scale.tables import checks, heading, is_over_budget, tables
from umem_bench.training.variants import deepspeed_engine

from umem import UmemError, UnsupportedError
from umem.cuda import bindings

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 0, reason="it is about a machine without a GPU"
)


def settings(**changes: Any) -> ScaleSettings:
    asked: dict[str, Any] = {
        "cases": CASES,
        "policy": "sft",
        "budget_bytes": None,
        "budgets_bytes": BUDGETS_BYTES,
        "steps": 2,
        "accumulate": 1,
        "clip": True,
        "deterministic": True,
    }
    return ScaleSettings.model_validate(asked | changes)


def result(variant: str, step_s: float = 1.0, **changes: Any) -> ScaleResult:
    """A row of 7B; umem's has a budget of 70 GiB and is just within it."""
    budget_bytes = 70 * GIB if variant.startswith("umem") else None
    made: dict[str, Any] = {
        "case": "llama-2-7b-fp32",
        "variant": variant,
        "state": "measured",
        "budget_bytes": budget_bytes,
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


def made_up_run(*results: ScaleResult, **changes: Any) -> Run:
    return Run(made_up_header("scale", settings(**changes)), results)


# ---- rows ----


def test_rows_are_named_by_case_and_variant() -> None:
    assert parse_rows("tiny:stock,llama-2-7b-fp32:umem,tiny:stock") == [
        ("tiny", "stock"),
        ("llama-2-7b-fp32", "umem"),
    ]
    whole = parse_rows("")
    assert parse_rows("llama-2-7b-fp32") == whole[: len(USUAL_VARIANTS["sft"])]
    assert {case for case, _ in whole} == set(CASES) - {"tiny"}
    by_name = {"umem-waiting", "deepspeed-3", "fsdp-offload", "save-on-cpu"}
    assert by_name.isdisjoint({variant for _, variant in whole})
    assert set(parse_rows(",".join(f"tiny:{it}" for it in by_name))) == {
        ("tiny", it) for it in by_name
    }
    assert [variant for _, variant in parse_rows("llama-2-7b-lora")] == ["umem", "floor", "stock"]


@pytest.mark.parametrize(
    "words",
    [
        ["--rows", "llama-3:umem"],
        ["--rows", "tiny:swap"],
        ["--rows", "llama-2-7b-lora:deepspeed-3"],
        ["--budget", "much"],
    ],
)
def test_unknown_choices_end_with_status_2(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["scale", *words]).exit_code == 2


def test_host_memory_is_known_before_a_row_starts() -> None:
    fp32, bf16 = CASES["llama-2-7b-fp32"], CASES["llama-2-7b-bf16"]
    weights = 6_738_149_376  # those of norms are left out

    assert host_state_bytes(fp32, "umem") == 8 * weights == 2 * host_state_bytes(bf16, "umem")
    assert host_state_bytes(fp32, "deepspeed") == 16 * weights
    # torch's allocator rounds each page-locked tensor up to a power of two.
    layer = 4 * 64 + 3 * 256
    assert host_state_bytes(fp32, "torchao") == 8 * weights + 2 * (32 * layer + 2 * 512 << 20)
    assert host_state_bytes(fp32, "fsdp-offload") == host_state_bytes(fp32, "torchao")
    assert host_state_bytes(bf16, "deepspeed-3") == 18 * weights
    # 32 layers' inputs of 128 MiB and 4 more, logits of 1,000 MiB, and the head of 500 MiB.
    assert host_state_bytes(fp32, "save-on-cpu") == (36 * 128 + 1024 + 512) << 20
    assert host_state_bytes(fp32, "stock") == host_state_bytes(fp32, "floor") == 0
    assert host_state_bytes(bf16, "umem", "lora") == 2 * weights
    assert host_state_bytes(bf16, "stock", "lora") == 0


# ---- runs with made-up answers ----


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU of 80 GiB, of which an idle card uses 1."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bindings, "device_pci_address", lambda _: "0000:01:00.0")
    monkeypatch.setattr(bindings, "nvml_memory_bytes", lambda _: (80 * GIB, 79 * GIB))
    monkeypatch.setattr("umem_bench.scale.run.header", made_up_header)


@pytest.fixture
def jobs(card: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that were given to processes; stock has too little memory."""
    seen: list[Any] = []

    def ask(_: object, job: Any, card: Any, __: float) -> dict[str, Any]:
        seen.append(job)
        assert card == job.card
        if job.variant == "stock":
            return {"state": "failed", "reason": "OutOfMemoryError: CUDA out of memory.\n\nHint"}
        if job.variant == "deepspeed":
            return {"state": "failed", "reason": "ended with status -9"}
        return {"state": "measured", "steps_s": (1.0, 1.0), "wall_s": 2.0, "process_s": 5.0}

    monkeypatch.setattr("umem_bench.scale.run.ask_worker", ask)
    return seen


def run(rows: str, asked: ScaleSettings | None = None, **options: Any) -> Run:
    limits = {"seconds_limit": 100.0, "host_limit_bytes": 200 * GIB}
    return run_scale(asked or settings(), parse_rows(rows), lambda _: None, **(limits | options))


def test_every_process_is_within_the_same_limit(jobs: list[Any]) -> None:
    found = run("llama-2-7b-fp32")

    assert {job.limit_bytes for job in jobs} == {76 * GIB}
    assert {job.variant: job.clip for job in jobs} == {
        it: it != "umem-backward" for it in USUAL_VARIANTS["sft"]
    }
    rows = {it.variant: it for it in found.scales}
    assert rows["umem"].budget_bytes == rows["umem-backward"].budget_bytes == 76 * GIB
    assert rows["floor"].budget_bytes is None
    # Running out of memory is a result.
    assert (rows["stock"].state, rows["stock"].reason) == (
        "out of memory", "OutOfMemoryError: CUDA out of memory."
    )  # fmt: skip
    assert rows["deepspeed"].state == "out of memory"
    assert run("tiny:umem", settings(budget_bytes=5 * GIB)).scales[0].budget_bytes == 5 * GIB
    assert jobs[-1].limit_bytes == 5 * GIB


@pytest.mark.slow
def test_a_case_may_have_its_own_budget_and_lora_its_policy(jobs: list[Any]) -> None:
    rows = "llama-2-7b-lora:umem,llama-2-7b-lora:floor,llama-2-7b-fp32-40gib:umem"
    found = run(rows, settings(policy="managed")).scales

    told = [(job.method, job.policy, job.limit_bytes) for job in jobs]
    assert told == [
        ("lora", "lora", 8 * GIB), ("lora", "lora", 76 * GIB), ("sft", "managed", 40 * GIB)
    ]  # fmt: skip
    assert [it.budget_bytes for it in found] == [8 * GIB, None, 40 * GIB]
    asked = run("llama-2-7b-lora:umem", settings(budget_bytes=9 * GIB)).scales[0]
    assert asked.budget_bytes == 9 * GIB
    large = settings(budgets_bytes={"llama-2-7b-lora": 77 * GIB})
    left_out = run("llama-2-7b-lora:umem", large).scales[0]
    assert (left_out.state, "--budget 76GiB" in str(left_out.reason)) == ("left out", True)


def test_old_results_are_read_and_shown_as_they_were() -> None:
    every = map(read_results, sorted(RESULTS.glob("*-scale-*.jsonl")))
    before_budgets = [it for it in every if not it.scale_settings.budgets_bytes]
    assert len(before_budgets) == 8
    for old in before_budgets:
        assert "full fine-tuning of random weights" in heading(old)
        assert all("of stock" not in it.columns for it in tables(old))


def test_a_budget_leaves_some_of_the_card(jobs: list[Any]) -> None:
    with pytest.raises(UmemError, match=r"77 GiB.*79 GiB.*2 GiB.*--budget 76GiB"):
        run("tiny:umem", settings(budget_bytes=77 * GIB))
    assert not jobs


def test_rows_without_room_time_or_sense_are_left_out_by_name(jobs: list[Any]) -> None:
    small = run("llama-2-7b-fp32:umem", host_limit_bytes=50 * GIB).scales[0]
    late = run("llama-2-7b-fp32:floor,llama-2-7b-bf16:floor", seconds_limit=2.0).scales
    summed = run("tiny:umem-backward", settings(accumulate=4)).scales[0]

    assert small.state == "left out"
    for fact in ("50.2 GiB", "50 GiB", "16 GiB", "--host"):
        assert fact in str(small.reason)
    assert [it.state for it in late] == ["measured", "left out"]
    assert "--continue" in str(late[1].reason)
    assert summed.state == "not comparable"
    assert len(jobs) == 1


def test_the_planner_is_compiled_only_for_a_policy_that_plans_pages(
    jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []
    monkeypatch.setattr("umem_bench.scale.run.compile_planner", lambda: compiled.append(len(jobs)))

    run("tiny:floor,tiny:umem")
    run("tiny:floor,tiny:umem", settings(policy="managed"))

    assert compiled == [3]


def test_a_row_is_left_out_that_would_be_cut_short(jobs: list[Any]) -> None:
    large = "llama-2-13b-bf16:umem"
    # The made-up process of 7B takes 5 s.
    found = [
        run(f"llama-2-7b-bf16:umem,{large}", seconds_limit=left_s).scales[1].state
        for left_s in (9.0, 11.0)
    ]
    assert found == ["left out", "measured"]
    # A tiny model's process is mostly its start.
    assert run(f"tiny:umem,{large}", seconds_limit=11.0).scales[1].state == "measured"

    late = ScaleResult(
        case="llama-2-13b-bf16", variant="umem", state="failed", timed_out=True, process_s=75.0
    )
    earlier = Run(made_up_header("scale", settings()), (late,))
    assert run(large, earlier=earlier, seconds_limit=70.0).scales == [late]
    assert run(large, earlier=earlier, seconds_limit=80.0).scales[0].state == "measured"


def test_a_run_goes_on_with_what_its_file_lacks(jobs: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "scale.jsonl"
    first = run("tiny:umem", on_results=lambda it: write_results(it, path))
    other = Run(first.header.model_copy(update={"commit": "fedcba987654"}), first.results)

    both = run("tiny:umem,tiny:floor", earlier=other)
    again = run("tiny:umem", earlier=both, again=True)
    late = run("tiny:umem", earlier=both, again=True, seconds_limit=-1.0)

    assert read_results(path) == first
    assert [it.variant for it in both.scales] == ["umem", "floor"]
    assert {it.variant for it in again.scales} == {"umem", "floor"}
    # Nothing that was measured is lost.
    assert {it.state for it in late.scales} == {"measured"}
    assert [job.variant for job in jobs] == ["umem", "floor", "umem"]
    with pytest.raises(UmemError, match=r"cannot be continued.*clip"):
        run("tiny", settings(clip=False), earlier=first)


@needs_no_gpu
def test_large_cases_need_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="GPU"):
        run("tiny:floor,llama-2-7b-bf16:floor")


def test_a_short_peak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    used_bytes = [3 * GIB, 9 * GIB]
    all_read = threading.Event()

    def read(_: str) -> tuple[int, int]:
        now_bytes = used_bytes.pop(0) if used_bytes else GIB
        if not used_bytes:
            all_read.set()
        return 80 * GIB, 80 * GIB - now_bytes

    processes = [SimpleNamespace(usedGpuMemory=it) for it in (2 * GIB, None)]
    nvml: Any = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda _: None,
        nvmlDeviceGetComputeRunningProcesses=lambda _: processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(bindings, "nvml_memory_bytes", read)
    card = Card(pci_address="0000:01:00.0", idle_bytes=GIB, free_bytes=79 * GIB)
    with MemorySampler(card) as sampler:
        assert all_read.wait(20)

    figures = sampler.figures()
    assert figures["card_peak_bytes"] == 8 * GIB  # less the idle card's
    assert figures["process_bytes"] == 2 * GIB


@pytest.mark.slow
def test_memory_of_an_ended_process_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used_bytes = [9 * GIB, 5 * GIB]
    card = Card(pci_address="0000:01:00.0", idle_bytes=GIB, free_bytes=79 * GIB)

    def read(_: str) -> tuple[int, int]:
        return 80 * GIB, 80 * GIB - (used_bytes.pop(0) if used_bytes else GIB)

    monkeypatch.setattr(bindings, "nvml_memory_bytes", read)
    assert card.why_not_idle() == ""
    assert not used_bytes
    monkeypatch.setattr("umem_bench.card._IDLE_PATIENCE_S", 0.0)
    monkeypatch.setattr(bindings, "nvml_memory_bytes", lambda _: (80 * GIB, 70 * GIB))
    assert "9 GiB more" in card.why_not_idle()


def test_what_stays_of_an_ended_process_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    used_bytes = [9 * GIB, 5 * GIB, 2 * GIB, 2 * GIB, 3 * GIB]
    card = Card(pci_address="0000:01:00.0", idle_bytes=GIB, free_bytes=79 * GIB)
    monkeypatch.setattr("umem_bench.card._REST_S", 0.0)
    monkeypatch.setattr(
        bindings, "nvml_memory_bytes", lambda _: (80 * GIB, 80 * GIB - used_bytes.pop(0))
    )
    rested = card.between_processes()
    assert rested.idle_bytes == 2 * GIB
    assert rested.used_bytes() == GIB


# ---- the training script ----


class _Event:
    """A CUDA event of a GPU that is done at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.time_s - self.time_s)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every variant trains on the CPU, as if that were a card; the arguments of their packages."""
    seen: dict[str, Any] = {}
    fakes = {
        "synchronize": lambda: None,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=80 * GIB),
        "set_per_process_memory_fraction": lambda share: seen.update(share=share),
        "memory_reserved": lambda: GIB,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: GIB,
        "max_memory_reserved": lambda: GIB,
        "Event": _Event,
    }
    # First, as it loads umem, which derives its own events from torch's.
    monkeypatch.setattr("umem.manage", lambda *_, **asked: seen.update(asked))
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("UMEM_POLICY", "UMEM_DEVICE_BUDGET", "UMEM_PLANNER", "UMEM_MANAGED_LIMIT"):
        monkeypatch.setenv(name, "another's")
    monkeypatch.setattr(bindings, "nvml_memory_bytes", lambda _: (80 * GIB, 77 * GIB))
    monkeypatch.setattr(
        "umem_bench.scale.measure.build_llama",
        lambda shape, method, _: build_llama(shape, method, torch.device("cpu")),
    )
    monkeypatch.setattr(
        "umem_bench.scale.measure.select",
        lambda *_: seen.update(budget=os.environ["UMEM_DEVICE_BUDGET"]),
    )

    def offloaded(weights: Any, kind: Any, *, offload_gradients: bool, **asked: Any) -> Any:
        seen.update(offload_gradients=offload_gradients)
        return kind(weights, **asked)

    package = SimpleNamespace(CPUOffloadOptimizer=offloaded)
    imports = SimpleNamespace(import_module=lambda _: package)
    monkeypatch.setattr("umem_bench.training.variants.importlib", imports)
    return seen


def trained(variant: str, **changes: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "model": CASES["tiny"],
        "method": "sft",
        "variant": variant,
        "policy": "sft",
        "limit_bytes": 40 * GIB,
        "steps": 2,
        "accumulate": 1,
        "clip": True,
        "deterministic": False,
        "card": Card(pci_address="0000:01:00.0", idle_bytes=GIB, free_bytes=79 * GIB),
    }
    (answer,) = measure(ScaleJob.model_validate(asked | changes))
    return answer


@pytest.mark.slow
def test_all_variants_train_by_the_same_script(on_cpu: dict[str, Any]) -> None:
    stock = trained("stock")

    for variant in ("umem", "umem-waiting", "torchao"):
        assert trained(variant)["losses_hex"] == stock["losses_hex"], variant
    assert on_cpu == {"share": 0.5, "budget": str(40 * GIB), "offload_gradients": False}
    assert os.environ["UMEM_MANAGED_LIMIT"] == str(1 << 30)
    assert "UMEM_PLANNER" not in os.environ
    whole = trained("stock", clip=False)
    assert trained("umem-backward", clip=False)["losses_hex"] == whole["losses_hex"]
    assert on_cpu["step_in_backward"] is True
    assert whole["losses_hex"] != stock["losses_hex"]
    assert stock["base_bytes"] == 2 * GIB
    assert stock["outside_bytes"] == GIB
    assert len(stock["steps_s"]) == 2
    assert stock["wall_s"] >= sum(stock["steps_s"])


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_adapters_train_over_a_frozen_model() -> None:
    stock, floor = (trained(it, method="lora") for it in ("stock", "floor"))

    assert trained("umem", method="lora")["losses_hex"] == stock["losses_hex"]
    assert floor["losses_hex"][0] == stock["losses_hex"][0]
    assert floor["losses_hex"][-1] != stock["losses_hex"][-1]
    # 3 layers with 4 adapters of rank 16.
    assert stock["parameters"] == trained("floor")["parameters"] + 3 * 4 * 2 * 16 * 64


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_offloading_trains_the_same_model() -> None:
    stock = trained("stock", accumulate=2)
    saving = trained("save-on-cpu", accumulate=2)
    sharded = trained("fsdp-offload", accumulate=2)

    assert saving["losses_hex"] == stock["losses_hex"]
    assert not saving["notes"]
    losses, others = (map(float.fromhex, it["losses_hex"]) for it in (sharded, stock))
    assert list(losses) == pytest.approx(list(others), rel=1e-3)
    assert sharded["parameters"] == stock["parameters"]
    assert "on the host" in sharded["notes"][0]
    assert not torch.distributed.is_initialized()


def test_zero_3_has_its_weights_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def initialize(*, config: dict[str, Any], **_: Any) -> tuple[None, ...]:
        asked.append(config["zero_optimization"])
        return (None,) * 4

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "another's")
    for stage in (2, 3):
        deepspeed_engine(torch.nn.Linear(2, 2), 1, stage=stage)

    on_host = {"device": "cpu", "pin_memory": True}
    assert [it["stage"] for it in asked] == [2, 3]
    assert [it["offload_optimizer"] for it in asked] == [on_host, on_host]
    assert [it.get("offload_param") for it in asked] == [None, on_host]


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_what_is_no_fair_comparison_is_noted() -> None:
    assert "clipping" in str(trained("torchao")["notes"])
    assert not trained("torchao", clip=False)["notes"]
    assert "no manager" in str(trained("umem")["notes"])


# ---- real processes ----


@needs_no_gpu
@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_processes_train_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scale.jsonl"
    words = ["scale", "--rows", "tiny:stock,tiny:floor,tiny:torchao,tiny:umem", "--steps", "2"]
    options = ["--deterministic", "--policy", "sft", "--minutes", "8"]

    done = CliRunner().invoke(app, [*words, *options, "--output", str(path)])
    first = read_results(path)
    again = run("tiny:stock", first.scale_settings, earlier=first, again=True, seconds_limit=400.0)

    assert done.exit_code == 1  # umem's process has no GPU
    rows = {it.variant: it for it in first.scales}
    stock, floor = rows["stock"], rows["floor"]
    assert stock.state == floor.state == "measured"
    assert len(stock.steps_s) == 2
    assert stock.wall_s == pytest.approx(sum(stock.steps_s), rel=0.01)
    assert stock.losses_hex == {it.variant: it for it in again.scales}["stock"].losses_hex
    # The floor's weights stay as they were made.
    assert floor.losses_hex[0] == stock.losses_hex[0]
    assert floor.losses_hex[1] != stock.losses_hex[1]
    assert stock.first_step_s
    assert stock.host_process_bytes
    assert (rows["umem"].state, "GPU" in str(rows["umem"].reason)) == ("failed", True)
    if rows["torchao"].state != "failed":  # it needs a GPU, too
        assert "torchao" in str(rows["torchao"].reason)


# ---- tables and picture ----


OUT = result("stock", state="out of memory", reason="CUDA out of memory", steps_s=())


def rows_of(made: Run) -> dict[str, tuple[str, ...]]:
    table, *_ = tables(made)
    return {row[0]: tuple(row) for row in table.rows}


def test_rows_are_beside_the_floor() -> None:
    made = made_up_run(result("umem", 1.5), result("floor"), OUT, result("torchao", 2.5))

    rows = rows_of(made)

    assert rows["floor"][1:5] == ("1000 [900 to 1200]", "1033", "8,192", "100 %")
    assert rows["umem"][3:9] == (
        "5,461", "66.7 %", "9", "71 GiB (1 GiB)", "70 GiB", "50 GiB (—)"
    )  # fmt: skip
    assert rows["torchao"][4] == "40 %"
    assert list(tables(made))[1].rows == [
        ("llama-2-7b-fp32, stock", "—", "out of memory", "CUDA out of memory")
    ]
    for words in ("Made-up GPU", "clipping at 1", "deterministic"):
        assert words in heading(made)


def test_rows_are_beside_stock_where_it_was_measured() -> None:
    case = LORA_CASES[0]
    lora = [result(it, s, case=case) for it, s in (("umem", 1.25), ("floor", 0.9), ("stock", 1.0))]
    full = [result("umem"), result("floor")]

    made = made_up_run(*lora)

    table, *_ = tables(made)
    shares = {row[0]: row[4:6] for row in table.rows}
    assert table.columns[4:6] == ("of the floor", "of stock")
    assert shares == {
        "umem": ("72 %", "80 %"), "floor": ("100 %", "111 %"), "stock": ("90 %", "100 %")
    }  # fmt: skip
    assert rows_of(made)["umem"][-1].endswith("same bits")
    assert ", LoRA of random weights" in heading(made)
    both = made_up_run(*full, *lora)
    assert "full fine-tuning and LoRA of random weights" in heading(both)
    assert ["of stock" in it.columns for it in tables(both)] == [False, True]


def test_a_row_over_its_budget_is_marked_and_not_compared() -> None:
    over = result("umem", card_peak_bytes=71 * GIB + (65 << 20))
    made = made_up_run(over, result("floor"))

    assert rows_of(made)["umem"][4] == "over its budget"
    assert "over its budget" in rows_of(made)["umem"][6]
    # Every process has what the floor's has beside tensors.
    lighter = made_up_run(over, result("floor", outside_bytes=2 * GIB))
    assert not is_over_budget(lighter, over)
    assert [it.passed for it in checks(made)] == [False, True]


def test_work_beside_the_median_step_is_seen() -> None:
    made = made_up_run(result("umem", wall_s=3.5), result("floor"))

    assert rows_of(made)["umem"][4] == "total disagrees"
    assert [it.passed for it in checks(made)] == [True, False]


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ([result("umem"), result("stock")], {}, "10.2500 same bits"),
        ([result("umem", losses_hex=((10.5).hex(), (10.0).hex())), result("stock")], {}, "differs"),
        ([result("umem"), OUT, result("umem-waiting")], {}, "same bits"),
        ([result("umem"), OUT], {}, "10.2500"),
        # Its weights stay as they are, so that later losses are others.
        ([result("floor"), result("stock")], {}, " first: same bits"),
        # Other arithmetic: no clipping.
        ([result("umem-backward"), result("stock")], {}, "10.2500"),
        ([result("umem-backward"), result("stock")], {"clip": False}, "same bits"),
    ],
)
def test_losses_are_compared_bit_by_bit(
    rows: list[ScaleResult], changes: dict[str, Any], words: str
) -> None:
    shown = rows_of(made_up_run(*rows, **changes))[rows[0].variant][-1]

    assert shown.endswith(words)


@pytest.mark.slow
def test_the_picture_shows_speed_and_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from umem_bench.scale.picture import scale_figure

    over = result("umem-backward", card_peak_bytes=75 * GIB)
    made = made_up_run(result("umem", 2.0), over, result("floor"))
    speeds, peaks = scale_figure(made).axes

    lengths: Callable[[Any], list[Any]] = lambda axes: [it.get_width() for it in axes.patches]  # noqa: E731
    assert lengths(speeds) == [4096, 8192]
    assert lengths(peaks) == [71, 75]
    assert [bool(it.get_hatch()) for it in peaks.patches] == [False, True]
    assert set(speeds.lines[0].get_xdata()) == {8192.0}  # type: ignore[arg-type]
    write_results(made, tmp_path / "run.jsonl")
    words = ["report", str(tmp_path / "run.jsonl"), "--plot", str(tmp_path / "run.svg")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "<svg" in (tmp_path / "run.svg").read_text()
    with pytest.raises(UmemError, match="floor"):
        scale_figure(made_up_run(result("floor")))
