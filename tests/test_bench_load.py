"""The benchmark of loading: its files, its rows, real processes, tables."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_runs import GIB, made_up_header
from typer.testing import CliRunner
from umem_bench.cli import app
from umem_bench.load import run as module
from umem_bench.load.files import drop_from_page_cache, read_all, weight_files, write_model
from umem_bench.load.run import BUDGETS_BYTES, CASES, parse_rows, run_load
from umem_bench.load.tables import checks, heading, tables
from umem_bench.results import (
    LOAD_VARIANTS,
    LoadParts,
    LoadResult,
    LoadSettings,
    Run,
    read_results,
    write_results,
)

from umem import UmemError, UnsupportedError
from umem.cuda import bindings

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 0, reason="it is about a machine without a GPU"
)


def settings(**changes: Any) -> LoadSettings:
    asked: dict[str, Any] = {"cases": CASES, "budgets_bytes": BUDGETS_BYTES, "rounds": 2}
    return LoadSettings.model_validate(asked | changes)


def parts(load_s: float) -> LoadParts:
    return LoadParts(python_s=0.1, imports_s=2.0, enable_s=0.4, load_s=load_s, pass_s=0.5)


def result(variant: str, **changes: Any) -> LoadResult:
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
        "parts": (parts(1.0), parts(3.0), parts(2.0)),
        "card_peak_bytes": 9 * GIB,
        "outside_bytes": GIB,
        "host_bytes": 6 * GIB,
        "tokens_hash": "0a",
        "logits_hash": "0b",
        "process_s": 6.0,
    }
    return LoadResult.model_validate(made | changes)


def made_up_run(*results: LoadResult, **changes: Any) -> Run:
    return Run(made_up_header("load", settings(**changes)), results)


# ---- files ----


@pytest.mark.slow
def test_files_are_those_of_a_model_and_no_two_matrices_are_equal(tmp_path: Path) -> None:
    write_model(CASES["tiny"], tmp_path)
    write_model(CASES["tiny"], tmp_path / "again")

    (file,) = weight_files(tmp_path)
    weights = load_file(file)
    matrices = [it for it in weights.values() if it.ndim == 2]
    assert sum(it.nbytes for it in matrices) == CASES["tiny"].weight_bytes
    assert {it.dtype for it in matrices} == {torch.bfloat16}
    beginnings = {tuple(it.flatten()[:16].tolist()) for it in matrices}
    assert len(beginnings) == len(matrices)
    assert all(0.01 < it.float().std() < 0.03 for it in matrices)
    assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_all_bytes_of_all_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umem_bench.load.files._CHUNK_BYTES", 1000)
    for number, size in enumerate((2500, 1, 1000)):
        (tmp_path / f"{number}.safetensors").write_bytes(bytes([number]) * size)
    files, read = weight_files(tmp_path), []
    preadv = os.preadv

    def short(descriptor: int, parts: Any, offset: int) -> int:
        count = preadv(descriptor, [parts[0][:700]], offset)  # as the kernel may
        read.append(count)
        return count

    monkeypatch.setattr(os, "preadv", short)

    assert read_all(files) > 0
    drop_from_page_cache(files)
    assert sum(read) == 3501


# ---- rows ----


def test_rows_are_named_by_case_and_variant() -> None:
    assert parse_rows("tiny,llama-2-7b:umem,tiny:stock") == [
        ("tiny", "read"),
        ("tiny", "stock"),
        ("llama-2-7b", "umem"),
    ]
    assert parse_rows("") == [("llama-2-7b", variant) for variant in LOAD_VARIANTS]


@pytest.mark.parametrize("rows", ["llama-3:umem", "llama-2-7b:swap", "tiny:umem"])
def test_unknown_rows_end_with_status_2(rows: str) -> None:
    assert CliRunner().invoke(app, ["load", "--rows", rows]).exit_code == 2


@needs_no_gpu
def test_large_cases_need_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="GPU"):
        run_load(settings(), parse_rows("llama-2-7b"), lambda _: None, seconds_limit=60.0)


# ---- processes with made-up answers ----


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """What processes were given, and their environment, on a GPU; accelerate's ends at once."""
    seen: list[tuple[dict[str, Any], dict[str, str]]] = []

    def start(command: list[str], env: dict[str, str], **_: Any) -> Any:
        job = json.loads(command[-1])
        seen.append((job, env))
        if job["variant"] == "accelerate":
            return SimpleNamespace(returncode=1, stdout="", stderr="a\nb\nCUDA out of memory. x\n")
        if job["variant"] == "umem" and len(seen) > 3:
            raise subprocess.TimeoutExpired(command, 1.0)
        told = {
            "parts": parts(float(len(seen))).model_dump(),
            "tokens_hash": f"{len(seen)}",
            "logits_hash": "0",
            "notes": [],
        }
        return SimpleNamespace(returncode=0, stdout=f"a word\n{json.dumps(told)}\n", stderr="")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bindings, "device_pci_address", lambda _: "0000:01:00.0")
    monkeypatch.setattr(bindings, "nvml_memory_bytes", lambda _: (80 * GIB, 79 * GIB))
    monkeypatch.setattr(module, "header", lambda name, asked, *_: made_up_header(name, asked))
    started = SimpleNamespace(run=start, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(module, "subprocess", started)
    monkeypatch.setattr(module, "git_commit", lambda: "0123456789ab")
    monkeypatch.setattr("umem_bench.card._REST_S", 0.0)
    monkeypatch.setenv("UMEM_POLICY", "another's")
    return seen


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> LoadSettings:
    """The 7B is a small one."""
    return settings(cases={"llama-2-7b": CASES["tiny"]})


def run(asked: LoadSettings, rows: str, folder: Path, **options: Any) -> Run:
    limits: dict[str, Any] = {"seconds_limit": 500.0, "host_limit_bytes": GIB, "folder": folder}
    return run_load(asked, parse_rows(rows), lambda _: None, **(limits | options))


def test_every_row_has_processes_of_its_own_with_its_budget(
    jobs: list[tuple[dict[str, Any], dict[str, str]]], small: LoadSettings, tmp_path: Path
) -> None:
    path = tmp_path / "load.jsonl"
    made = run(small, "", tmp_path, on_results=lambda it: write_results(it, path))

    read, stock, umem, accelerate = made.loads
    assert [it.state for it in made.loads] == ["measured", "measured", "failed", "out of memory"]
    assert len(read.read_s) == 2
    assert [it.load_s for it in stock.parts] == [1.0, 2.0]
    assert stock.file_bytes == read.file_bytes
    assert "tokens differ between the rounds" in stock.notes
    assert umem.timed_out
    assert "CUDA out of memory" in str(accelerate.reason)
    assert [job["variant"] for job, _ in jobs] == ["stock", "stock", "umem", "umem", "accelerate"]
    assert [job["device_map"] for job, _ in jobs] == ["cuda"] * 4 + ["auto"]
    assert [job["device_bytes"] for job, _ in jobs] == [None] * 4 + [8 * GIB - (512 << 20)]
    budgets = [env.get("UMEM_DEVICE_BUDGET") for _, env in jobs]
    assert budgets == [None, None, str(8 * GIB), str(8 * GIB), None]
    assert all("UMEM_POLICY" not in env for _, env in jobs)
    assert read_results(path) == made
    assert [it for it in tmp_path.iterdir() if it.is_dir()] == [], "the files are removed"

    with pytest.raises(UmemError, match=r"cannot be continued.*rounds"):
        run(small.model_copy(update={"rounds": 3}), "", tmp_path, earlier=made)


def test_rows_without_room_or_time_are_left_out_by_name(
    jobs: list[tuple[dict[str, Any], dict[str, str]]],
    small: LoadSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (host,) = run(small, "llama-2-7b:stock", tmp_path, host_limit_bytes=1000).loads
    (late,) = run(small, "llama-2-7b:stock", tmp_path, seconds_limit=-1.0).loads
    full = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=GIB))
    monkeypatch.setattr(module, "shutil", full)
    (disk,) = run(small, "llama-2-7b:stock", tmp_path).loads

    for it, fact in ((host, "--host"), (late, "--continue"), (disk, "--folder")):
        assert it.state == "left out"
        assert fact in str(it.reason)
    assert not jobs


