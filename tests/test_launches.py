"""Launches of updates: what they take, and whether the device waits for them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from umem.capture.live.timing import Clock
from umem.streaming.tune.launches import Launches


class DryClock(Clock):
    """A device that is done with all work at some of its marks."""

    def __init__(self) -> None:
        self.is_dry = True
        self.is_captured = False
        self.released = 0

    def is_usable(self) -> bool:
        return not self.is_captured

    def has_run_dry(self, mark: Any) -> bool:
        return self.is_dry

    def release(self, marks: Any) -> None:
        self.released += len(marks)


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def launch(launches: Launches, now_s: list[float], took_s: float, pieces: int = 4) -> float:
    launches.begin()
    now_s[0] += took_s
    launches.end(pieces)
    return launches.waited_s


def test_a_piece_takes_what_it_took_in_the_step_that_nothing_held_up(now_s: list[float]) -> None:
    clock = DryClock()
    launches = Launches(clock)
    assert launches.waited_s == 0.0
    assert launch(launches, now_s, 0.002) == pytest.approx(0.0005)
    assert launch(launches, now_s, 0.001) == pytest.approx(0.00025)
    assert launch(launches, now_s, 0.003) == pytest.approx(0.00025)
    assert clock.released == 3
    for _ in range(4):  # the latest count
        found = launch(launches, now_s, 0.003)
    assert found == pytest.approx(0.00075)


def test_memory_that_is_locked_meanwhile_is_no_launch(now_s: list[float]) -> None:
    assert launch(Launches(DryClock()), now_s, 10.0) == pytest.approx(1e-3)


def test_launches_ahead_of_the_device_take_no_time(now_s: list[float]) -> None:
    clock = DryClock()
    launches = Launches(clock)
    for is_dry, expected_s in ((False, 0), (True, 0), (True, 0.001), (False, 0), (True, 0.001)):
        clock.is_dry = is_dry
        found = launch(launches, now_s, 0.004)
        assert found == pytest.approx(expected_s), launches


def test_where_nothing_is_launched_or_all_is_captured_nothing_counts(
    now_s: list[float],
) -> None:
    clock = DryClock()
    launches = Launches(clock)
    assert launch(launches, now_s, 0.002, pieces=0) == 0.0
    clock.is_captured = True
    assert launch(launches, now_s, 0.002) == 0.0
    launches.begin()
    clock.is_captured = False
    launches.end(4)
    assert launches.waited_s == 0.0


def test_the_processor_is_never_waited_for_where_it_computes() -> None:
    launches = Launches(Clock())
    for _ in range(4):
        launches.begin()
        launches.end(4)
    assert launches.waited_s == 0.0
