"""`umem verify` with a card and workers that are made up; `tests/gpu` has real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import umem_bench
import umem_bench.card
import umem_bench.verify
from cards import H200
from command_line import Run
from umem_bench.card import Card
from umem_bench.results import Migration
from umem_bench.verify import PAGE, RECORD, Verification

import umem.cli.verify
from umem import UmemError, load_hardware
from umem.cuda import bindings
from umem.doctor import Check, Report, Section, Status

GIB = 1 << 30
CASES = 5 + 1 + 4
"""Trainings, a generation, and trainings in managed memory."""

DIAGNOSIS = Report((Section("GPUs", (Check("GPU", Status.OK, "NVIDIA H200", ""),)),), (), (H200,))


class IdleCard(Card):
    def why_not_idle(self, patience_s: float = 0.0) -> str:
        return ""


CARD = IdleCard(pci_address="", idle_bytes=0, free_bytes=139 * GIB)


class Rates:
    """A worker that measures two rates."""

    def __init__(self, *_: object) -> None:
        self.answers = iter(
            [
                {"figure": "flops_per_s.bf16", "value": 7e14, "how": "products"},
                {"figure": "copy_to_device_bytes_per_s", "value": 5e10, "how": "copies"},
                {},
            ]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, limit_s: float) -> Any:
        return next(self.answers)


def answer(job: Any) -> dict[str, Any]:
    """What a worker answers whose losses and peaks are as they should be."""
    limit_bytes = getattr(job, "limit_bytes", getattr(job, "budget_bytes", None))
    told = {
        "state": "measured",
        "steps_s": (0.2, 0.1, 0.1),
        "losses_hex": ("0x1p+1", "0x1p+0"),
        "card_peak_bytes": GIB + (limit_bytes or 13 * GIB),
        "outside_bytes": GIB,
    }
    if getattr(job, "managed_limit_bytes", None) and job.variant != "stock":
        shares = (0.25, 0.5, 0.75) if job.method == "sft" else (0.0, 0.0, 0.0)
        told["migration"] = Migration(
            fault_batches=0,
            um_time_share=shares[0],
            um_ops_share=shares[1],
            um_bytes_share=shares[2],
            moved_bytes={"to_device": 0, "to_host": 0},
            predicted_shares=shares,
        )
    return told


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Mapping[str, Any]]], None]:
    """Takes what answers jobs."""
    detected = load_hardware("h200")

    def load(name: Any) -> Any:
        return detected if name == "detect" else load_hardware(name)

    def asks(answers: Callable[[Any], Mapping[str, Any]]) -> None:
        monkeypatch.setattr(
            umem_bench.verify, "ask_worker", lambda _, job, *its, **named: dict(answers(job))
        )

    monkeypatch.delenv("UMEM_MANAGED_LIMIT", raising=False)
    monkeypatch.setattr(umem_bench.verify, "Worker", Rates)
    monkeypatch.setattr(umem_bench.verify, "load_hardware", load)
    monkeypatch.setattr(umem_bench.verify, "compile_planner", lambda: None)
    monkeypatch.setattr(umem_bench.verify, "why_no_host_room", lambda *_: "")
    asks(answer)
    return asks


def verification(folder: Path, minutes: float = 10) -> Verification:
    said: list[str] = []
    return Verification(DIAGNOSIS, H200, CARD, folder, minutes, said.append, said.append)


def read(folder: Path) -> Any:
    return json.loads((folder / RECORD).read_text())


@pytest.mark.slow
def test_all_is_predicted_before_it_runs_and_written_down(tmp_path: Path, asked: Any) -> None:
    seen: list[tuple[bool, bool]] = []

    def answers(job: Any) -> dict[str, Any]:
        record = read(tmp_path)
        if not record["managed"]:
            row = record["rows"][-1]
            seen.append(("predicted_s" in row, "measured_s" in row))
        return answer(job)

    asked(answers)
    verification(tmp_path).run()

    assert seen[:6] == [(True, False)] * 6
    record = read(tmp_path)
    assert record["state"] == "finished"
    assert [it["measured_s"] for it in record["rows"] + record["managed"]] == [0.1] * CASES
    assert all(it["predicted_s"] > 0 for it in record["rows"])
    assert len(record["checks"]) == 8
    assert all(it["passed"] for it in record["checks"])
    assert record["hardware"]["flops_per_s.bf16"]["value"] == 7e14
    page = (tmp_path / PAGE).read_text()
    assert "| LoRA, demand paging | 100 ms | 0 / 0 / 0 % (0 / 0 / 0 %) | 1.1 % |" in page
    assert "| SFT, demand paging | 100 ms | 25 / 50 / 75 % (25 / 50 / 75 %) | 9.8 % |" in page
    assert "| flops_per_s.bf16 | 700 TFLOP/s |" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "subject"),
    [
        ({"losses_hex": ("0x1p+1", "0x1.1p+0")}, "SFT, umem: bits"),
        ({"card_peak_bytes": 9 * GIB}, "SFT, umem: budget"),
        ({"state": "failed", "reason": "RuntimeError: no"}, "SFT, umem: runs"),
    ],
)
def test_other_bits_and_a_budget_that_is_not_kept_are_wrong(
    tmp_path: Path, asked: Any, wrong: dict[str, Any], subject: str
) -> None:
    asked(lambda job: answer(job) | (wrong if job.variant == "umem" else {}))
    verification(tmp_path).run()
    failed = [it["subject"] for it in read(tmp_path)["checks"] if not it["passed"]]
    assert subject in failed
    assert not any("stock" in it for it in failed)


@pytest.mark.slow
def test_what_has_no_time_is_left_out(tmp_path: Path, asked: Any) -> None:
    verification(tmp_path, minutes=0).run()
    record = read(tmp_path)
    assert record["state"] == "finished"
    rows = record["rows"] + record["managed"]
    assert len(rows) == CASES
    assert {it["state"] for it in rows} == {"left out"}
    assert "--minutes" in (tmp_path / PAGE).read_text()


@pytest.mark.parametrize(("limit", "words"), [("64GiB", "at most 16384MiB"), ("x", "LIMIT: ")])
def test_managed_memory_beyond_what_is_safe_is_refused(
    tmp_path: Path, asked: Any, monkeypatch: pytest.MonkeyPatch, limit: str, words: str
) -> None:
    monkeypatch.setenv("UMEM_MANAGED_LIMIT", limit)
    with pytest.raises(UmemError, match=words):
        verification(tmp_path)


@pytest.mark.slow
def test_ctrl_c_ends_in_one_line_and_keeps_what_was_measured(
    tmp_path: Path, asked: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []

    def answers(job: Any) -> dict[str, Any]:
        jobs.append(job)
        if len(jobs) == 3:
            raise KeyboardInterrupt
        return answer(job)

    asked(answers)
    monkeypatch.setattr(umem.cli.verify, "collect", lambda: None, raising=False)
    monkeypatch.setattr(umem.cli.verify, "diagnose", lambda _: DIAGNOSIS, raising=False)
    monkeypatch.setattr(umem_bench.card.Card, "find", lambda: CARD)
    status, _, errors = run("verify", "--output", tmp_path)

    assert status == 130
    assert errors == f"umem: interrupted; {tmp_path / PAGE} has what was measured\n"
    record = read(tmp_path)
    assert record["state"] == "not finished"
    assert [it.get("measured_s") for it in record["rows"]] == [0.1, 0.1, None]


@pytest.mark.slow
def test_one_pool_is_told_what_runs_there(
    tmp_path: Path, asked: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(umem.cli.verify, "collect", lambda: None, raising=False)
    monkeypatch.setattr(umem.cli.verify, "diagnose", lambda _: DIAGNOSIS, raising=False)
    monkeypatch.setattr(bindings, "device_pci_address", lambda _: "0000:01:00.0")
    monkeypatch.setattr(bindings, "nvml_memory_bytes", lambda _: None)
    status, text, errors = run("verify", "--output", tmp_path)
    assert (status, text) == (2, "")
    assert "0000:01:00.0" in errors
    assert "umem hardware measure" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_without_a_gpu_a_line_says_what_to_do(tmp_path: Path, run: Run) -> None:
    status, text, errors = run("verify", "--output", tmp_path)
    assert (status, text) == (1, "")
    assert len(errors.splitlines()) == 1
    assert "umem doctor" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_is_not_the_workers(tmp_path: Path) -> None:
    """Neither while modules are imported for them, nor while one works."""
    (tmp_path / "long_import.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(3)\n"
    )
    (tmp_path / "program.py").write_text(
        """
import signal

from umem_bench.workers import Worker

signal.signal(signal.SIGINT, signal.default_int_handler)  # which workers of pytest ignore

def answers(job):
    yield 1

if __name__ == "__main__":
    try:
        with Worker(answers, None, ["long_import"]) as worker:
            worker.ask(60)
    except KeyboardInterrupt:
        print("interrupted")
"""
    )
    folders = [str(tmp_path), str(Path(umem_bench.__file__).parents[1])]
    program = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "importing\n"
    os.killpg(program.pid, signal.SIGINT)
    output, errors = program.communicate(timeout=60)
    assert (output, errors) == ("interrupted\n", "")
