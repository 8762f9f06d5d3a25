"""`umem.profile` on a real card: what CUPTI says of transfers that the test causes itself."""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import umem
from umem import TensorClass
from umem.cuda import Location
from umem.report import MeasuredReport
from umem.telemetry import Profile, RecordKind, measured_row, read_recording, tensor_traffic

pytest.importorskip("cupti")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settled")]

MIB = 1 << 20
SIZE = 64 * MIB
UMEM = str(Path(sys.executable).with_name("umem"))


def managed(tensor_class: str, size: int = SIZE) -> torch.Tensor:
    """A tensor whose pages are on the device, in managed memory of its own."""
    with umem.tensor_class(tensor_class):
        tensor = torch.ones(size, dtype=torch.uint8, device="cuda")
    (block,) = [it for it in umem.tensors() if it.address == tensor.data_ptr()]
    assert (block.memory_kind, block.tensor_class.value) == ("managed", tensor_class)
    torch.cuda.synchronize()
    return tensor


def bytes_of(report: MeasuredReport, direction: str, tensor_class: TensorClass) -> int:
    return sum(
        it.bytes
        for it in report.traffic
        if (it.direction, it.tensor_class) == (direction, tensor_class)
    )


def test_faults_are_counted_and_attributed() -> None:
    tensor = managed("optimizer_state")
    with umem.profile(steps=2, name="faults") as profile:
        ctypes.memset(tensor.data_ptr(), 1, SIZE)  # the host writes
        profile.step()
        assert int(tensor.sum(dtype=torch.int64)) == SIZE  # the device reads
        profile.step()
    out, back = profile.step_reports()
    print(out, back, sep="\n")
    assert out.hardware == torch.cuda.get_device_name()
    assert out.policy == "sft"
    # Every page once; at the edges pages of a neighbour may come along.
    assert bytes_of(out, "to_host", TensorClass.OPTIMIZER_STATE) == pytest.approx(SIZE, rel=0.02)
    assert bytes_of(back, "to_device", TensorClass.OPTIMIZER_STATE) == pytest.approx(SIZE, rel=0.02)
    assert out.cpu_faults > 0
    assert back.fault_pages > 0
    assert back.gpu_faults >= back.fault_pages
    assert back.moved_bytes("to_device", "hint") == 0
    assert back.moved_bytes("to_device", "fault") > 0
    assert 0.5 < back.um_bytes_share <= 1
    # Faults move pages at some GB/s: neither a microsecond nor a minute.
    seconds = sum(it.seconds for it in back.traffic if it.direction == "to_device")
    assert 1e9 < SIZE / seconds < 1e12
    assert seconds <= back.step_s


def test_what_is_asked_for_is_a_hint() -> None:
    tensor = managed("weights")
    stream = torch.cuda.current_stream()
    with umem.profile(steps=2) as profile:
        for place in (Location.host(), Location.device(0)):
            umem.cuda.prefetch(tensor, place, stream=stream)
            profile.step()
    out, back = profile.step_reports()
    print(out, back, sep="\n")
    assert out.moved_bytes("to_host", "hint") == pytest.approx(SIZE, rel=0.02)
    assert back.moved_bytes("to_device", "hint") == pytest.approx(SIZE, rel=0.02)
    assert bytes_of(back, "to_device", TensorClass.WEIGHTS) == back.moved_bytes("to_device")
    assert back.moved_bytes("to_device", "fault") == 0
    assert back.fault_pages == 0


def test_copies_and_memory_sets_are_the_rest_of_the_memory_operations() -> None:
    host = torch.ones(8 * MIB, dtype=torch.uint8).pin_memory()
    device = managed("activations", 8 * MIB)
    with umem.profile(steps=1) as profile:
        for _ in range(3):
            device.copy_(host)
        device.zero_()
        profile.step()
    report = profile.report()
    records = profile.recording.records
    copies = records.taken(records.kind == RecordKind.MEMCPY)
    assert (copies.bytes == 8 * MIB).sum() == 3
    assert set(copies.copy_kind[copies.bytes == 8 * MIB].tolist()) == {1}
    assert report.memory_ops_count >= 3
    assert report.memory_ops_bytes >= 24 * MIB
    assert 24 * MIB / 200e9 < report.memory_ops_s < report.step_s


def training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(512, 2048, device="cuda")

    def step() -> torch.Tensor:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return model, optimizer, step


def test_a_training_step_names_the_tensors_that_come_back() -> None:
    model, optimizer, step = training()
    step()
    stream = torch.cuda.current_stream()
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    with umem.profile(steps=3, model=model, name="training") as profile:
        for _ in range(3):
            for moment in moments:
                torch.cuda.synchronize()
                umem.cuda.prefetch(moment, Location.host(), stream=stream)
            with profile.phase("training"):
                step()
            profile.step()
    report = profile.report()
    print(report)
    size = sum(moment.nbytes for moment in moments)
    for direction in ("to_host", "to_device"):
        moved = bytes_of(report, direction, TensorClass.OPTIMIZER_STATE)
        assert moved == pytest.approx(size, rel=0.02)
    assert report.step_count == 3
    assert report.unattributed_bytes <= 0.02 * size
    named = {it.name: it for it in tensor_traffic(profile.recording)}
    for number in range(4):
        assert named[f"{number}.weight.exp_avg"].bytes >= 3 * 2 * moments[0].nbytes * 0.98
    assert [it.name for it in profile.recording.phases] == ["training"] * 3


def test_a_saved_run_is_reported(tmp_path: Path) -> None:
    tensor = managed("gradients")
    with umem.profile(name="saved") as profile:
        ctypes.memset(tensor.data_ptr(), 1, SIZE)
        profile.step()
    path = tmp_path / "run.json.gz"
    profile.save(path)
    assert measured_row(read_recording(path)) == measured_row(profile.recording)
    outputs = [tmp_path / "run.html", tmp_path / "run.perfetto.json", tmp_path / "pictures"]
    options = zip(("--html", "--perfetto", "--plot"), map(str, outputs), strict=True)
    words = [UMEM, "report", str(path), "--json", *(word for pair in options for word in pair)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["results"]
    assert row["moved_bytes"]["to_host"] == pytest.approx(SIZE, rel=0.02)
    assert all(output.exists() for output in outputs)


def test_profiling_changes_no_result_and_its_cost_is_told() -> None:
    _, _, plain = training()
    _, _, profiled = training()

    def timed(step: Callable[[], torch.Tensor], steps: int) -> tuple[list[float], list[str]]:
        times, losses = [], []
        for _ in range(steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            loss = step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
            losses.append(float(loss).hex())
        return times, losses

    before, expected = timed(plain, 60)
    with umem.profile() as profile:
        during, losses = timed(lambda: _marked(profile, profiled), 60)
    after, _ = timed(plain, 60)
    median = {
        name: 1e3 * statistics.median(times[10:])
        for name, times in (("before", before), ("profiled", during), ("after", after))
    }
    begin = time.perf_counter()
    umem.tensors()
    look_ms = 1e3 * (time.perf_counter() - begin)
    print({**median, "records": len(profile.recording.records), "umem.tensors() ms": look_ms})
    assert losses == expected
    assert len(profile.step_reports()) == 60
    assert median["profiled"] < 3 * min(median["before"], median["after"])


def _marked(profile: Profile, step: Callable[[], torch.Tensor]) -> torch.Tensor:
    loss = step()
    profile.step()
    return loss
