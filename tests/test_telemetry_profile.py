"""`umem.profile` around real optimizer steps, with a stand-in for what only a GPU records."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import umem
from umem.core.classes import TensorClass
from umem.core.errors import UmemError, UnsupportedError
from umem.core.report import Source
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.inspection import LiveTensor
from umem.telemetry import (
    MigrationRecords,
    Profile,
    RecordKind,
    concatenated,
    load_recording,
    records_of,
)
from umem.telemetry.records import Row

KIB = 1 << 10


class StandInCollector:
    """In place of CUPTI: a clock that ticks at every look, and records that the test writes."""

    source: Source = "cupti"

    def __init__(self, refusal: str = "", dropped: int = 0) -> None:
        self.refusal, self.dropped = refusal, dropped
        self.time_ns = 1_000_000
        self.rows: list[Row] = []
        self.calls: list[str] = []

    def start(self) -> None:
        if self.refusal:
            raise UnsupportedError(self.refusal)
        self.calls.append("start")

    def now_ns(self) -> int:
        self.time_ns += 10
        return self.time_ns

    def stop(self) -> tuple[MigrationRecords, int]:
        self.calls.append("stop")
        return concatenated([records_of(self.rows)]), self.dropped

    def moves(self, address: int, size: int, cause: int = 2) -> None:
        start = self.now_ns()
        kind = RecordKind.TO_DEVICE
        self.rows.append((kind, start, self.now_ns(), address, size, 0, cause, 0, 0))


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """The native allocator over host memory, in the place of the process's own."""
    made = Allocator.on_host(Config([ClassSetting()] * len(TensorClass)), 0, 1)
    classes = list(TensorClass)

    def live() -> list[LiveTensor]:
        return [
            LiveTensor(address, requested, size, classes[number], device, kind)
            for address, requested, size, number, device, kind in made.live_blocks()
        ]

    monkeypatch.setattr("umem.telemetry.profile.live_blocks", live)
    return made


def born(allocator: Allocator, tensor_class: TensorClass, size: int = 64 * KIB) -> int:
    token = allocator.enter_class(tensor_class.number)
    address = allocator.malloc(size)
    allocator.leave_class(token)
    return address


def test_steps_are_told_apart(allocator: Allocator) -> None:
    weights = born(allocator, TensorClass.WEIGHTS)
    collector = StandInCollector()
    collector.moves(weights, 1)  # before the recording
    with Profile(collector, name="steps") as profile:
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
    assert report.notes == (
        "1 records (1 B) that CUPTI handed over start outside of the recording, and are left out",
    )
    recording = profile.recording
    assert recording.records.start_ns.min() >= 0
    assert (recording.step_start_ns[1:] >= recording.step_end_ns[:-1]).all()


def test_recording_ends_after_the_steps_asked_for(allocator: Allocator) -> None:
    collector = StandInCollector()
    with Profile(collector, steps=2) as profile:
        profile.step()
        assert collector.calls == ["start"]
        profile.step()
        assert collector.calls == ["start", "stop"]
        assert profile.report().step_count == 2  # while the block goes on
        profile.step()
        with profile.phase("ignored"):
            pass
    assert profile.recording.step_count == 2
    assert profile.recording.phases == ()


def test_gradients_are_known_from_the_optimizers_step(allocator: Allocator) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    collector = StandInCollector()
    with Profile(collector) as profile:
        gradient = born(allocator, TensorClass.GRADIENTS)
        collector.moves(gradient, KIB)
        parameter.grad = torch.ones(4)
        optimizer.step()
        allocator.free(gradient)
        profile.step()
    assert [it.tensor_class for it in profile.report().traffic] == [TensorClass.GRADIENTS]
    # The hook is gone with the recording.
    before = len(profile.recording.records)
    optimizer.step()
    assert len(profile.recording.records) == before


def test_activations_are_known_from_the_phase_in_which_they_live(allocator: Allocator) -> None:
    collector = StandInCollector()
    with Profile(collector) as profile:
        for named in (True, False):
            if named:
                with profile.phase("forward"):
                    activation = born(allocator, TensorClass.ACTIVATIONS)
                    collector.moves(activation, KIB)
            else:
                activation = born(allocator, TensorClass.ACTIVATIONS)
                collector.moves(activation, KIB)
            allocator.free(activation)
            profile.step()
    first, second = profile.step_reports()
    assert first.unattributed_bytes == 0
    assert first.traffic[0].tensor_class is TensorClass.ACTIVATIONS
    # Nobody looked while it lived.
    assert second.unattributed_bytes == KIB
    assert second.traffic[0].tensor_class is TensorClass.OTHER
    (phase,) = profile.recording.phases
    assert phase.name == "forward"
    assert phase.end_ns > phase.start_ns >= 0


