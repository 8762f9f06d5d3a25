"""Processes under umem: enabling, forks, workers, and ends of every sort without a last word."""

from __future__ import annotations

import signal
from typing import NamedTuple

import pytest
from gpu_jobs import Job, Start

import umem


class Ending(NamedTuple):
    """How a process must end."""

    status: int
    stdout: str
    last_error_line: str = ""


ENDINGS = {
    "live_tensors": Ending(0, "done\n"),
    "live_graph": Ending(0, "done\n"),
    "exception": Ending(1, "", "ValueError: stop here"),
    "exit_in_a_class": Ending(3, ""),
    "thread_with_tensors": Ending(0, "done\n"),
    "gpu_unused": Ending(0, "done\n"),
    "fork_then_exit": Ending(0, "done\n"),
    "fork_then_hard_exit": Ending(0, "done\n"),
    "loader_fork": Ending(0, "done\n"),
    "loader_spawn": Ending(0, "done\n"),
}


@pytest.fixture(scope="module")
def jobs(start: Start) -> dict[str, Job]:
    """All at once."""
    jobs = {mode: start("lifecycle.py", mode) for mode in (*ENDINGS, "interrupt")}
    jobs["late"] = start("enabling.py")
    return jobs


@pytest.mark.parametrize("mode", ENDINGS)
def test_ends_cleanly(mode: str, jobs: dict[str, Job]) -> None:
    done, expected = jobs[mode].finish(), ENDINGS[mode]
    shown = f"{mode} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == expected.status, shown
    assert done.stdout == expected.stdout, shown
    if not expected.last_error_line:
        assert done.stderr == ""
        return
    # The traceback, and nothing after it: no "terminate called", no leak report.
    assert done.stderr.startswith("Traceback (most recent call last):"), shown
    assert done.stderr.splitlines()[-1] == expected.last_error_line, shown


def test_interrupted_training(jobs: dict[str, Job]) -> None:
    job = jobs["interrupt"]
    assert job.process.stdout is not None
    assert job.process.stdout.readline() == "ready\n", job.finish().stderr
    job.process.send_signal(signal.SIGINT)
    done = job.finish()
    # Python reports 1 where the interrupt came inside a call into torch, stock or not.
    assert done.returncode in (-signal.SIGINT, 1), done.stderr
    assert done.stderr.startswith("Traceback (most recent call last):"), done.stderr
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt", done.stderr


def test_too_late(jobs: dict[str, Job]) -> None:
    facts = jobs["late"].facts()
    assert "too late" in facts["error"]
    assert "umem run" in facts["error"]
    assert facts["fallback"] is False
    [warning] = facts["warnings"]
    assert warning.startswith("RuntimeWarning: umem is not in use")
    assert "too late" in warning
    assert facts["enabled"] is False
    assert facts["stock_allocated"] >= facts["stock_bytes"] == 4 << 20
    assert "too late" in facts["tensors"]


def test_twice() -> None:
    assert umem.is_enabled()
    with pytest.raises(umem.EnableError, match=r"enabled already, with policy 'managed'.*once"):
        umem.enable("lora")
    with pytest.raises(umem.EnableError, match="enabled already"):
        umem.enable("lora", fallback=True)


def test_unknown_policy() -> None:
    with pytest.raises(umem.PolicyError, match="sft"):
        umem.enable("stf")
