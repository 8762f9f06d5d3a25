"""The benchmark: one short run of each suite, what its rows compute, and its worker processes.

tests/gpu/test_bench.py runs the suites that need a GPU; test_bench_tables.py has what users read.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_runs import GIB, TINY, have_a_card, settings
from typer.testing import CliRunner
from umem_bench.allocators import AllocatorJob, run_alloc, worker_limit_bytes
from umem_bench.bounds import BUDGETS_PERCENT
from umem_bench.cli import app
from umem_bench.generate.measure import GenerateJob
from umem_bench.generate.measure import measure as measure_generation
from umem_bench.generate.run import CASES as GENERATED
from umem_bench.llama import ChunkedLoss, build_llama
from umem_bench.machine import managed_limit_bytes
from umem_bench.results import (
    METHODS,
    Measurement,
    Method,
    Run,
    ScaleSettings,
    read_results,
    write_results,
)
from umem_bench.scale.run import BUDGETS_BYTES, CASES, parse_rows, run_scale
from umem_bench.training.run import run_training

from umem import PolicyError, UmemError, UnsupportedError
from umem.pages.plan import PLANNERS

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 0, reason="it is about a machine without a GPU"
)


def bench(*words: str, status: int = 0) -> str:
    """What a command prints, whose exit status is this one."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == status, done.output
    return done.output


# ---- one run of each suite ----


@pytest.mark.slow
def test_core_measures_and_writes_provenance_first(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"

    printed = bench("core", "--quick", "--rounds", "2", "--output", str(path))

    header = json.loads(path.read_text().splitlines()[0])
    assert header["format"] == "umem-bench-2"
    assert header["machine"]["cpu"]
    assert header["packages"]["torch"]
    assert header["settings"]["policy"] == "sft"
    times = {it.case: it.rounds_s for it in read_results(path).measurements("core")}
    assert len(times) == 7
    assert all(len(rounds_s) == 2 and min(rounds_s) > 0 for rounds_s in times.values())
    assert "random sizes, 8 threads" in printed


@needs_no_gpu
@pytest.mark.parametrize("name", ["alloc", "step", "all"])
def test_allocators_are_not_timed_without_a_gpu(name: str) -> None:
    done = CliRunner().invoke(app, [name, "--quick"])
    assert isinstance(done.exception, UnsupportedError)
    assert "umem doctor" in str(done.exception)


def test_an_output_without_a_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["predicted", "--output", str(tmp_path / "new" / "x.jsonl")])
    assert isinstance(done.exception, UmemError)
    assert str(done.exception).startswith("--output: there is no folder")


@needs_no_gpu
@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_an_allocator_that_fails_says_why_and_the_run_goes_on() -> None:
    said: list[str] = []
    job = AllocatorJob(allocator="torch", policy="sft", limit_bytes=1 << 30, rounds=1, quick=True)

    found = run_alloc([job], said.append)

    assert any("torch failed: UnsupportedError" in it for it in said)
    assert len(found) == 6
    assert all("umem doctor" in str(it.error) and not it.rounds_s for it in found)


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_training_trains_the_same_model_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    said: list[str] = []
    asked = settings(variants=("stock", "umem-planned", "save-on-cpu"), deterministic=True)

    run = run_training(asked, said.append, lambda it: write_results(it, path), device="cpu")

    assert read_results(path) == run
    first, adapters = (it for it in run.trainings if it.variant == "stock")
    for it in (first, adapters):
        losses = [float.fromhex(loss) for loss in it.losses_hex]
        assert it.state == "measured"
        assert len(it.steps_s) == 3
        assert losses == sorted(losses, reverse=True)
        assert it.process_s > sum(it.steps_s)
    # Adapters begin as the model that they are put on.
    assert adapters.losses_hex[0] == first.losses_hex[0] != adapters.losses_hex[1]
    # The CPU counts no peak, so that no budget is a share of it.
    budgeted = [it for it in run.trainings if it.variant == "umem-planned"]
    assert {(it.state, "not measured" in str(it.reason)) for it in budgeted} == {("left out", True)}
    saving = next(it for it in run.trainings if it.variant == "save-on-cpu")
    assert (saving.state, "needs a GPU" in str(saving.reason)) == ("failed", True)
    assert len(said) == len(run.trainings)
    assert " ms a step" in said[0]


