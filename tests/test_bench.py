"""Benchmarks: results files, tables, limits, and worker processes.

The figures here are made up, except those of the native core, which is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from training_runs import GIB, TINY, made_up_header
from typer.testing import CliRunner
from umem_bench.allocators import checks, heading, tables, worker_limit_bytes
from umem_bench.before_after import run_against
from umem_bench.cli import app
from umem_bench.machine import git_commit, header, managed_limit_bytes
from umem_bench.results import (
    Measurement,
    ResultsFileError,
    Run,
    read_results,
    write_results,
)
from umem_bench.tables import markdown
from umem_bench.timing import loops_for, time_calls, time_loops_s
from umem_bench.workers import Worker, WorkerError

from umem import PolicyError, UmemError

CASE = "1 MiB, 1 thread"
STEP = "SFT, small"
ROOT = Path(__file__).resolve().parents[1]


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


def made_up_run(*measurements: Measurement) -> Run:
    measurements = measurements or (
        alloc("torch", 1, 2, 3),
        alloc("umem", 2.1, 2.2, 2.3),
        alloc("rmm-pool", error="not installed"),
        step("torch", 0.016, 2 * GIB),
        step("umem", 0.0161, 2 * GIB + GIB // 8),
        step("rmm-managed", 0.32, None),
    )
    return Run(made_up_header("allocators", {"policy": "sft", "rounds": 3}), measurements)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.jsonl"
    write_results(made_up_run(), path)
    return path


# ---- what is measured ----


@pytest.mark.slow
def test_core_measures_and_writes_provenance_first(tmp_path: Path) -> None:
    path = tmp_path / "new" / "core.jsonl"

    done = CliRunner().invoke(app, ["core", "--quick", "--rounds", "2", "--output", str(path)])

    assert done.exit_code == 0, done.output
    header = json.loads(path.read_text().splitlines()[0])
    assert header["format"] == "umem-bench-2"
    assert header["machine"]["cpu"]
    assert header["packages"]["torch"]
    assert header["settings"]["policy"] == "sft"
    times = {it.case: it.rounds_s for it in read_results(path).measurements("core")}
    assert len(times) == 7
    assert all(len(rounds_s) == 2 and min(rounds_s) > 0 for rounds_s in times.values())
    assert "random sizes, 8 threads" in done.stdout


def test_packages_of_a_results_file_have_the_names_that_pip_knows() -> None:
    names = set(header("systems", {}, "annotated-types").packages)

    assert {"torch", "annotated-types"} <= names
    assert not {"annotated", "rmm-cu12", "rmm-cu13"} & names


@pytest.mark.slow
def test_a_worker_that_fails_says_why_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "alloc.jsonl"
    words = ["alloc", "--quick", "--allocators", "torch", "--output", str(path)]

    done = subprocess.run(
        [sys.executable, "-m", "umem_bench", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "benchmarks")},
    )

    assert done.returncode == 1, done.stderr
    assert "torch failed: UnsupportedError" in done.stderr
    found = read_results(path).measurements("alloc")
    assert len(found) == 6
    assert all("umem doctor" in str(it.error) and not it.rounds_s for it in found)


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


@pytest.mark.parametrize("option", ["--allocators=torch,jemalloc", "--size=huge", "--rounds=0"])
def test_unknown_choices_end_with_status_2(option: str) -> None:
    assert CliRunner().invoke(app, ["step", option]).exit_code == 2


@pytest.mark.parametrize("threads", [1, 4])
def test_timing_counts_every_pass(threads: int) -> None:
    given: list[int] = []

    time_loops_s(given.append, 40, threads)

    assert given == [40 // threads] * threads
    assert loops_for(lambda _: time.sleep(1e-3), 0.01) >= 8
    assert time_calls(lambda: 7, 3, iter(range(10)).__next__) == (7, (1, 1, 1))


def test_timing_lets_errors_of_threads_out() -> None:
    def loop(passes: int) -> None:
        raise MemoryError("full")

    with pytest.raises(MemoryError, match="full"):
        time_loops_s(loop, 8, threads=2)


# ---- worker processes ----


def echo(job: Any) -> Iterator[Any]:
    yield job.tokens
    raise ValueError(f"no more of {job.tokens}")


def die(_: Any) -> Iterator[Any]:
    print("some last words")
    yield os._exit(3)


def end_late(_: Any) -> Iterator[Any]:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(11))
    yield "ready"
    time.sleep(600)


def hang(_: Any) -> Iterator[Any]:
    yield "ready"
    print("compiling")
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_a_worker_answers_one_request_after_the_other() -> None:
    with Worker(echo, TINY, preload=[]) as worker:
        assert worker.ask(60) == TINY.tokens
        with pytest.raises(WorkerError, match="ValueError: no more of 32"):
            worker.ask(60)


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_a_worker_that_ends_leaves_its_last_words() -> None:
    with (
        Worker(die, TINY, preload=[]) as worker,
        pytest.raises(WorkerError, match="status 3 / some last words"),
    ):
        worker.ask(60)


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_a_worker_that_hangs_leaves_its_words_and_where_it_was() -> None:
    with Worker(hang, TINY, preload=[]) as worker:
        assert worker.ask(60) == "ready"
        with pytest.raises(WorkerError) as caught:
            worker.ask(2)

    words = str(caught.value).split(" / ")
    assert caught.value.timed_out
    assert words[:2] == ["no answer within 2 s", "compiling"]
    assert words[2].endswith("in hang")


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_a_worker_that_crashes_once_its_time_is_over_gave_no_answer() -> None:
    with Worker(end_late, TINY, preload=[]) as worker:
        assert worker.ask(60) == "ready"
        with pytest.raises(WorkerError, match="no answer within 1 s") as caught:
            worker.ask(1)

    assert caught.value.timed_out


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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_ends_with_the_program_that_started_it(
    number: signal.Signals, tmp_path: Path
) -> None:
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
        run.send_signal(number)
        run.wait(30)

        assert run.returncode == -number
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
    """Living processes that a program has started, and it itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own = folder.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        if int(own) == session and state != "Z":
            found.append(int(folder.name))
    return found


