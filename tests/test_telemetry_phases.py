"""Phases while they run: NVTX ranges in the threads that run them, and watchers."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from collectors import StandInCollector
from managed_training import TIGHT, Training

from umem.pages import ManagerState
from umem.telemetry import PhaseRanges, Profile, nvtx_phases
from umem.telemetry.phases import watched_phases

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls of torch's NVTX functions with their thread, for a torch without CUDA."""
    made: Calls = []

    def push(message: str) -> int:
        made.append((threading.current_thread().name, message))
        return 0

    def pop() -> int:
        made.append((threading.current_thread().name, "pop"))
        return 0

    monkeypatch.delenv("UMEM_NVTX", raising=False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nvtx.range_push", push)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", pop)
    monkeypatch.setattr("torch.cuda.nvtx.range_start", lambda _: 0)
    monkeypatch.setattr("torch.cuda.nvtx.range_end", lambda _: None)
    return made


def words(calls: Calls) -> list[str]:
    return [word for _, word in calls]


def test_ranges_are_made_inside_nvtx_phases(calls: Calls) -> None:
    ranges = PhaseRanges()
    ranges.begin("before")
    with nvtx_phases():
        ranges.begin("forward")
        ranges.begin("backward")
        ranges.end()
        ranges.end()
        ranges.begin("optimizer")
    # An open range is ended also outside of nvtx_phases.
    ranges.begin("after")
    assert words(calls) == [
        "umem phase forward",
        "pop",
        "umem phase backward",
        "pop",
        "umem phase optimizer",
        "pop",
    ]


def test_each_thread_ends_its_own_ranges(calls: Calls) -> None:
    ranges = PhaseRanges()

    def backward() -> None:
        ranges.begin("backward")
        ranges.end()

    with nvtx_phases():
        ranges.begin("forward")
        thread = threading.Thread(target=backward, name="autograd")
        thread.start()
        thread.join()
        ranges.end()
    main = threading.current_thread().name
    assert calls == [
        (main, "umem phase forward"),
        ("autograd", "umem phase backward"),
        ("autograd", "pop"),
        (main, "pop"),
    ]


def test_nvtx_phases_nest_and_end_with_errors(calls: Calls) -> None:
    ranges = PhaseRanges()
    with nvtx_phases():
        with pytest.raises(RuntimeError), nvtx_phases():
            raise RuntimeError
        ranges.begin("still on")
        ranges.end()
    ranges.begin("off")
    assert words(calls) == ["umem phase still on", "pop"]


def test_the_environment_variable_switches_ranges_on(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMEM_NVTX", "1")
    ranges = PhaseRanges()
    ranges.begin("forward")
    ranges.end()
    monkeypatch.setenv("UMEM_NVTX", "0")
    PhaseRanges().begin("off")
    assert words(calls) == ["umem phase forward", "pop"]


def test_a_profile_switches_ranges_on(calls: Calls) -> None:
    ranges = PhaseRanges()
    for wanted in (False, True):
        with Profile(StandInCollector(), nvtx=wanted) as profile:
            ranges.begin(f"wanted {wanted}")
            ranges.end()
            profile.step()
        ranges.begin("after")
    assert words(calls) == ["umem phase wanted True", "pop"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="for a torch without CUDA")
def test_a_torch_without_cuda_makes_no_ranges() -> None:
    ranges = PhaseRanges()
    with nvtx_phases():
        ranges.begin("forward")
        ranges.end()


@pytest.mark.slow
def test_a_watcher_that_fails_is_dropped_and_the_executor_runs_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stock, training = Training(), Training()
    stock.steps(12)
    manager = training.manage("planned", TIGHT)
    called: Counter[str] = Counter()

    def watcher(name: str) -> Callable[[], None]:
        def watch() -> None:
            called[name] += 1
            if name != "sound":
                raise RuntimeError(f"{name} is broken")

        return watch

    training.steps(9)
    assert manager.status().state is ManagerState.RUNNING
    with (
        caplog.at_level(logging.WARNING, logger="umem"),
        watched_phases(watcher("first")),
        watched_phases(watcher("sound")),
    ):
        training.steps(3)
    assert manager.status().state is ManagerState.RUNNING
    assert training.losses == stock.losses
    assert called["first"] == 1
    assert called["sound"] > 3
    assert len(caplog.records) == 1
    assert caplog.text.count("RuntimeError: first is broken") == 1
