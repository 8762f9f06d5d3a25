"""`umem.profile` around real optimizer steps, with a stand-in for the collector."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collectors import StandInCollector
from torch import nn

import umem
from umem.core.classes import TensorClass
from umem.core.errors import UmemError, UnsupportedError
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.inspection import LiveTensor
from umem.telemetry import Profile, load_run, run_of

KIB = 1 << 10


@pytest.fixture
def allocator() -> Allocator:
    """The native allocator over host memory."""
    return Allocator.on_host(Config([ClassSetting()] * len(TensorClass)), 0, 1)


@pytest.fixture
def profiled(allocator: Allocator) -> Callable[..., Profile]:
    """Makes a profile that lists this allocator's blocks as the process's live ones."""
    classes = list(TensorClass)

    def live() -> list[LiveTensor]:
        return [
            LiveTensor(address, requested, size, classes[number], device, kind)
            for address, requested, size, number, device, kind in allocator.live_blocks()
        ]

    return partial(Profile, blocks=live)


Profiled = Callable[..., Profile]


def allocate(allocator: Allocator, tensor_class: TensorClass, size: int = 64 * KIB) -> int:
    with allocator.class_override(tensor_class.number):
        return allocator.malloc(size)


def test_each_step_has_its_own_records(allocator: Allocator, profiled: Profiled) -> None:
    weights = allocate(allocator, TensorClass.WEIGHTS)
    collector = StandInCollector()
    collector.moves(weights, 1)  # before the recording
    with profiled(collector, name="steps") as profile:
        assert profile.running
        for step in range(3):
            collector.moves(weights, 4 * KIB * (step + 1))
            profile.step()
        collector.moves(weights, 7)  # after the last step
    assert collector.calls == ["start", "stop"]
    reports = profile.step_reports()
    assert [it.moved_bytes("to_device", "fault") for it in reports] == [4096, 8192, 12288]
    assert {it.tensor_class for report in reports for it in report.traffic} == {TensorClass.WEIGHTS}
    report = profile.report()
    assert (report.step_count, report.moved_bytes()) == (3, 8192)
    assert (report.workload, report.planner, report.policy) == ("steps", "measured", "none")
    assert report.unattributed_bytes == 0
    (note,) = report.notes
    assert note.startswith("1 records (1 B) from CUPTI start outside")
    recording = profile.recording
    assert recording.records.start_ns.min() >= 0
    assert (recording.step_start_ns[1:] >= recording.step_end_ns[:-1]).all()


def test_recording_ends_after_the_steps_asked_for(profiled: Profiled) -> None:
    collector = StandInCollector()
    with profiled(collector, steps=2) as profile:
        profile.step()
        assert collector.calls == ["start"]
        profile.step()
        assert collector.calls == ["start", "stop"]
        assert profile.report().step_count == 2  # while the block goes on
        profile.step()
        profile.snapshot()
    assert profile.recording.step_count == 2


def test_gradients_are_attributed_when_the_optimizer_steps(
    allocator: Allocator, profiled: Profiled
) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    collector = StandInCollector()
    with profiled(collector) as profile:
        gradient = allocate(allocator, TensorClass.GRADIENTS)
        collector.moves(gradient, KIB)
        parameter.grad = torch.ones(4)
        optimizer.step()
        allocator.free(gradient)
        profile.step()
    assert [it.tensor_class for it in profile.report().traffic] == [TensorClass.GRADIENTS]
    # The hook is removed with the recording.
    before = len(profile.recording.records)
    optimizer.step()
    assert len(profile.recording.records) == before


def test_activations_are_attributed_where_a_snapshot_is_taken(
    allocator: Allocator, profiled: Profiled
) -> None:
    collector = StandInCollector()
    with profiled(collector) as profile:
        for is_listed in (True, False):
            activation = allocate(allocator, TensorClass.ACTIVATIONS)
            collector.moves(activation, KIB)
            if is_listed:
                profile.snapshot()
            allocator.free(activation)
            profile.step()
    first, second = profile.step_reports()
    assert first.unattributed_bytes == 0
    assert first.traffic[0].tensor_class is TensorClass.ACTIVATIONS
    # No snapshot was taken while it was live.
    assert second.unattributed_bytes == KIB
    assert second.traffic[0].tensor_class is TensorClass.OTHER


def test_tensors_of_a_model_have_names() -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())

    def live() -> list[LiveTensor]:
        """The blocks of this model, where torch's own allocator has put them."""
        found = [(model.weight, TensorClass.WEIGHTS)]
        if model.weight.grad is not None:
            found.append((model.weight.grad, TensorClass.GRADIENTS))
        if model.weight in optimizer.state:
            moment = optimizer.state[model.weight]["exp_avg"]
            found.append((moment, TensorClass.OPTIMIZER_STATE))
        return [
            LiveTensor(it.data_ptr(), it.nbytes, it.nbytes, of_class, 0, "managed")
            for it, of_class in found
        ]

    collector = StandInCollector()
    with Profile(collector, model=model, blocks=live) as profile:
        for _ in range(2):
            model(torch.ones(1, 256)).sum().backward()
            gradient = model.weight.grad
            assert gradient is not None
            collector.moves(gradient.data_ptr(), 3 * KIB)
            optimizer.step()
            moment = optimizer.state[model.weight]["exp_avg"]
            collector.moves(moment.data_ptr() + 4096, 2 * KIB)
            collector.moves(model.weight.data_ptr(), KIB)
            optimizer.zero_grad(set_to_none=True)
            profile.step()
    moved = {it.name: (it.bytes, it.tensor_class.value) for it in run_of(profile.recording).tensors}
    assert moved == {
        "weight.grad": (6 * KIB, "gradients"),
        "weight.exp_avg": (4 * KIB, "optimizer_state"),
        "weight": (2 * KIB, "weights"),
    }