def test_tensors_of_a_model_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr("umem.telemetry.profile.live_blocks", live)
    collector = StandInCollector()
    with Profile(collector, model=model) as profile:
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
    moved = {it.name: (it.bytes, it.tensor_class.value) for it in tensors_of(profile)}
    assert moved == {
        "weight.grad": (6 * KIB, "gradients"),
        "weight.exp_avg": (4 * KIB, "optimizer_state"),
        "weight": (2 * KIB, "weights"),
    }


def tensors_of(profile: Profile) -> Any:
    from umem.telemetry import tensor_traffic

    return tensor_traffic(profile.recording)


def test_lost_records_and_missing_marks_are_told(allocator: Allocator) -> None:
    with Profile(StandInCollector(dropped=12)) as profile:
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


def test_where_nothing_can_be_recorded() -> None:
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
def test_the_public_name_says_what_is_missing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(UnsupportedError, match=r"umem\[telemetry\]"), umem.profile():
        pytest.fail("it must not begin")
    with umem.profile(steps=1, required=False, name="here") as profile:
        profile.step()
    assert profile.report().workload == "here"
    assert profile.report().hardware == "no GPU"


def test_misuse_is_told(allocator: Allocator) -> None:
    for steps in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="whole number above 0"):
            umem.profile(steps=steps)  # type: ignore[arg-type]
    profile = Profile(StandInCollector())
    with pytest.raises(UmemError, match="no results yet"):
        profile.report()
    with profile, pytest.raises(UmemError, match="leave its `with` block"):
        profile.save("nowhere.json.gz")
    with pytest.raises(UmemError, match="a profile records once"), profile:
        pytest.fail("it must not begin again")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_what_starts_outside_of_the_recording_is_left_out(allocator: Allocator, steps: int) -> None:
    """An earlier recording may have left it with CUPTI."""
    collector = StandInCollector()
    with Profile(collector) as profile:
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
    allocator: Allocator, tmp_path: Path
) -> None:
    collector = StandInCollector()
    collector.time_ns = 10**18
    with Profile(collector) as profile:
        collector.moves(4096, KIB)
        kind, start, _, *rest = collector.rows[-1]
        collector.rows[-1] = (kind, start, 2**62, *rest)  # type: ignore[assignment]
        profile.step()
    (entry,) = profile.report().traffic
    assert (entry.bytes, entry.seconds) == (KIB, 0.0)
    profile.save(tmp_path / "run.json.gz")
    assert load_recording(tmp_path / "run.json.gz").records.bytes.tolist() == [KIB]


@pytest.mark.parametrize("raised", [False, True])
def test_a_device_that_fails_hides_no_error_and_keeps_no_collector(
    allocator: Allocator, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    collector = StandInCollector()
    profile = Profile(collector)
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


def test_a_beginning_that_failed_is_not_repeated(allocator: Allocator) -> None:
    def fail() -> Any:
        raise ValueError("no statistics")

    collector = StandInCollector()
    profile = Profile(collector, hints=fail)
    with pytest.raises(ValueError, match="no statistics"), profile:
        pytest.fail("it must not begin")
    assert collector.calls == ["start", "stop"]
    with pytest.raises(UmemError, match="a profile records once"), profile:
        pytest.fail("it must not begin again")


def test_an_error_in_the_block_ends_the_recording(allocator: Allocator) -> None:
    collector = StandInCollector()
    with pytest.raises(RuntimeError, match="of the script"), Profile(collector) as profile:
        raise RuntimeError("of the script")
    assert collector.calls == ["start", "stop"]
    assert profile.report().step_count == 0


def test_nvtx_ranges_where_the_package_is_there(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    closed: list[str] = []
    stand_in: Any = types.ModuleType("nvtx")

    def start_range(message: str) -> str:
        opened.append(message)
        return message

    stand_in.start_range = start_range
    stand_in.end_range = closed.append
    monkeypatch.setitem(sys.modules, "nvtx", stand_in)
    with Profile(StandInCollector(), steps=2) as profile:
        with profile.phase("forward"):
            pass
        profile.step()
        profile.step()
    assert opened == ["umem step 0", "umem phase forward", "umem step 1"]
    assert closed == ["umem phase forward", "umem step 0", "umem step 1"]


def test_telemetry_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, umem, umem.telemetry; umem.profile; "
        "print(sorted({'torch', 'cupti', 'nvtx', 'matplotlib', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