# ---- two checkouts ----


@pytest.mark.slow
def test_a_checkout_is_compared_with_another_one(tmp_path: Path) -> None:
    said: list[str] = []

    found = run_against(ROOT, 1, said.append, "llama-tiny")
    other = run_against(tmp_path, 0, said.append, "llama-tiny")

    cases = {it.case for it in found}
    assert {(it.case, it.subject) for it in found} == {
        (case, side) for case in cases for side in ("before", "after")
    }
    assert any("plan of llama-tiny" in case for case in cases)
    assert all(len(it.rounds_s) == 1 for it in found)
    (failed,) = (it for it in other if it.error)
    assert failed.subject == "before"
    assert "status 1" in str(failed.error)


# ---- files ----


def test_results_survive_the_file(results: Path) -> None:
    assert read_results(results) == made_up_run()
    assert [path.name for path in results.parent.iterdir()] == ["results.jsonl"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()

    with pytest.raises(OSError, match="taken"):
        write_results(made_up_run(), tmp_path / "taken")

    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        (b"", "line 1"),
        (b"{", "line 1"),
        (b"\xff\xfe", "line 1"),
        (b'{"format": "umem-bench-1"}', "line 1.*format"),
        (b"\x1f\x8b cut", "gzip"),
    ],
)
def test_a_file_without_results_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ResultsFileError, match=words):
        read_results(path)


def test_a_line_that_is_no_result_is_named(results: Path) -> None:
    lines = results.read_text().splitlines()
    results.write_text("\n".join([*lines[:2], lines[2].replace('"case"', '"cases"'), *lines[3:]]))

    with pytest.raises(ResultsFileError, match=r"line 3.*measurement\.case"):
        read_results(results)


# ---- tables and limits ----


def test_tables_of_a_made_up_run() -> None:
    times, steps, memory = tables(made_up_run())

    assert times.columns == ("case", "torch", "umem", "rmm-pool")
    assert times.rows == [(CASE, "2 [1 to 3]", "2.2 [2.1 to 2.3] 1.10x", "failed")]
    assert steps.rows == [
        (STEP, "16 [15.84 to 16.32]", "16.1 [15.94 to 16.42] 1.01x", "320 [316.8 to 326.4] 20.00x")
    ]
    assert memory.rows == [
        (STEP, "2 GiB; 9.000000", "2.12 GiB 1.06x; 9.000000 same bits", "9.000000 same bits")
    ]
    assert markdown(times).splitlines()[2:4] == [
        "| case | torch | umem | rmm-pool |", "| --- | ---: | ---: | ---: |",
    ]  # fmt: skip


