"""`umem.profile` on a real GPU: records of transfers that the tests cause themselves."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from known_moves import COPIED_BYTES, known_moves
from managed_memory import PART_BYTES
from poisoned import NOT_POISONED
from torch import nn

import umem
from umem.core.classes import TensorClass
from umem.core.report import MeasuredReport
from umem.core.schedule import HintOp
from umem.cuda import Location
from umem.runtime.hints import HintEngine, HintOutcome
from umem.telemetry import (
    Profile,
    RecordKind,
    load_run,
    measured_row,
    run_of,
)

pytest.importorskip("cupti")

pytestmark = pytest.mark.usefixtures("settled")

MIB = 1 << 20
GIB = 1 << 30
ONES = 0x0101010101010101
SIZE = 64 * MIB
PATIENCE_S = 30.0
UMEM = str(Path(sys.executable).with_name("umem"))


def managed(tensor_class: str, size: int = SIZE) -> torch.Tensor:
    """A tensor in a managed block, with its pages on the device."""
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


@NOT_POISONED
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
    assert out.policy == "managed"
    # Every page once; at the edges pages of a neighbour may move too.
    assert bytes_of(out, "to_host", TensorClass.OPTIMIZER_STATE) == pytest.approx(SIZE, rel=0.02)
    assert bytes_of(back, "to_device", TensorClass.OPTIMIZER_STATE) == pytest.approx(SIZE, rel=0.02)
    assert out.cpu_faults > 0
    assert back.fault_batches > 0
    assert back.gpu_faults >= back.fault_batches
    assert back.moved_bytes("to_device", "hint") == 0
    assert back.moved_bytes("to_device", "fault") > 0
    assert 0.5 < back.um_bytes_share <= 1
    # Faults move pages at some GB/s: this catches a wrong unit.
    seconds = sum(it.seconds for it in back.traffic if it.direction == "to_device")
    assert 1e9 < SIZE / seconds < 1e12
    assert seconds <= back.step_s


def test_prefetches_are_hints() -> None:
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
    assert back.fault_batches == 0


def test_copies_and_memory_sets_are_memory_operations() -> None:
    host = torch.ones(8 * MIB, dtype=torch.uint8).pin_memory()
    device = managed("activations", 8 * MIB)
    with umem.profile(steps=1) as profile:
        for _ in range(3):
            device.copy_(host)
        device.zero_()
        profile.step()
    report = profile.report()
    records = profile.recording.records
    copies = records.select(records.kind == RecordKind.MEMCPY)
    assert (copies.bytes == 8 * MIB).sum() == 3
    assert report.memory_ops_count >= 3
    assert report.memory_ops_bytes >= 24 * MIB
    assert 24 * MIB / 200e9 < report.memory_ops_s < report.step_s


def test_a_forked_process_is_recorded() -> None:
    """Forked from a process that has imported torch, as `umem bench` does it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "umem.telemetry"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        source, hinted_bytes, faulted_bytes, copied_bytes = pool.submit(known_moves).result(120)
    print(source, hinted_bytes, faulted_bytes, copied_bytes)
    if source == "cupti":
        pytest.skip("CUPTI alone may have no records in a forked process")
    assert source in ("driver", "driver_only")
    assert hinted_bytes == faulted_bytes == PART_BYTES
    assert source == "driver_only" or copied_bytes >= COPIED_BYTES


def test_heavy_faulting_is_counted() -> None:
    """A kernel reads 1 GiB that is on the host. CUPTI alone loses a part of such records."""
    tensor = managed("activations", GIB)
    stream = torch.cuda.current_stream()
    umem.cuda.prefetch(tensor, Location.host(), stream=stream)
    with umem.profile(steps=1, name="heavy") as profile:
        assert int(tensor.view(torch.int64).amax()) == ONES
        profile.step()
    report = profile.report()
    print(report)
    assert profile.recording.dropped == 0
    brought = [it for it in report.traffic if it.direction == "to_device"]
    least = 0.99 if report.source == "driver" else 0.1
    assert least * GIB < sum(it.bytes for it in brought) <= 1.01 * GIB
    of_tensor = bytes_of(report, "to_device", TensorClass.ACTIVATIONS)
    assert of_tensor >= 0.95 * sum(it.bytes for it in brought)
    assert {it.cause for it in brought} <= {"fault", "speculation"}
    assert report.moved_bytes("to_device", "fault") > 0
    assert report.fault_batches > 0
    assert report.gpu_faults >= report.fault_batches
    assert report.unattributed_bytes <= 0.05 * GIB
    seconds = sum(it.seconds for it in brought)
    print(f"faulted in at {GIB / seconds / 1e9:.1f} GB/s of link time, step {report.step_s:.3f} s")


def rounds(engine: HintEngine, tensor: torch.Tensor, profile: Profile, count: int) -> None:
    """Send a tensor out and back, a step for each round."""
    place = tensor.data_ptr(), tensor.nbytes
    for _ in range(count):
        for op in (HintOp.EVICT, HintOp.PREFETCH):
            ticket = engine.submit(op, *place, tensor_class=TensorClass.OPTIMIZER_STATE)
            assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE
        profile.step()