def test_lost_records_and_missing_marks_are_noted(profiled: Profiled) -> None:
    with profiled(StandInCollector(dropped=12)) as profile:
        pass
    report = profile.report()
    assert report.step_count == 0
    assert any("12 records were lost" in note for note in report.notes)
    assert any("no step was marked" in note for note in report.notes)


def test_without_umem_nothing_is_attributed() -> None:
    collector = StandInCollector()
    with Profile(collector) as profile:
        collector.moves(4096, KIB)
        profile.step()
    assert profile.report().unattributed_bytes == KIB
    assert profile.report().notes == ("umem is not enabled: all traffic is of class other",)


def test_a_recording_that_is_not_possible() -> None:
    with (
        pytest.raises(UnsupportedError, match="in the way"),
        Profile(StandInCollector("in the way")),
    ):
        pytest.fail("it must not begin")
    with Profile(StandInCollector("in the way"), required=False) as profile:
        profile.step()
        profile.step()
    report = profile.report()
    assert not report.collected
    assert report.step_count == 2
    assert report.step_s > 0
    assert any("not recorded: in the way" in note for note in report.notes)


@pytest.mark.skipif(torch.version.cuda is not None, reason="for a machine without CUPTI")
def test_umem_profile_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(UnsupportedError, match=r"\[telemetry\]"), umem.profile():
        pytest.fail("it must not begin")
    with umem.profile(steps=1, required=False, name="here") as profile:
        profile.step()
    assert profile.report().workload == "here"
    assert profile.report().hardware == "no GPU"


def test_misuse_is_an_error(profiled: Profiled) -> None:
    for steps in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="whole number above 0"):
            umem.profile(steps=steps)  # type: ignore[arg-type]
    profile = profiled(StandInCollector())
    with pytest.raises(UmemError, match="no results yet"):
        profile.report()
    with profile, pytest.raises(UmemError, match="leave its `with` block"):
        profile.save("nowhere.npz")
    with pytest.raises(UmemError, match="a profile records once"), profile:
        pytest.fail("it must not begin again")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_records_outside_of_the_recording_are_left_out(profiled: Profiled, steps: int) -> None:
    """CUPTI may return records of an earlier recording."""
    collector = StandInCollector()
    with profiled(collector) as profile:
        for _ in range(steps):
            collector.moves(4096, KIB)
            profile.step()
        for off_ns in (-(10**9), 10**9):
            collector.moves(4096, 1000)
            kind, start, end, *rest = collector.rows[-1]
            collector.rows[-1] = (kind, start + off_ns, end + off_ns, *rest)  # type: ignore[assignment]
    moved = [it.moved_bytes() for it in profile.step_reports()]
    assert moved == ([KIB] * steps or [0])
    assert any(note.startswith("2 records (1.95 KiB)") for note in profile.report().notes)


def test_a_transfer_that_is_longer_than_the_recording_has_no_length(
    profiled: Profiled, tmp_path: Path
) -> None:
    collector = StandInCollector()
    collector.time_ns = 10**18
    with profiled(collector) as profile:
        collector.moves(4096, KIB)
        kind, start, _, *rest = collector.rows[-1]
        collector.rows[-1] = (kind, start, 2**62, *rest)  # type: ignore[assignment]
        profile.step()
    (entry,) = profile.report().traffic
    assert (entry.bytes, entry.seconds) == (KIB, 0.0)
    profile.save(tmp_path / "run.json")
    assert load_run(tmp_path / "run.json").typical.moved_bytes() == KIB


@pytest.mark.parametrize("raised", [False, True])
def test_a_device_failure_ends_the_recording_and_hides_no_error(
    profiled: Profiled, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    collector = StandInCollector()
    profile = profiled(collector)
    with (  # noqa: PT012 - the block is what is tested
        pytest.raises(
            RuntimeError, match="of the script" if raised else "illegal memory"
        ) as caught,
        profile,
    ):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", fail)
        if raised:
            raise RuntimeError("of the script")
    assert caught.value.__context__ is None or not raised
    assert collector.calls == ["start", "stop"]
    assert any("the device has failed (CUDA error" in it for it in profile.report().notes)


def test_a_profile_that_failed_to_begin_cannot_begin_again(profiled: Profiled) -> None:
    def fail() -> Any:
        raise ValueError("no statistics")

    collector = StandInCollector()
    profile = profiled(collector, hints=fail)
    with pytest.raises(ValueError, match="no statistics"), profile:
        pytest.fail("it must not begin")
    assert collector.calls == ["start", "stop"]
    with pytest.raises(UmemError, match="a profile records once"), profile:
        pytest.fail("it must not begin again")


@pytest.mark.parametrize("what", ["hints", "residency", "blocks"])
def test_what_fails_while_recording_is_left_out_and_training_goes_on(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail_later() -> None:
        calls.append(what)
        if len(calls) > 2:
            raise RuntimeError("broken")

    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    options: dict[str, Any] = {what: fail_later}
    with (
        caplog.at_level(logging.WARNING, logger="umem"),
        Profile(StandInCollector(), **options) as profile,
    ):
        for _ in range(4):
            parameter.grad = torch.ones(4)
            optimizer.step()
            profile.snapshot()
            profile.step()
    assert len(calls) == 3
    assert len(caplog.records) == 1
    report = profile.report()
    assert report.step_count == 4
    assert sum("RuntimeError('broken')" in note for note in report.notes) == 1


@pytest.mark.slow
def test_telemetry_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, umem, umem.telemetry; umem.profile; "
        "print(sorted({'torch', 'cupti', 'matplotlib', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
