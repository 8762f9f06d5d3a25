"""Benchmarks: what a run leaves behind, its tables and its targets. The figures here are made up,
except those of the native core, which is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import MADE_UP_MACHINE
from typer.testing import CliRunner
from umem_bench._timing import loops_for, time_loops_s
from umem_bench.cli.commands import app
from umem_bench.report import checks, grids, heading, markdown
from umem_bench.results import AllocatorName, Measurement, Run, Settings, read_run, write_run
from umem_bench.results_file import ResultsFileError
from umem_bench.runner import worker_managed_limit_bytes

from umem.core.errors import PolicyError

GIB = 1 << 30
CASE = "1 MiB, 1 thread"
STEP = "SFT, small"


def made_up_step(
    allocator: AllocatorName, step_s: float, reserved_bytes: int | None
) -> Measurement:
    return Measurement(
        benchmark="step",
        case=STEP,
        allocator=allocator,
        rounds_s=(step_s * 0.99, step_s, step_s * 1.02),
        peak_reserved_bytes=reserved_bytes,
        peak_allocated_bytes=None if reserved_bytes is None else reserved_bytes - GIB // 2,
        loss_hex=(9.0).hex(),
    )


def made_up_run(*measurements: Measurement) -> Run:
    """No machine has this GPU."""
    if not measurements:
        measurements = (
            Measurement(
                benchmark="alloc", case=CASE, allocator="torch", rounds_s=(1e-6, 2e-6, 3e-6)
            ),
            Measurement(
                benchmark="alloc", case=CASE, allocator="umem", rounds_s=(2.1e-6, 2.2e-6, 2.3e-6)
            ),
            Measurement(benchmark="alloc", case=CASE, allocator="rmm-pool", error="not installed"),
            made_up_step("torch", 0.016, 2 * GIB),
            made_up_step("umem", 0.0163, 2 * GIB + GIB // 8),
            made_up_step("rmm-managed", 0.32, None),
        )
    return Run(
        date="2026-01-02T03:04:05+00:00",
        git_commit="0123456789ab",
        machine=MADE_UP_MACHINE,
        settings=Settings(policy="sft", rounds=3, quick=False, worker_managed_limit_bytes=5 * GIB),
        measurements=measurements,
    )


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    write_run(made_up_run(), path)
    return path


def without_gpu() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "UMEM_MANAGED_LIMIT": "1GiB"}


def test_core_measures_and_writes_what_the_schema_says(tmp_path: Path) -> None:
    path = tmp_path / "new" / "core.json"
    words = ["core", "--quick", "--rounds", "2", "--output", str(path)]

    done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    assert set(content) == {
        "format", "date", "git_commit", "machine", "settings", "measurements"
    }  # fmt: skip
    assert content["machine"]["umem"]
    assert content["machine"]["torch"]
    assert content["settings"]["policy"] == "sft"
    run = read_run(path)
    times = {it.case: it.rounds_s for it in run.measurements}
    assert len(times) == len(run.measurements) == 8
    assert all(len(rounds_s) == 2 for rounds_s in times.values())
    # Two calls that do something take longer than one that does nothing.
    empty_call_s = min(times.pop("an empty call, of which a pair makes two"))
    assert all(empty_call_s < min(rounds_s) < 1e-3 for rounds_s in times.values())
    assert "random sizes, 8 threads" in done.stdout


def test_worker_that_fails_says_why_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "alloc.json"
    command = "from umem_bench.cli.commands import app; app()"
    words = ["alloc", "--quick", "--allocators", "torch", "--output", str(path)]

    done = subprocess.run(
        [sys.executable, "-c", command, *words],
        capture_output=True,
        text=True,
        check=False,
        env=without_gpu(),
    )

    assert done.returncode == 1
    assert "alloc: torch failed: UnsupportedError: torch sees no usable GPU" in done.stderr
    run = read_run(path)
    assert len(run.measurements) == 6
    assert all("umem doctor" in str(it.error) for it in run.measurements)
    assert not any(it.rounds_s for it in run.measurements)


def test_tables_of_a_made_up_run() -> None:
    times, steps, memory = grids(made_up_run())

    assert times.columns == ("case", "torch", "umem", "rmm-pool")
    assert times.rows == ((CASE, "2 [1 to 3]", "2.2 [2.1 to 2.3] 1.10x", "failed"),)
    assert steps.columns == ("case", "torch", "umem", "rmm-managed")
    assert steps.rows == (
        (
            STEP,
            "16 [15.84 to 16.32]",
            "16.3 [16.14 to 16.63] 1.02x",
            "320 [316.8 to 326.4] 20.00x",
        ),
    )
    assert memory.rows == (
        (f"{STEP}: peak allocated", "1.5 GiB", "1.62 GiB", "—"),
        (f"{STEP}: peak reserved", "2 GiB", "2.12 GiB 1.06x", "—"),
        (f"{STEP}: loss", "9.000000", "9.000000 same bits", "9.000000 same bits"),
    )


def test_heading_names_the_machine_and_the_versions() -> None:
    text = heading(made_up_run())

    for part in ("Made-up GPU", "driver 1.2", "CUDA 13.0", "torch 2.13.0", "rmm 26.10.0",
                 "umem 0.1.0 (0123456789ab)", "policy sft", "3 rounds", "2026-01-02"):  # fmt: skip
        assert part in text


def test_markdown_is_a_table() -> None:
    lines = markdown(next(grids(made_up_run()))).splitlines()

    assert lines[2:] == [
        "| case | torch | umem | rmm-pool |",
        "| --- | ---: | ---: | ---: |",
        f"| {CASE} | 2 [1 to 3] | 2.2 [2.1 to 2.3] 1.10x | failed |",
    ]


def test_report_prints_a_results_file(results: Path) -> None:
    plain = CliRunner().invoke(app, ["report", str(results)])
    as_markdown = CliRunner().invoke(app, ["report", str(results), "--markdown", "--check"])

    assert plain.exit_code == 0
    assert "Made-up GPU" in plain.stdout
    assert as_markdown.exit_code == 0
    assert f"| {CASE} | 2 [1 to 3] |" in as_markdown.stdout
    assert as_markdown.stdout.count("pass  ") == 4
    assert "pass  alloc: 1 MiB, 1 thread, time: 1.100x torch, at most 1.2x" in as_markdown.stdout


@pytest.mark.parametrize(
    ("missed", "detail", "measurements"),
    [
        (
            f"alloc: {CASE}, time",
            "1.210x",
            [
                Measurement(benchmark="alloc", case=CASE, allocator="torch", rounds_s=(1e-6,)),
                Measurement(benchmark="alloc", case=CASE, allocator="umem", rounds_s=(1.21e-6,)),
            ],
        ),
        (
            f"step: {STEP}, time",
            "1.040x",
            [made_up_step("torch", 0.1, GIB), made_up_step("umem", 0.104, GIB)],
        ),
        (
            f"step: {STEP}, peak reserved",
            "1.125x",
            [made_up_step("torch", 0.1, 2 * GIB), made_up_step("umem", 0.1, 2 * GIB + GIB // 4)],
        ),
        (
            f"step: {STEP}, peak reserved",
            "not measured",
            [made_up_step("torch", 0.1, GIB), made_up_step("umem", 0.1, None)],
        ),
        (
            f"step: {STEP}, loss to the last bit",
            "umem 0x1.0",
            [
                made_up_step("torch", 0.1, GIB),
                made_up_step("umem", 0.1, GIB).model_copy(update={"loss_hex": (8.0).hex()}),
            ],
        ),
        (f"step: {STEP}", "needs both torch and umem", [made_up_step("umem", 0.1, GIB)]),
        (
            f"step: {STEP}",
            "ran out",
            [
                made_up_step("torch", 0.1, GIB),
                Measurement(benchmark="step", case=STEP, allocator="umem", error="ran out"),
            ],
        ),
    ],
)
def test_a_missed_target_fails(
    tmp_path: Path, missed: str, detail: str, measurements: list[Measurement]
) -> None:
    run = made_up_run(*measurements)
    path = tmp_path / "results.json"
    write_run(run, path)

    failed = [check for check in checks(run) if not check.passed]
    done = CliRunner().invoke(app, ["report", str(path), "--check"])

    assert [check.subject for check in failed] == [missed]
    assert detail in failed[0].detail
    assert done.exit_code == 1
    assert f"FAIL  {missed}: " in done.stdout


def test_targets_of_a_run_without_any_fail(tmp_path: Path) -> None:
    path = tmp_path / "core.json"
    case = Measurement(benchmark="core", case="512 B", allocator="umem", rounds_s=(1e-7,))
    write_run(made_up_run(case), path)

    assert CliRunner().invoke(app, ["report", str(path), "--check"]).exit_code == 1


def test_results_survive_the_file(results: Path) -> None:
    assert read_run(results) == made_up_run()
    assert [path.name for path in results.parent.iterdir()] == ["results.json"]


def test_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()

    with pytest.raises(OSError, match="taken"):
        write_run(made_up_run(), tmp_path / "taken")

    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        (b"{", "not a file of `umem bench --output`: the file"),
        (b"\xff\xfe", "not a file of `umem bench --output`: the file"),
        (b'{"format": "umem-bench-0"}', "not a file of `umem bench --output`: format"),
        (b"\x1f\x8b cut", r"cannot be read \(.*gzip"),
    ],
)
def test_file_without_results(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ResultsFileError, match=message):
        read_run(path)


@pytest.mark.parametrize("option", ["--allocators=torch,jemalloc", "--size=huge", "--rounds=0"])
def test_unknown_choices_end_with_status_2(option: str) -> None:
    assert CliRunner().invoke(app, ["step", option]).exit_code == 2


def test_workers_share_less_than_16_gib_of_managed_memory() -> None:
    everyone: tuple[AllocatorName, ...] = ("torch", "umem", "rmm-pool", "rmm-managed")

    assert worker_managed_limit_bytes(everyone, {}) == 5 * GIB
    assert worker_managed_limit_bytes(("torch", "umem"), {}) == 8 * GIB
    assert (
        worker_managed_limit_bytes(("torch", "umem"), {"UMEM_MANAGED_LIMIT": "64GiB"}) == 15 * GIB
    )
    assert worker_managed_limit_bytes(everyone, {"UMEM_MANAGED_LIMIT": "2GiB"}) == 2 * GIB
    with pytest.raises(PolicyError, match="UMEM_MANAGED_LIMIT"):
        worker_managed_limit_bytes(everyone, {"UMEM_MANAGED_LIMIT": "much"})


@pytest.mark.parametrize("threads", [1, 4])
def test_timing_counts_every_pass(threads: int) -> None:
    given: list[int] = []

    pass_s = time_loops_s(given.append, 40, threads)

    assert given == [40 // threads] * threads
    assert pass_s > 0


def test_timing_lets_errors_of_threads_out() -> None:
    def loop(passes: int) -> None:
        raise MemoryError("full")

    with pytest.raises(MemoryError, match="full"):
        time_loops_s(loop, 8, threads=2)


def test_loops_fill_the_time_asked_for() -> None:
    def loop(passes: int) -> None:
        for _ in range(passes * 1000):
            pass

    loops = loops_for(loop, 0.05)

    assert 0.005 < time_loops_s(loop, loops) * loops < 0.5
