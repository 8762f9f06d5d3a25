"""Phases as NVTX ranges, in the threads that run them."""

from __future__ import annotations

import threading
import timeit

import pytest
import torch

from umem.telemetry import PhaseRanges, Profile, nvtx_phases
from umem.telemetry.cupti import CuptiCollector

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What torch was asked for, by thread: this one has no CUDA."""
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
    return made


def words(calls: Calls) -> list[str]:
    return [word for _, word in calls]


def test_ranges_follow_each_other_where_they_are_wanted(calls: Calls) -> None:
    ranges = PhaseRanges()
    ranges.begin("before")
    with nvtx_phases():
        ranges.begin("forward")
        ranges.begin("backward")
        ranges.end()
        ranges.end()
        ranges.begin("optimizer")
    # What was begun is ended, wanted or not.
    ranges.begin("after")
    assert words(calls) == [
        "umem phase forward",
        "pop",
        "umem phase backward",
        "pop",
        "umem phase optimizer",
        "pop",
    ]


def test_each_thread_ends_its_own(calls: Calls) -> None:
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


def test_switches_nest_and_end_with_errors(calls: Calls) -> None:
    ranges = PhaseRanges()
    with nvtx_phases():
        with pytest.raises(RuntimeError), nvtx_phases():
            raise RuntimeError
        ranges.begin("still on")
        ranges.end()
    ranges.begin("off")
    assert words(calls) == ["umem phase still on", "pop"]


def test_the_environment_switches_them_on(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMEM_NVTX", "1")
    ranges = PhaseRanges()
    ranges.begin("forward")
    ranges.end()
    monkeypatch.setenv("UMEM_NVTX", "0")
    PhaseRanges().begin("off")
    assert words(calls) == ["umem phase forward", "pop"]


def test_a_profile_switches_them_on(calls: Calls) -> None:
    ranges = PhaseRanges()
    for wanted in (False, True):
        with Profile(CuptiCollector(), required=False, nvtx=wanted) as profile:
            ranges.begin(f"wanted {wanted}")
            ranges.end()
            profile.step()
        ranges.begin("after")
    assert words(calls) == ["umem phase wanted True", "pop"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="for a torch without CUDA")
def test_a_torch_without_cuda_makes_none() -> None:
    ranges = PhaseRanges()
    with nvtx_phases():
        ranges.begin("forward")
        ranges.end()


def test_what_is_off_costs_next_to_nothing() -> None:
    ranges = PhaseRanges()
    count = 20_000
    each_s = min(timeit.repeat(lambda: ranges.begin("x"), number=count, repeat=5)) / count
    print(f"{each_s * 1e9:.0f} ns")
    assert each_s < 5e-6
