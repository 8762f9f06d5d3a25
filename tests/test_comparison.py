"""Predicted against measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_files import predicted

from umem.core.classes import TensorClass
from umem.core.report import MeasuredReport, Traffic
from umem.hardware import load_hardware
from umem.policy import load_policy, resolve
from umem.predict.prediction import predict, report_row
from umem.telemetry.comparison import (
    Difference,
    compare,
    comparison_row,
    comparison_table,
    figures_of,
    read_predictions,
)
from umem.trace import Trace, load_trace

MIB = 1 << 20
WEIGHTS, STATE = TensorClass.WEIGHTS, TensorClass.OPTIMIZER_STATE


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Sixteen layers of 64 MiB, which half of the budget below holds."""
    tensors = [
        {"id": n, "bytes": 64 * MIB, "class": "weights", "persistent": True} for n in range(16)
    ]
    phases = [
        {"name": f"forward {n}", "duration_us": 4000, "reads": [n], "writes": []} for n in range(16)
    ]
    path = tmp_path_factory.mktemp("trace") / "step.json"
    path.write_text(
        json.dumps(
            {"format": "umem-trace/1", "name": "layers", "tensors": tensors, "phases": phases}
        )
    )
    return load_trace(path)


def measured(**changes: Any) -> MeasuredReport:
    made = MeasuredReport(
        workload="train",
        hardware="NVIDIA H200",
        policy="sft",
        planner="measured",
        step_s=0.2,
        traffic=(
            Traffic("to_device", "hint", WEIGHTS, 60 * MIB, 0.01, 30),
            Traffic("to_device", "fault", WEIGHTS, 6 * MIB, 0.01, 96),
            Traffic("to_device", "speculation", STATE, 2 * MIB, 0.01, 1),
            Traffic("to_host", "eviction", STATE, 8 * MIB, 0.01, 4),
            Traffic("between_devices", "hint", STATE, 8 * MIB, 0.01, 4),
        ),
        memory_ops_s=0.01,
        memory_ops_bytes=4 * MIB,
        memory_ops_count=5,
        fault_batches=100,
        collected=True,
        step_count=3,
        gpu_faults=120,
        cpu_faults=0,
        unattributed_bytes=0,
        notes=(),
        ideal_s=0.15,
    )
    return replace(made, **changes)


def test_figures_are_compared() -> None:
    found = compare(predicted(), measured())
    assert found["step_s"] == Difference("step_s", 0.16, 0.2)
    assert found["step_s"].absolute == pytest.approx(0.04)
    assert found["step_s"].relative == pytest.approx(0.25)
    assert found["exposed_stall_s"].absolute == pytest.approx(0.05 - 0.02)
    assert found["um_time_share"].predicted == pytest.approx(0.02 / 0.04)
    assert found["um_time_share"].measured == pytest.approx(0.05 / 0.06)
    # Memory used in place and copies by a kernel are nothing that a profiler shows.
    assert found["to_device"] == Difference("to_device", 64 * MIB, 68 * MIB)
    assert found["to_host"] == Difference("to_host", 8 * MIB, 8 * MIB)
    assert found["to_device.weights"].absolute == 2 * MIB
    assert found["to_device.optimizer_state"].measured == 2 * MIB
    assert found["hinted_to_device"] == Difference("hinted_to_device", 64 * MIB, 60 * MIB)
    assert found["hinted_to_host"] == Difference("hinted_to_host", 8 * MIB, 0)
    assert found["hinted_to_host"].relative == -1.0
    # What faults brought, the driver's speculation included.
    assert found["fault_bytes"] == Difference("fault_bytes", 0, 8 * MIB)
    assert found["fault_bytes"].relative is None
    assert [it.name for it in found.differences() if "." in it.name] == [
        "to_device.weights",
        "to_device.optimizer_state",
        "to_host.optimizer_state",
    ]


def test_zero_against_zero_is_no_difference() -> None:
    nothing = Difference("fault_batches", 0, 0)
    assert (nothing.absolute, nothing.relative) == (0, 0.0)
    unknown = Difference("fault_batches", 0, None)
    assert (unknown.absolute, unknown.relative) == (None, None)


def test_shares_are_unknown_without_copies() -> None:
    report = measured(source="driver_only")
    values = figures_of(report).values
    unknown = {name for name, value in values.items() if value is None}
    assert unknown == {"um_time_share", "um_ops_share", "um_bytes_share"}
    assert values["to_device"] == 68 * MIB


def test_figures_that_were_not_recorded_are_unknown() -> None:
    report = measured(collected=False, source="none", traffic=(), ideal_s=None)
    assert math.isnan(report.um_time_share)
    values = figures_of(report).values
    assert {name for name, value in values.items() if value is not None} == {"step_s"}
    # The hint engine's own counts say what was hinted, and no more.
    report = measured(collected=False, source="hints")
    values = figures_of(report).values
    assert {name: value for name, value in values.items() if value is not None} == {
        "step_s": 0.2,
        "exposed_stall_s": pytest.approx(0.05),
        "hinted_to_device": 60 * MIB,
        "hinted_to_host": 0,
    }


def test_markdown_table() -> None:
    comparison = compare(predicted(workload="a|b\n*c"), measured())
    table = comparison_table([comparison, compare(predicted(), measured(ideal_s=None))])
    first, second = table.split("\n\n**")
    lines = first.splitlines()
    assert lines[0] == (
        "**train on NVIDIA H200, policy sft, against a?b??c on h200-pcie, policy sft, planner "
        "planned**"
    )
    assert "| step | 160 ms | 200 ms | +40 ms | +25.0 % |" in lines
    assert "| to device | 64 MiB | 68 MiB | +4 MiB | +6.2 % |" in lines
    assert "| hinted to host | 8 MiB | 0 B | -8 MiB | -100.0 % |" in lines
    assert "| fault batches | 0 | 100 | +100 |  |" in lines
    assert "| UM ops share | 50.00 % | 96.43 % | +46.43 % | +92.9 % |" in lines
    assert "| exposed stall | 20 ms | unknown |  |  |" in second
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_json_row() -> None:
    row = comparison_row(compare(predicted(), measured(collected=False, source="none")))
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["predicted"]["planner"] == "planned"
    assert row["figures"]["um_time_share"] == {
        "unit": "share",
        "predicted": 0.5,
        "measured": None,
        "absolute": None,
        "relative": None,
    }
    assert "to_host.weights" not in row["figures"]


def test_predictions_of_umem_simulate_are_read(tmp_path: Path, trace: Trace) -> None:
    hardware = load_hardware("h200-pcie")
    policy = resolve(load_policy({"device_budget": "512MiB"}), hardware, {})
    reports = predict(trace, hardware, policy, ["fault", "planned"])
    assert reports[0].moved_bytes() > 0
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps({"results": [report_row(report) for report in reports]}))
    for read, report in zip(read_predictions(path), reports, strict=True):
        expected = figures_of(report)
        assert (read.workload, read.planner) == (report.workload, report.planner)
        assert dict(read.values) == pytest.approx(dict(expected.values))


@pytest.mark.slow
def test_importing_it_loads_no_heavy_library() -> None:
    code = (
        "import sys, umem.telemetry.comparison; "
        "print(sorted({'torch', 'numba', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
