"""Residency over a run: samples, pictures and counters."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from collectors import StandInCollector

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.telemetry import (
    MeasuredRun,
    Profile,
    measured_row,
    phase_begins,
    residency_over_run_figure,
    run_of,
)
from umem.telemetry.live import ResidencySampler
from umem.telemetry.records import Residency

GIB = 1 << 30
WEIGHTS, STATE = TensorClass.WEIGHTS, TensorClass.OPTIMIZER_STATE


def test_samples_are_taken_at_phases_and_steps() -> None:
    accounts = {WEIGHTS: GIB, STATE: 0}
    phase_begins()  # no profile yet
    with Profile(StandInCollector(), residency=lambda: accounts) as profile:
        accounts[STATE] = 2 * GIB
        phase_begins()
        accounts[STATE] = 0
        profile.step()
        profile.snapshot()
    phase_begins()  # no profile any more
    residency = profile.recording.residency
    assert residency is not None
    sizes = residency.resident_bytes
    assert sizes[:, WEIGHTS.number].tolist() == [GIB] * len(sizes)
    # The start, the phase, the step, the list of live blocks, and the end.
    assert sizes[:, STATE.number].tolist() == [0, 2 * GIB, 0, 0, 0]
    assert (np.diff(residency.time_ns) > 0).all()
    assert residency.time_ns[0] >= 0
    assert residency.time_ns[-1] <= profile.recording.duration_ns + 20
    assert residency.peak_bytes() == {WEIGHTS: GIB, STATE: 2 * GIB}
    assert residency.total_peak_bytes() == 3 * GIB
    assert measured_row(run_of(profile.recording))["residency"] == {
        "samples": 5,
        "total_peak_bytes": 3 * GIB,
        "peak_bytes": {"weights": GIB, "optimizer_state": 2 * GIB},
    }


def test_without_accounts_there_are_no_samples() -> None:
    with Profile(StandInCollector(), residency=lambda: None) as profile:
        profile.step()
    assert profile.recording.residency is None
    assert measured_row(run_of(profile.recording))["residency"] is None
    with pytest.raises(UmemError, match="no residency"):
        residency_over_run_figure(run_of(profile.recording))


def test_long_runs_keep_a_limited_number_of_samples() -> None:
    clock, asked = StandInCollector(), [0]
    clock.time_ns = 0

    def accounts() -> Mapping[TensorClass, int]:
        asked[0] += 1
        return {WEIGHTS: asked[0]}

    sampler = ResidencySampler(accounts, limit=16)
    for _ in range(1000):
        sampler.take(clock.now_ns)
    series = sampler.series(0)
    assert series is not None
    assert 8 <= len(series.time_ns) < 16
    # Evenly over the whole run.
    assert series.time_ns[0] == 10
    assert (np.diff(series.resident_bytes[:, WEIGHTS.number]) > 0).all()
    assert asked[0] < 200


def test_samples_of_several_threads_are_in_order() -> None:
    clock = StandInCollector()
    clock.time_ns = 0
    sampler = ResidencySampler(lambda: {WEIGHTS: 1})

    def work() -> None:
        for _ in range(500):
            sampler.take(clock.now_ns)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    series = sampler.series(0)
    assert series is not None
    assert len(series.time_ns) == 2000
    assert (np.diff(series.time_ns) > 0).all()
    late = sampler.series(10_000)
    assert late is not None
    assert len(late.time_ns) == 1001
    assert late.time_ns[0] == 0


@pytest.fixture
def run() -> MeasuredRun:
    with Profile(StandInCollector(), name="run") as profile:
        profile.step()
    sizes = np.zeros((3, len(TensorClass)), np.int64)
    sizes[:, WEIGHTS.number] = (GIB, GIB, 2 * GIB)
    sizes[1, STATE.number] = GIB
    return replace(run_of(profile.recording), residency=Residency(np.array([0, 10, 30]), sizes))


def test_the_figure_stacks_classes_up_to_the_peak(run: MeasuredRun) -> None:
    figure = residency_over_run_figure(run)
    (axes,) = figure.axes
    assert axes.get_ylabel() == "on the device, GiB"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["optimizer state", "weights"]
    # The highest point is the largest sum, and the last sample lasts to the end.
    assert axes.get_ylim()[1] == pytest.approx(1.15 * 2)
    assert axes.get_xlim()[1] == pytest.approx(run.duration_s * 1e6)


def test_the_figure_of_an_empty_device(run: MeasuredRun) -> None:
    nothing = Residency(np.array([0]), np.zeros((1, len(TensorClass)), np.int64))
    assert residency_over_run_figure(replace(run, residency=nothing)).axes