# ---- real processes ----


@needs_no_gpu
@pytest.mark.slow
def test_a_process_loads_and_its_file_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = str(Path(module.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", benchmarks)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests may run beside it
    path = tmp_path / "load.jsonl"
    words = ["load", "--rows", "tiny", "--rounds", "1", "--cold", "--folder", str(tmp_path)]

    done = CliRunner().invoke(app, [*words, "-o", str(path)])

    assert done.exit_code == 0, done.output
    read, stock = read_results(path).loads
    assert (read.state, stock.state) == ("measured", "measured")
    (its,) = stock.parts
    assert its.imports_s > 0
    assert its.load_s > 0
    assert its.total_s < stock.process_s
    assert stock.tokens_hash
    assert stock.logits_hash
    assert not stock.notes
    shown = CliRunner().invoke(app, ["report", str(path), "--markdown"])
    assert "| stock |" in shown.stdout
    assert "dropped from the page cache" in shown.stdout


# ---- tables ----


def test_rows_are_beside_what_reading_takes() -> None:
    left: dict[str, Any] = {"state": "left out", "reason": "no room", "parts": ()}
    made = made_up_run(
        result("umem"), result("read"), result("stock"), result("accelerate", **left)
    )

    whole, shares, notes = list(tables(made))

    assert [row[0] for row in whole.rows] == ["read", "stock", "umem"]
    assert whole.rows[0][:3] == ("read", "0.5 [0.4 to 0.6]", "—")
    assert whole.rows[2] == (
        "umem", "5 [4 to 6]", "10.00x", "9 GiB (1 GiB)", "8 GiB", "6 GiB", "same bits"
    )  # fmt: skip
    assert shares.rows[1] == ("umem", "0.1", "2", "0.4", "2", "0.5", "4.00x")
    assert notes.rows == [("llama-2-7b, accelerate", "8 GiB", "left out", "no room")]
    assert "13 GiB" in whole.title
    for words in ("Made-up GPU", "2 processes", "in the page cache"):
        assert words in heading(made)
    assert [it.passed for it in checks(made)] == [True, True]


def test_a_row_over_its_budget_or_with_other_bits_is_marked() -> None:
    over = result("umem", card_peak_bytes=9 * GIB + (65 << 20), logits_hash="0c")
    made = made_up_run(over, result("stock"))

    row = next(iter(tables(made))).rows[1]
    assert row[2] == "—"
    assert "over its budget" in row[3]
    assert row[-1] == "logits differ"
    assert [it.passed for it in checks(made)] == [False, False]
    failed = made_up_run(result("umem", state="failed", reason="broken", parts=()))
    assert [it.passed for it in checks(failed)] == [None]
