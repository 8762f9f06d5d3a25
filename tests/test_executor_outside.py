"""Plans beside memory of the process that is no part of the step."""

from __future__ import annotations

import pytest
from managed_training import MIB, Training, both, program_of

from umem.capture.live import StepRecording
from umem.executor import ManagerState

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_plan_leaves_room_for_other_memory_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepRecording, "outside_bytes", 10 * MIB)
    _, manager = both(lambda it: it.steps(10), budget_bytes=48 * MIB)
    assert manager.status().budget_bytes == 48 * MIB
    timeline = program_of(manager).candidate.predicted.timeline
    assert timeline is not None
    assert 20 * MIB < timeline.resident_bytes.sum(axis=1).max() <= 38 * MIB


@pytest.mark.parametrize(
    ("budget_bytes", "said"),
    [
        (61 * MIB, "(that is the budget of 61 MiB less 60 MiB that other tensors of the process"),
        (60 * MIB, "the device budget is 60 MiB, and 60 MiB of other tensors of the process"),
        (48 * MIB, "the device budget is 48 MiB, and 60 MiB of other tensors of the process"),
    ],
)
def test_the_reason_names_other_memory_that_leaves_too_little(
    budget_bytes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepRecording, "outside_bytes", 60 * MIB)
    training = Training()
    manager = training.manage(budget_bytes=budget_bytes)
    training.steps(10)
    assert manager.status().state is ManagerState.OFF
    assert said in manager.status().reason
    assert "raise the budget" in manager.status().reason
