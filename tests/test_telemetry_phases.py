"""Watchers of phases."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import pytest
from managed_training import TIGHT, Training

from umem.pages import ManagerState
from umem.telemetry.phases import watched_phases


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