def test_the_heading_names_machine_versions_and_settings() -> None:
    text = heading(made_up_run())

    for part in ("Made-up GPU", "driver 1.2", "CUDA 13.0", "torch 2.13.0",
                 "umem 0.1.0 (0123456789ab)", "policy sft", "3 rounds", "2026-01-02"):  # fmt: skip
        assert part in text


@pytest.mark.slow
def test_a_file_that_is_no_report_ends_with_one_line(tmp_path: Path) -> None:
    systems = tmp_path / "systems.jsonl"
    header = made_up_header("scale", {}).model_copy(update={"benchmark": "systems"})
    systems.write_text(header.model_dump_json())
    for path, words in ((tmp_path / "none", "cannot be read"), (systems, "matrix.py --report")):
        done = subprocess.run(
            [sys.executable, "-m", "umem_bench", "report", str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("umem: ")
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_report_prints_a_results_file(results: Path) -> None:
    plain = CliRunner().invoke(app, ["report", str(results)])
    checked = CliRunner().invoke(app, ["report", str(results), "--markdown", "--check"])
    one = CliRunner().invoke(app, ["report", str(results), "--markdown", "--tables", "training"])

    assert plain.exit_code == 0
    assert "Made-up GPU" in plain.stdout
    assert checked.exit_code == 0, checked.output
    assert f"| {CASE} | 2 [1 to 3] |" in checked.stdout
    assert checked.stdout.count("pass  ") == 4
    assert one.stdout.count("**") == 2


@pytest.mark.parametrize(
    ("missed", "detail", "measurements"),
    [
        (f"alloc: {CASE}, time", "1.210x", [alloc("torch", 1), alloc("umem", 1.21)]),
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
        (f"alloc: {CASE}", "ran out", [alloc("torch", 1), alloc("umem", error="ran out")]),
    ],
)
def test_a_missed_limit_fails(
    tmp_path: Path, missed: str, detail: str, measurements: list[Measurement]
) -> None:
    path = tmp_path / "results.jsonl"
    write_results(made_up_run(*measurements), path)

    (failed,) = (it for it in checks(made_up_run(*measurements)) if not it.passed)
    done = CliRunner().invoke(app, ["report", str(path), "--check"])

    assert failed.subject.startswith(missed)
    assert detail in failed.detail
    assert done.exit_code == 1
    assert f"FAIL  {missed}" in done.stdout


@pytest.mark.parametrize(("umem_s", "passes"), [(0.107, True), (0.109, False)])
def test_of_two_processes_with_torchs_cache_the_slower_one_counts(
    umem_s: float, passes: bool
) -> None:
    run = made_up_run(
        step("torch", 0.1, GIB), step("umem", umem_s, GIB), step("torch-again", 0.107, GIB)
    )

    times = next(it for it in checks(run) if "least of" in it.subject)

    assert times.passed is passes
    assert "which is 1.070x itself" in times.subject


def test_a_run_without_limits_fails_the_check(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    case = Measurement(benchmark="core", case="512 B", subject="umem", rounds_s=(1e-7,))
    write_results(made_up_run(case), path)

    assert CliRunner().invoke(app, ["report", str(path), "--check"]).exit_code == 1


def test_a_slower_checkout_fails_the_check() -> None:
    times_s = {"before": 1.0, "after": 1.2}
    run = made_up_run(
        *(
            Measurement(benchmark="against", case="plan", subject=side, rounds_s=(time_s,))
            for side, time_s in times_s.items()
        )
    )

    (failed,) = checks(run)

    assert failed.passed is False
    assert "1.200x" in failed.detail


# ---- the commit ----


def test_the_commit_may_be_told_where_there_is_no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umem_bench.machine._git", lambda *_: None)

    assert git_commit({}) is None
    assert git_commit({"UMEM_COMMIT": "0123456789abcdef" * 2}) == "0123456789ab"
    for wrong in ("", "main", "0123", "0123456789ab; rm"):
        with pytest.raises(UmemError, match="UMEM_COMMIT"):
            git_commit({"UMEM_COMMIT": wrong})


def test_a_checkout_knows_its_commit_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"ls-files": "machine.py", "rev-parse": "0123456789ab", "status": "M a"}
    monkeypatch.setattr("umem_bench.machine._git", lambda command, *_: said[command])

    assert git_commit({"UMEM_COMMIT": "fedcba9876543210"}) == "0123456789ab, changed"