@needs_no_gpu
@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_scale_trains_and_its_floor_does_not(tmp_path: Path) -> None:
    path = tmp_path / "scale.jsonl"
    words = ["scale", "--rows", "tiny:stock,tiny:floor,tiny:umem", "--steps", "2"]

    options = ["--deterministic", "--policy", "sft", "--minutes", "8", "--output", str(path)]
    bench(*words, *options, status=1)  # umem's process has no GPU

    rows = {it.variant: it for it in read_results(path).scales}
    stock, floor = rows["stock"], rows["floor"]
    assert stock.state == floor.state == "measured"
    assert len(stock.steps_s) == 2
    assert stock.wall_s == pytest.approx(sum(stock.steps_s), rel=0.01)
    # The floor's weights stay as they were made.
    assert floor.losses_hex[0] == stock.losses_hex[0]
    assert floor.losses_hex[1] != stock.losses_hex[1]
    assert stock.first_step_s
    assert stock.host_process_bytes
    assert (rows["umem"].state, "GPU" in str(rows["umem"].reason)) == ("failed", True)


@needs_no_gpu
@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_generate_generates_text_and_its_file_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "generate.jsonl"

    bench("generate", "--rows", "tiny", "--tokens", "6", "--rounds", "2", "-o", str(path))

    (stock,) = read_results(path).generations
    assert (stock.state, len(stock.token_s)) == ("measured", 2)
    assert all((stock.built_s, stock.first_s, stock.tokens_hash, stock.logits_hash))
    assert "| stock |" in bench("report", str(path), "--markdown", "--tables", "tiny")


@needs_no_gpu
@pytest.mark.slow
def test_load_loads_and_shows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    path = tmp_path / "load.jsonl"
    words = ["load", "--rows", "tiny", "--rounds", "1", "--cold", "--folder", str(tmp_path)]

    bench(*words, "-o", str(path))

    read, stock = read_results(path).loads
    assert (read.state, stock.state) == ("measured", "measured")
    (parts,) = stock.parts
    assert min(parts.imports_s, parts.load_s) > 0
    assert parts.total_s < stock.process_s
    assert stock.tokens_hash
    assert stock.logits_hash
    assert not stock.notes
    assert [it.name for it in tmp_path.iterdir()] == [path.name], "the files are removed"
    shown = bench("report", str(path), "--markdown")
    assert "| stock |" in shown
    assert "dropped from the page cache" in shown


@pytest.mark.slow
def test_planning_measures_every_planner(tmp_path: Path) -> None:
    path = tmp_path / "planning.jsonl"
    words = ["planning", "--models", "llama-tiny", "--modes", "sft,lora", "--quick"]

    printed = bench(*words, "--rounds", "2", "--output", str(path))

    run = read_results(path)
    names = ("llama-tiny-lora", "llama-tiny-sft")
    assert sorted(it.case for it in run.measurements("recording")) == sorted(names)
    plans = {(it.case, it.subject): it for it in run.measurements("plan")}
    assert set(plans) == {(name, planner) for name in names for planner in PLANNERS}
    for it in plans.values():
        assert len(it.rounds_s) == 2
        assert it.figures["step_s"] >= it.figures["lower_bound_s"] * (1 - 1e-9)
    assert "Recorded steps" in printed


@pytest.mark.slow
def test_bounds_holds_plans_against_them(tmp_path: Path) -> None:
    document = {
        "format": "umem-trace/1",
        "name": "small",
        "tensors": [{"id": 1, "bytes": MIB, "class": "weights", "persistent": True}],
        "phases": [{"name": "forward", "duration_us": 1000, "reads": [1], "writes": [1]}],
    }
    (tmp_path / "small.json.gz").write_text(json.dumps(document), encoding="utf-8")
    path = tmp_path / "bounds.jsonl"

    bench("bounds", str(tmp_path), "--models", "none", "--output", str(path), "--check")

    found = [it for it in read_results(path).results if isinstance(it, Measurement)]
    assert [it.benchmark for it in found] == [f"{it} % of a100-g10" for it in BUDGETS_PERCENT]
    for it in found:
        assert it.figures["step_s"] == pytest.approx(1e-3)
        assert it.figures["fluid_s"] == pytest.approx(1e-3, rel=1e-5)


# ---- options, limits and files that go on ----


@pytest.mark.parametrize(
    "words",
    [
        "step --allocators=torch,jemalloc",
        "step --size=huge",
        "step --rounds=0",
        "generate --rows llama-3:umem",
        "generate --rows llama-2-7b:swap",
        "generate --tokens 4",
        "generate --host much",
        "load --rows tiny:umem",
        "scale --rows llama-2-7b-lora:deepspeed-3",
        "scale --budget much",
        "planning --models llama-3",
        *(
            f"training --{it}"
            for it in ("workloads=medium", "methods=qlora", "variants=vllm", "budgets=0",
                       "budgets=120", "budgets=60,half", "steps=0", "batch=0", "seconds-limit=0")
        ),
    ],
)  # fmt: skip
def test_unknown_choices_end_with_status_2(words: str) -> None:
    bench(*words.split(), status=2)


