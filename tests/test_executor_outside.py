"""Plans beside what else is on the device."""

from __future__ import annotations

import pytest
from managed_training import MIB, Training, both

from umem.executor import ManagerState
from umem.recorder import StepRecording

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_plan_leaves_room_for_what_is_on_the_device_beside_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepRecording, "outside_bytes", 10 * MIB)
    _, manager = both(lambda it: it.steps(10), budget_bytes=48 * MIB)
    assert manager.status().budget_bytes == 48 * MIB
    program = manager._runner.program
    assert program is not None
    timeline = program.choice.predicted.timeline
    assert timeline is not None
    assert 20 * MIB < timeline.resident_bytes.sum(axis=1).max() <= 38 * MIB


def test_where_the_rest_of_the_process_leaves_too_little_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepRecording, "outside_bytes", 60 * MIB)
    training = Training()
    manager = training.manage()
    training.steps(10)
    assert manager.status().state is ManagerState.OFF
    assert "the budget less 60 MiB that other tensors of the process" in manager.status().reason
