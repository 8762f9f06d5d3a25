"""The executor and `umem simulate` predict the same for the same trace, budget and machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import umem_command
from managed_training import MIB, TIGHT, Training

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.hardware import Hardware, load_hardware
from umem.planning.plan_search import RUNNABLE_PLANNERS, search_plan
from umem.planning.prediction import predict, report_row
from umem.planning.running_step import with_open_blocks
from umem.policy import load_policy, resolve
from umem.trace import Trace, save_trace

BEFORE_PLANNED = 7


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("planner", RUNNABLE_PLANNERS)
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
        f"{TIGHT} B", "--hardware", "h200-pcie", "--policy", "sft", "--planner", planner,
    )  # fmt: skip
    assert status == 0
    assert json.loads(said)["results"] == [json.loads(json.dumps(report_row(predicted)))]


@pytest.fixture
def overlapping(make_trace: Callable[..., Trace]) -> Trace:
    """A step with the optimizer's parts in the backward pass; its state does not fit the budget."""
    trace = make_trace(
        {
            **dict.fromkeys("ab", (4 * MIB, TensorClass.WEIGHTS)),
            **{f"{name}.m": (64 * MIB, TensorClass.OPTIMIZER_STATE) for name in "ab"},
            **{f"{name}.grad": (4 * MIB, TensorClass.GRADIENTS, False) for name in "ab"},
        },
        [
            (1e-3, ["a", "b"], []),
            (2e-3, ["b"], ["b.grad"]),
            (3e-3, ["b", "b.m", "b.grad"], ["b", "b.m"]),
            (5e-3, ["a"], ["a.grad"]),
            (4e-3, ["a", "a.m", "a.grad"], ["a", "a.m"]),
        ],
    )
    phases = ("forward", "backward b", "optimizer b", "backward a", "optimizer a")
    return replace(trace, phase_names=phases)


def test_state_in_place_beside_the_backward_pass_costs_the_same(overlapping: Trace) -> None:
    hardware = load_hardware("h200-pcie")
    policy = resolve(load_policy("sft"), hardware.device_bytes, {"UMEM_DEVICE_BUDGET": "48 MiB"})
    (report,) = predict(
        overlapping, hardware, policy, ["planned"], runnable=True, step_in_backward=True
    )
    found = search_plan(
        with_open_blocks(overlapping), hardware, policy, "planned", overlaps_step=True
    )
    assert found.overlapped == {"b": 3}
    assert report_row(report) == report_row(found.predicted)
    assert report.moved_bytes(cause="mapped") == 4 * 64 * MIB
    free = replace(hardware, mapped_slowdown_s_per_byte=0.0, page_slowdown_s_per_byte=0.0)
    (cheaper,) = predict(
        overlapping, free, policy, ["planned"], runnable=True, step_in_backward=True
    )
    assert cheaper.step_s <= report.step_s


def test_no_training_runs_an_oracle(overlapping: Trace, machine: Hardware) -> None:
    policy = resolve(load_policy("sft"), machine.device_bytes, {})
    with pytest.raises(PlanError, match=r"'oracle'.* planned, lookahead, fault"):
        predict(overlapping, machine, policy, ["oracle"], runnable=True)