@needs_no_gpu
@pytest.mark.parametrize(
    "words",
    [
        "training",
        "scale --rows tiny:floor,llama-2-7b-bf16:floor",
        "generate --rows tiny,llama-2-7b:umem",
        "load --rows llama-2-7b",
    ],
)
def test_large_cases_need_a_gpu(words: str) -> None:
    done = CliRunner().invoke(app, words.split())

    assert isinstance(done.exception, UnsupportedError)
    assert "umem doctor" in str(done.exception)


def test_workers_share_less_than_16_gib_of_managed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UMEM_MANAGED_LIMIT", raising=False)
    assert worker_limit_bytes(["torch", "umem", "rmm-pool", "rmm-managed"]) == 5 * GIB
    assert worker_limit_bytes(["torch", "umem"]) == 8 * GIB
    monkeypatch.setenv("UMEM_MANAGED_LIMIT", "64GiB")
    assert worker_limit_bytes(["torch", "umem"]) == 15 * GIB
    assert managed_limit_bytes(16 * GIB) == 16 * GIB
    monkeypatch.setenv("UMEM_MANAGED_LIMIT", "2GiB")
    assert worker_limit_bytes(["torch", "umem", "rmm-pool"]) == 2 * GIB
    monkeypatch.setenv("UMEM_MANAGED_LIMIT", "much")
    with pytest.raises(PolicyError, match="UMEM_MANAGED_LIMIT"):
        worker_limit_bytes(["umem"])


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that were given to processes, on a GPU of 80 GiB; stock has too little memory."""
    seen: list[Any] = []

    def ask(_: object, job: Any, *__: object) -> dict[str, Any]:
        seen.append(job)
        if job.variant == "stock":
            return {"state": "failed", "reason": "OutOfMemoryError: CUDA out of memory.\n\nHint"}
        return {"state": "measured", "steps_s": (1.0, 1.0), "wall_s": 2.0, "process_s": 5.0}

    have_a_card(monkeypatch, 80, ask)
    return seen


def run(rows: str, earlier: Run | None = None, **changes: Any) -> Run:
    limits: dict[str, Any] = {"seconds_limit": 100.0, "host_limit_bytes": 200 * GIB, "again": False}
    limits |= {name: changes.pop(name) for name in (*limits, "on_results") if name in changes}
    asked = {"cases": CASES, "policy": "sft", "budget_bytes": None, "budgets_bytes": BUDGETS_BYTES,
             "steps": 2, "accumulate": 1, "clip": True, "deterministic": True}  # fmt: skip
    chosen = ScaleSettings.model_validate(asked | changes)
    return run_scale(chosen, parse_rows(rows), lambda _: None, earlier=earlier, **limits)


def test_rows_without_room_or_time_are_left_out_a_full_card_is_a_result(
    jobs: list[Any],
) -> None:
    small = run("llama-2-7b-fp32:umem", host_limit_bytes=50 * GIB).scales[0]
    late = run("llama-2-7b-fp32:floor,llama-2-7b-bf16:floor", seconds_limit=2.0).scales
    full = run("tiny:stock").scales[0]

    assert small.state == "left out"
    for fact in ("50.2 GiB", "50 GiB", "16 GiB", "--host"):
        assert fact in str(small.reason)
    assert [it.state for it in late] == ["measured", "left out"]
    assert "--continue" in str(late[1].reason)
    assert (full.state, str(full.reason).splitlines()) == (
        "out of memory", ["OutOfMemoryError: CUDA out of memory."]
    )  # fmt: skip
    with pytest.raises(UmemError, match=r"77 GiB.*79 GiB.*2 GiB.*--budget 76GiB"):
        run("tiny:umem", budget_bytes=77 * GIB)
    assert len(jobs) == 2


def test_a_run_goes_on_with_what_its_file_lacks(jobs: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "scale.jsonl"
    first = run("tiny:umem", on_results=lambda it: write_results(it, path))
    other = Run(first.header.model_copy(update={"commit": "fedcba987654"}), first.results)

    both = run("tiny:umem,tiny:floor", other)
    again = run("tiny:umem", both, again=True)
    late = run("tiny:umem", both, again=True, seconds_limit=-1.0)

    assert read_results(path) == first
    assert [it.variant for it in both.scales] == ["umem", "floor"]
    assert {it.variant for it in again.scales} == {"umem", "floor"}
    # Nothing that was measured is lost.
    assert {it.state for it in late.scales} == {"measured"}
    assert [job.variant for job in jobs] == ["umem", "floor", "umem"]
    with pytest.raises(UmemError, match=r"cannot be continued.*clip"):
        run("tiny", first, clip=False)


# ---- what the rows of a suite compute ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk_tokens", [5, 32])
def test_the_loss_in_chunks_is_that_of_transformers(method: Method, chunk_tokens: int) -> None:
    model = ChunkedLoss(build_llama(TINY, method, CPU), chunk_tokens)
    model.float()  # so that the order of sums does not matter
    tokens = torch.randint(0, TINY.vocabulary, (3, TINY.tokens))
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.2, -100)

    def gradients() -> list[torch.Tensor]:
        found = [it.grad for it in model.parameters() if it.requires_grad]
        model.zero_grad()
        return [it for it in found if it is not None]

    loss = model(input_ids=tokens, labels=labels)
    loss.backward()
    own = gradients()
    usual = model.network(input_ids=tokens, labels=labels).loss
    usual.backward()

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, usual)
    torch.testing.assert_close(own, gradients())


@pytest.mark.slow
def test_all_variants_generate_by_the_same_script(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    for name in ("UMEM_POLICY", "UMEM_DEVICE_BUDGET", "UMEM_PLANNER", "UMEM_MANAGED_LIMIT"):
        monkeypatch.setenv(name, "another's")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "another's")

    def select(*words: object) -> None:
        asked["umem"] = (os.environ["UMEM_DEVICE_BUDGET"], *words)

    def place(_: object, **options: Any) -> dict[str, str]:
        asked["accelerate"] = options["max_memory"]
        return {"": "cpu"}

    def initialize(model: torch.nn.Module, config: dict[str, Any]) -> tuple[Any, ...]:
        asked["deepspeed"] = config["zero_optimization"]
        return SimpleNamespace(module=model), None, None, None

    monkeypatch.setattr("umem_bench.generate.measure.select", select)
    monkeypatch.setattr("umem_bench.generate.measure._status", lambda *_: None)
    monkeypatch.setattr("accelerate.infer_auto_device_map", place)
    # transformers looks for DeepSpeed when it is loaded, and must not find the stand-in.
    importlib.import_module("transformers.integrations.deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))

    def bits(variant: str, tokens: int = 6) -> tuple[str, str]:
        budget_bytes = None if variant == "stock" else GIB
        job = {"model": GENERATED["tiny"], "variant": variant, "budget_bytes": budget_bytes,
               "tokens": tokens, "rounds": 2, "limit_s": 1000.0, "card": None}  # fmt: skip
        (answer,) = measure_generation(GenerateJob.model_validate(job))
        assert len(answer["token_s"]) == 2
        return answer["tokens_hash"], answer["logits_hash"]

    stock = bits("stock")
    for variant in ("umem", "accelerate", "zero-inference"):
        assert bits(variant) == stock
    assert asked["umem"] == (str(GIB), "umem", "inference", GIB)
    # A part of their budget is for what their maps of weights do not count.
    assert asked["accelerate"][0] == GIB - (512 << 20)
    assert asked["deepspeed"]["offload_param"]["device"] == "cpu"
    assert 2 * asked["deepspeed"]["stage3_max_live_parameters"] == GIB - (512 << 20)
    # Other tokens have other logits.
    assert not set(bits("stock", 7)) & set(stock)


# ---- its processes ----


_ENDLESS = """
import sys, time
sys.path[:0] = {paths!r}
from training_runs import TINY
from umem_bench.workers import Worker

def hang(_):
    yield "ready"
    time.sleep(600)

if __name__ == "__main__":
    with Worker(hang, TINY, preload=[]) as worker:
        worker.ask(600)
        worker.request()
        print("begun", flush=True)
        worker.answer(600)
"""


@pytest.mark.slow
def test_a_worker_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    paths = [str(ROOT / it) for it in ("tests/support", "benchmarks")]
    script.write_text(_ENDLESS.format(paths=paths))
    run = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stdout is not None
    try:
        assert run.stdout.readline() == "begun\n"
        # A worker, its server, and the program itself.
        assert wait_until(lambda: len(of_session(run.pid)) >= 3)
        run.kill()
        run.wait(30)

        assert wait_until(lambda: not of_session(run.pid))
    finally:
        for pid in of_session(run.pid):
            os.kill(pid, signal.SIGKILL)
        run.wait()
        run.stdout.close()


def wait_until(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 30
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.1)
    return holds()


def of_session(session: int) -> list[int]:
    """Living processes that a program has started, and the program itself."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, own = stat.read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found
