"""From records to reports: totals, shares, the typical step, and rows."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from made_up_reports import made_up_report
from recordings import make_recording

from umem.core.classes import TensorClass
from umem.predict.prediction import report_row
from umem.telemetry import MeasuredRun, measured_row, run_of

WEIGHTS = TensorClass.WEIGHTS.number
STATE = TensorClass.OPTIMIZER_STATE.number

TO_DEVICE, TO_HOST, BETWEEN, GPU_FAULT, CPU_FAULT, MEMCPY, MEMSET = range(7)
HINT, FAULT = 1, 2


def recording(
    rows: list[tuple[Any, ...]], steps: list[tuple[int, int]], **changes: Any
) -> MeasuredRun:
    """Of rows (kind, start, end, bytes, faults, cause, class, name)."""
    names = ("layer.weight", "layer.weight.exp_avg")
    made = make_recording(
        [
            (kind, start, end, 0, size, faults, cause)
            for kind, start, end, size, faults, cause, _, _ in rows
        ],
        [(row[6], row[7]) for row in rows],
        steps,
        **{"tensor_names": names, "duration_ns": 10_000, **changes},
    )
    return run_of(made)


ROWS: list[tuple[Any, ...]] = [
    (TO_DEVICE, 0, 100, 4096, 0, FAULT, WEIGHTS, 0),
    (TO_DEVICE, 100, 300, 8192, 0, HINT, STATE, 1),
    (GPU_FAULT, 110, 120, 0, 3, 0, WEIGHTS, 0),
    (GPU_FAULT, 130, 140, 0, 1, 0, WEIGHTS, 0),
    (MEMCPY, 400, 500, 1000, 0, 0, -1, -1),
    (MEMSET, 500, 600, 24, 0, 0, -1, -1),
    (TO_HOST, 999, 1499, 2048, 0, HINT, -1, -1),  # begins in the first step, ends in the second
    (CPU_FAULT, 1000, 1000, 0, 1, 0, STATE, 1),
    (TO_DEVICE, 1500, 1600, 1024, 0, FAULT, WEIGHTS, 0),
    (TO_HOST, 5000, 6000, 1 << 20, 0, HINT, STATE, 1),  # after the last step
]
STEPS = [(0, 1000), (1000, 2000)]


def test_a_record_belongs_to_the_step_in_which_it_starts() -> None:
    first, second = recording(ROWS, STEPS).steps
    assert first.step_s == pytest.approx(1e-6)
    assert {(it.direction, it.cause, it.tensor_class.value, it.bytes) for it in first.traffic} == {
        ("to_device", "fault", "weights", 4096),
        ("to_device", "hint", "optimizer_state", 8192),
        ("to_host", "hint", "other", 2048),
    }
    assert first.unattributed_bytes == 2048
    assert (first.fault_batches, first.gpu_faults, first.cpu_faults) == (2, 4, 0)
    assert (first.memory_ops_bytes, first.memory_ops_count) == (1024, 2)
    assert first.memory_ops_s == pytest.approx(200e-9)
    assert second.moved_bytes() == 1024
    assert (second.fault_batches, second.cpu_faults) == (0, 1)


def test_a_transfer_in_parts_counts_once() -> None:
    rows: list[tuple[Any, ...]] = [
        (TO_DEVICE, 0, 63, 2560, 0, FAULT, WEIGHTS, 0),
        (TO_DEVICE, 0, 25, 1024, 0, FAULT, STATE, 1),
        (TO_DEVICE, 0, 12, 512, 0, FAULT, -1, -1),
        (TO_HOST, 999, 1243, 1000, 0, HINT, WEIGHTS, 0),
    ]
    run = recording(rows, [(0, 1000)], parts=(1, 2))
    (step,) = run.steps
    found = {
        f"{it.direction} {it.cause} {it.tensor_class.value}": (
            it.bytes,
            it.count,
            round(it.seconds * 1e9),
        )
        for it in step.traffic
    }
    assert found == {
        "to_device fault weights": (2560, 1, 63),
        "to_device fault optimizer_state": (1024, 0, 25),
        "to_device fault other": (512, 0, 12),
        "to_host hint weights": (1000, 1, 244),
    }
    assert step.unattributed_bytes == 512
    weight, state = sorted(run.tensors, key=lambda it: it.name)
    assert (weight.bytes, weight.count) == (2560 + 1000, 2)
    assert (state.bytes, state.count) == (1024, 1)


def test_shares_are_of_all_memory_operations() -> None:
    first, second = recording(ROWS, STEPS).steps
    assert first.um_time_share == pytest.approx(800 / (800 + 200))
    assert first.um_ops_share == pytest.approx(3 / 5)
    assert first.um_bytes_share == pytest.approx(14336 / (14336 + 1024))
    assert second.um_time_share == 1.0
    assert recording([], STEPS).steps[0].um_time_share == 0.0


def test_without_steps_the_whole_recording_is_reported() -> None:
    report = recording(ROWS, []).typical
    assert report.step_count == 0
    assert report.step_s == pytest.approx(10e-6)
    assert report.moved_bytes("to_host") == 2048 + (1 << 20)
    assert report.moved_bytes() == sum(row[3] for row in ROWS if row[0] <= BETWEEN)


@pytest.mark.parametrize(
    ("times_ns", "typical"),
    [((900, 700, 800), 2), ((900, 700, 800, 600), 1), ((500, 500, 500), 1), ((800, 700), 1)],
)
def test_the_typical_step_has_the_median_time(times_ns: tuple[int, ...], typical: int) -> None:
    rng = np.random.default_rng(5)
    rows, steps = [], []
    for step, time_ns in enumerate(times_ns):
        steps.append((step * 1000, step * 1000 + time_ns))
        for _ in range(int(rng.integers(5, 30))):
            start = step * 1000 + int(rng.integers(0, time_ns))
            kind, size = int(rng.integers(0, 7)), int(rng.integers(1, 1000))
            end = start + int(rng.integers(0, 90))
            cause, of_class = int(rng.integers(0, 6)), int(rng.integers(-1, 6))
            rows.append((kind, start, end, size, 1, cause, of_class, -1))
    made = recording(rows, steps)
    found, reports = made.typical, made.steps
    assert found.step_count == len(times_ns)
    for field in fields(found):
        if field.name != "step_count":
            assert getattr(found, field.name) == getattr(reports[typical], field.name)
    # All steps together have all bytes.
    inside = [row for row in rows if row[0] <= BETWEEN]
    assert sum(it.moved_bytes() for it in reports) == sum(row[3] for row in inside)


def test_the_typical_step_is_one_that_occurred() -> None:
    """The medians of single figures would all be 0."""
    rows = [(TO_DEVICE, 1000 * it, 1000 * it + 9, 1 << 20, 0, 2 + it, 0, -1) for it in range(3)]
    typical = recording(rows, [(1000 * it, 1000 * it + 900) for it in range(3)]).typical
    assert typical.moved_bytes() == 1 << 20
    assert typical.um_bytes_share == 1.0


def test_sums_of_large_transfers_are_exact() -> None:
    rows = [(TO_DEVICE, 0, 1, 2**53 + 1, 0, HINT, WEIGHTS, 0)] * 3
    assert recording(rows, []).typical.moved_bytes() == 3 * (2**53 + 1)


def test_tensors_by_bytes_moved() -> None:
    most, least = recording(ROWS, STEPS).tensors
    assert (most.name, most.bytes, most.count) == ("layer.weight.exp_avg", 8192, 1)
    assert most.tensor_class is TensorClass.OPTIMIZER_STATE
    assert (least.name, least.bytes, least.count) == ("layer.weight", 4096 + 1024, 2)
    # Without steps the whole recording counts.
    assert recording(ROWS, []).tensors[0].bytes == 8192 + (1 << 20)


def test_rows_have_the_keys_of_predictions() -> None:
    row = measured_row(recording(ROWS, [(0, 1000), (1000, 1999)]))
    assert set(report_row(made_up_report())) <= set(row)
    assert row["planner"] == "measured"
    assert row["lower_bound_s"] is None
    assert row["bytes"] == {"to_device": {"fault": {"weights": 1024}}}
    assert [step["fault_batches"] for step in row["per_step"]] == [2, 0]
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert measured_row(recording(ROWS, []))["per_step"] == []


def test_what_was_not_recorded_is_not_zero() -> None:
    row = measured_row(recording([], STEPS, source="none"))
    assert row["step_s"] == pytest.approx(1e-6)
    assert row["um_time_share"] is None
    assert row["fault_batches"] is None
    assert row["bytes"] is None
    assert row["per_step"][0]["moved_bytes"] is None


def test_a_prediction_is_not_below_its_bounds_by_rounding() -> None:
    """Sums of the same times in different orders: 0.6 and 0.6000000000000001."""
    there, back = sum([0.1, 0.2, 0.3]), sum([0.3, 0.2, 0.1])
    assert back < there
    for step_s, floor_s in ((back, there), (there, back)):
        report = made_up_report(step_s=step_s, ideal_s=floor_s, lower_bound_s=floor_s)
        assert (report.regret, report.exposed_stall_s) == (1.0, 0.0)
    longer = made_up_report(step_s=3.0, ideal_s=1.0, lower_bound_s=2.0)
    assert (longer.regret, longer.exposed_stall_s) == (1.5, 2.0)


def test_exposed_stall_needs_an_ideal_time() -> None:
    report = recording(ROWS, STEPS).typical
    assert (report.ideal_s, report.exposed_stall_s, report.exposed_stall_share) == (None,) * 3
    assert measured_row(recording(ROWS, STEPS))["exposed_stall_s"] is None
    known = recording(ROWS, STEPS, ideal_s=0.6e-6)
    report = known.typical
    assert report.exposed_stall_s == pytest.approx(0.4e-6)
    assert report.exposed_stall_share == pytest.approx(0.4)
    row = measured_row(known)
    assert (row["ideal_s"], row["exposed_stall_s"]) == (0.6e-6, pytest.approx(0.4e-6))
    assert row["per_step"][1]["exposed_stall_s"] == pytest.approx(0.4e-6)
    # A step may be faster than the ideal time: the stall is then negative.
    faster = recording(ROWS, STEPS, ideal_s=2e-6).typical.exposed_stall_s
    assert faster == pytest.approx(-1e-6)
    assert recording([], [(5, 5)], ideal_s=1e-6).typical.exposed_stall_share is None