def test_frozen_weights_are_evicted_without_a_transfer(engine: HintEngine) -> None:
    """Read-mostly pages keep their host copy, so an eviction only drops the device's copy."""
    tensor = managed("frozen_weights", 4 * SIZE)
    place = tensor.data_ptr(), tensor.nbytes
    engine.advise(*place, placement="device", read_mostly=True)
    ticket = engine.submit(HintOp.EVICT, *place)
    assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE
    try:
        with umem.profile(steps=3, name="frozen") as profile:
            for _ in range(3):
                ticket = engine.submit(HintOp.PREFETCH, *place)
                assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE
                assert int(tensor.view(torch.int64).amax()) == ONES
                ticket = engine.submit(HintOp.EVICT, *place)
                assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE
                profile.step()
    finally:
        ticket = engine.advise(*place, placement="device")
        assert engine.wait(ticket, timeout_s=PATIENCE_S) is HintOutcome.DONE
        assert engine.forget(*place)
    for report in profile.step_reports():
        print(report)
        assert report.moved_bytes("to_host") == 0
        moved = bytes_of(report, "to_device", TensorClass.FROZEN_WEIGHTS)
        assert moved == pytest.approx(4 * SIZE, rel=0.02)
        assert report.moved_bytes("to_device", "fault") == 0


def test_the_hint_engine_and_the_driver_count_the_same(engine: HintEngine) -> None:
    tensor = managed("optimizer_state", 4 * SIZE)
    with umem.profile(steps=3, hints=engine.statistics) as profile:
        rounds(engine, tensor, profile, 3)
    assert engine.forget(tensor.data_ptr(), tensor.nbytes)
    for report in profile.step_reports():
        print(report)
        assert report.source in ("driver", "cupti")
        assert report.hints is not None
        moved = {use.op: use.moved_bytes for use in report.hints.uses}
        assert moved == {"prefetch": 4 * SIZE, "evict": 4 * SIZE}
        for direction in ("to_device", "to_host"):
            seen = bytes_of(report, direction, TensorClass.OPTIMIZER_STATE)
            assert seen == pytest.approx(4 * SIZE, rel=0.05)
        assert report.hints.failures == report.hints.refused == 0


def test_torch_profiler_keeps_cupti(engine: HintEngine) -> None:
    """Inside of torch.profiler umem uses the driver's queue alone; torch's records are whole."""
    tensor = managed("optimizer_state")
    copied = torch.zeros(MIB, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as torchs:
        copied += 1
        with umem.profile(steps=2, hints=engine.statistics, name="beside") as profile:
            rounds(engine, tensor, profile, 2)
        with umem.profile(steps=1, required=False) as without:
            without.step()
        copied += 1
        torch.cuda.synchronize()
    report = profile.report()
    print(report)
    assert report.source in ("driver_only", "hints")
    assert not report.has_copies
    assert any("torch.profiler is recording" in note for note in report.notes)
    assert bytes_of(report, "to_host", TensorClass.OPTIMIZER_STATE) == SIZE
    assert bytes_of(report, "to_device", TensorClass.OPTIMIZER_STATE) == SIZE
    assert without.report().source in ("driver_only", "none")
    kernels = [it.name for it in torchs.events() if "elementwise" in it.name]
    assert len(kernels) >= 2, [it.name for it in torchs.events()]
    # Afterwards CUPTI may be available again; if not, a note gives the reason.
    with umem.profile(steps=1, hints=engine.statistics, name="after") as profile:
        rounds(engine, tensor, profile, 1)
    assert engine.forget(tensor.data_ptr(), tensor.nbytes)
    report = profile.report()
    print(f"after torch.profiler: recorded by {report.source}, notes {report.notes}")
    assert report.source in ("driver", "cupti", "hints")
    moved = bytes_of(report, "to_device", TensorClass.OPTIMIZER_STATE)
    assert moved == pytest.approx(SIZE, rel=0.05)


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
    named = {it.name: it for it in run_of(profile.recording).tensors}
    for number in range(4):
        assert named[f"{number}.weight.exp_avg"].bytes >= 3 * 2 * moments[0].nbytes * 0.98


def test_a_saved_run_is_reported(tmp_path: Path) -> None:
    tensor = managed("gradients")
    with umem.profile(name="saved") as profile:
        ctypes.memset(tensor.data_ptr(), 1, SIZE)
        profile.step()
    path = tmp_path / "run.json"
    profile.save(path)
    assert measured_row(load_run(path)) == measured_row(run_of(profile.recording))
    words = [UMEM, "report", str(path), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["results"]
    assert row["moved_bytes"]["to_host"] == pytest.approx(SIZE, rel=0.02)


def test_profiling_changes_no_result() -> None:
    _, _, plain = training()
    _, _, profiled = training()
    expected = [float(plain()).hex() for _ in range(20)]
    losses = []
    with umem.profile() as profile:
        for _ in range(20):
            losses.append(float(profiled()).hex())
            profile.step()
    assert losses == expected
    assert len(profile.step_reports()) == 20
