"""The executor and `umem simulate` predict the same for the same trace, budget and machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import umem_command
from managed_training import TIGHT, Training

import umem
from umem.core.classes import TensorClass
from umem.pages.plan import PLANNERS
from umem.pages.plan.running_step import with_whole_optimizer_step
from umem.predict.prediction import report_row
from umem.trace import check_trace, require_durations, save_trace

BEFORE_PLANNED = 7


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
def test_the_command_predicts_what_the_executor_predicts(
    planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    training = Training()
    manager = training.manage(planner)
    training.steps(BEFORE_PLANNED + 1)
    predicted, trace = manager.status().predicted, manager.trace
    assert predicted is not None
    assert trace is not None
    assert sum(predicted.stall_s.values()) > 0
    save_trace(trace, tmp_path / "step.npz")
    status, said, _ = umem_command(monkeypatch, capsys)(
        "simulate", "--runnable", "--json", "--trace", tmp_path / "step.npz", "--budget",
        f"{TIGHT} B", "--hardware", "h200", "--policy", "managed", "--planner", planner,
    )  # fmt: skip
    assert status == 0
    (result,) = json.loads(said)["results"]
    assert result.pop("rates") == "measured"
    assert [result] == [json.loads(json.dumps(report_row(predicted)))]


@pytest.mark.slow
def test_a_step_in_parts_is_planned_as_a_whole() -> None:
    """A recorded trace has the optimizer's step by blocks; a program's optimizer steps at once."""
    training = Training()
    with umem.record(training.model, training.optimizer, steps=1, warmup=1) as recording:
        training.steps(3)
    split = recording.trace
    whole = with_whole_optimizer_step(split)
    check_trace(whole, "whole")
    assert split.phase_names[-2:] == ("optimizer layers.3", "optimizer head")
    assert (*whole.phase_names[-2:],) == (split.phase_names[whole.phase_count - 2], "optimizer")
    assert require_durations(whole).sum() == pytest.approx(require_durations(split).sum())
    assert whole.memory_bytes.sum() == split.memory_bytes.sum()
    state = split.tensor_class == TensorClass.OPTIMIZER_STATE.number
    used = whole.access_tensor[whole.access_start[-2] :]
    assert set(np.flatnonzero(state)) <= set(used.tolist())
    assert len(used) == len(set(used.tolist()))
    assert with_whole_optimizer_step(whole) is whole
