"""The model of the training benchmark, what umem says of its training, and the order of a run."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from managed_training import MIB, Training
from training_runs import GIB, TINY, made_up_run, outcome, settings
from umem_bench.train import compile_planner, managed, scratch, step, task
from umem_bench.train.build_deepspeed import building_deepspeed
from umem_bench.train.details import details, differences
from umem_bench.train.figures import device_peak_bytes, fits, lower_bound_s
from umem_bench.train.jobs import TrainingJob
from umem_bench.train.model import build_llama
from umem_bench.train.order import configurations
from umem_bench.train.results import Method, Outcome, TrainingSettings, Variant

from umem.core.classes import TensorClass
from umem.core.errors import UnsupportedError
from umem.core.report import Cause, HintReport, HintUse, MeasuredReport, Source, Traffic
from umem.cuda import Range
from umem.cuda import bindings as _bindings
from umem.executor import SETTLING_STEPS
from umem.executor.calibration import BandwidthCalibration
from umem.executor.optimizer.partial_step import PartialOptimizerStep
from umem.hardware import load_hardware
from umem.simulation import engine as _engine
from umem.telemetry import MigrationRecords, RecordKind, records_of
from umem.telemetry.records import CAUSE_OF_NUMBER
from umem.trace import check_trace

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["sft", "lora"])
@pytest.mark.parametrize("chunk_tokens", [5, 32])
def test_the_loss_in_chunks_is_that_of_transformers(method: Method, chunk_tokens: int) -> None:
    model = build_llama(TINY.model_copy(update={"loss_chunk_tokens": chunk_tokens}), method, CPU)
    model.float()  # so that the order of sums does not matter
    tokens = torch.randint(0, TINY.vocabulary, (3, TINY.tokens))
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.2, -100)

    def gradients() -> list[torch.Tensor]:
        found = [it.grad for it in model.parameters() if it.requires_grad]
        model.zero_grad()
        return [it for it in found if it is not None]

    loss = model(input_ids=tokens, labels=labels)
    loss.backward()
    own = gradients()
    usual = model.network(input_ids=tokens, labels=labels).loss
    usual.backward()

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, usual)
    torch.testing.assert_close(own, gradients())
    assert len(own) == sum(it.requires_grad for it in model.parameters())
    assert len(model.layers) == TINY.layers


def test_logits_are_there_for_one_chunk_at_a_time() -> None:
    model = build_llama(TINY, "sft", CPU)
    tokens = torch.randint(0, TINY.vocabulary, (2, TINY.tokens))
    saved: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    rows: list[int] = []
    model.network.lm_head.register_forward_hook(lambda *it: rows.append(it[2].shape[0]))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        model(tokens, tokens)

    assert rows == [2 * TINY.loss_chunk_tokens] * 2
    assert not any(TINY.vocabulary in shape[-1:] for shape in saved)


def test_checkpoints_keep_each_layers_input_only() -> None:
    kept_bytes = {}
    for checkpoint in (False, True):
        model = build_llama(TINY.model_copy(update={"checkpoint": checkpoint}), "sft", CPU)
        weights = {it.data_ptr() for it in model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
            tokens = torch.randint(0, TINY.vocabulary, (2, TINY.tokens))
            model(tokens, tokens).backward()
        kept_bytes[checkpoint] = sum(size for at, size in kept.items() if at not in weights)

    assert kept_bytes[True] < kept_bytes[False] / 2


def on_the_cpu(variant: Variant, method: Method) -> step.Training:
    return step.make_training(
        TrainingJob(
            model=TINY.model_copy(update={"checkpoint": True}),
            method=method,
            variant=variant,
            budget_bytes=None,
            steps=1,
            deterministic=False,
            managed_limit_bytes=0,
            device="cpu",
        )
    )


@pytest.mark.parametrize("method", ["sft", "lora"])
def test_steps_in_the_backward_pass_do_the_arithmetic_of_stock(method: Method) -> None:
    stock, ours = on_the_cpu("stock", method), on_the_cpu("backward-step", method)

    losses, own_losses = (
        [float(training.step()).hex() for _ in range(3)] for training in (stock, ours)
    )

    assert own_losses == losses
    assert losses[0] != losses[-1]
    pairs = zip(ours.model.parameters(), stock.model.parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)
    weights = [it for it in ours.model.parameters() if it.requires_grad]
    assert len(ours.optimizers) == len(weights)
    assert all(it.grad is None for it in weights)
    assert task._state_bytes(ours.optimizers) == task._state_bytes(stock.optimizers) != 0


def test_no_gradient_waits_for_the_end_of_the_backward_pass() -> None:
    training = on_the_cpu("backward-step", "sft")
    weights = list(training.model.parameters())
    held: list[int] = []
    for weight in weights:  # after the training's own hook
        weight.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(it.grad is not None for it in weights))
        )

    training.step()

    assert held == [0] * len(weights)


# --- the device's clock ---


def test_the_clock_is_that_of_the_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bytes | int, ...]] = []

    def find(address: bytes, handle: Any) -> int:
        asked.append((address,))
        handle[0] = 7
        return 0

    def clock(handle: int, kind: int, value: Any) -> int:
        asked.append((handle, kind))
        value[0] = 1755
        return 0 if len(asked) == 2 else 3  # NVML_ERROR_NOT_SUPPORTED

    number, place = ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p)
    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByPciBusId_v2=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, place)(
            find
        ),
        nvmlDeviceGetClockInfo=ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int, number
        )(clock),
    )
    monkeypatch.setattr(_bindings, "_nvml", lambda: nvml)

    assert _bindings.nvml_sm_clock_mhz("0000:1B:00.0") == 1755
    assert asked == [(b"0000:1B:00.0",), (7, 1)]
    assert _bindings.nvml_sm_clock_mhz("0000:1B:00.0") is None


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="it is about a machine without NVML")
def test_the_clock_is_not_known_without_nvml() -> None:
    assert _bindings.nvml_sm_clock_mhz("0000:1B:00.0") is None


# --- what umem says ---


@dataclass
class _Managed:
    """As the benchmark's training, but of tensors that a manager on the CPU moves."""

    inner: Training
    manager: Any

    @property
    def model(self) -> Any:
        return self.inner.model

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return (self.inner.optimizer,)

    def step(self) -> torch.Tensor:
        self.inner.step()
        return torch.tensor(self.inner.losses[-1])


@pytest.mark.parametrize(
    ("planner", "budget_bytes", "state"),
    [
        ("planned", 40 * MIB, "running"),
        ("lookahead", 34 * MIB, "running"),
        ("fault", 40 * MIB, "running"),
        ("planned", 6 * MIB, "off"),
    ],
)
def test_warming_up_ends_when_the_manager_has_decided(
    planner: str, budget_bytes: int, state: str
) -> None:
    inner = Training()
    training: Any = _Managed(inner, inner.manage(planner, budget_bytes))
    losses: list[torch.Tensor] = []

    task.warm_up(training, losses)

    status = training.manager.status()
    figures = managed.manager_figures(status, status, 5)
    training.manager.close()
    assert status.state == figures.state == state
    if state == "running":
        # Under every planner alike, past the last correction and what it moves.
        assert figures.steps + figures.diverged_steps == SETTLING_STEPS + managed.ARRANGING_STEPS
        assert figures.predicted_step_s is not None
        assert figures.wait_s == 0
    else:
        assert len(losses) <= 8
        assert "and the device budget is 6 MiB" in figures.reason


def test_no_correction_comes_after_the_steps_that_it_can_come_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hardware = load_hardware("h200-pcie")
    correction = BandwidthCalibration(cast(Any, SimpleNamespace(statistics=lambda: None)))

    def slower_and_slower(*_: object) -> tuple[int, float]:
        return GIB, 4 ** (1 + correction.count) * GIB / hardware.to_device_bytes_per_s

    monkeypatch.setattr("umem.executor.calibration._difference", slower_and_slower)

    due = [steps for steps in range(40) if correction.is_due(steps, hardware)]

    assert len(due) == correction.count > 1
    assert due[-1] == SETTLING_STEPS


class _Planner:
    """A manager that plans anew before some steps, and whose steps may stray."""

    def __init__(self, *, corrected: Sequence[int] = (), strayed: Sequence[int] = ()) -> None:
        self.corrected, self.strayed = corrected, strayed
        self.state = "running"
        self.steps = 0

    def step(self) -> torch.Tensor:
        self.steps += 1
        return torch.tensor(1.0)

    def status(self) -> Any:
        return SimpleNamespace(
            state=self.state,
            corrections=sum(it <= self.steps for it in self.corrected),
            diverged_steps=sum(it <= self.steps for it in self.strayed),
            step_in_backward=False,
        )


def timed_steps(manager: _Planner) -> tuple[task.Timed, list[torch.Tensor]]:
    training: Any = SimpleNamespace(manager=manager, step=manager.step)
    losses = [training.step()]
    return task.timed_as_planned(training, 3, losses, None), losses


@pytest.mark.parametrize(
    ("corrected", "warm_steps", "is_noted"),
    [
        ((), 1, False),
        ((1,), 1, False),
        # Three steps that were timed in vain, and two that arrange.
        ((2,), 6, False),
        ((3, 5), 6, False),
        ((2, 8), 6, True),
    ],
)
def test_no_correction_falls_into_the_timed_steps(
    corrected: Sequence[int], warm_steps: int, is_noted: bool
) -> None:
    timed, losses = timed_steps(_Planner(corrected=corrected))

    assert (timed.warm_steps, len(losses)) == (warm_steps, warm_steps + 3)
    assert len(timed.steps_s) == 3
    assert timed.plan_running
    words = "planned again, from measured bandwidths, in the timed steps"
    assert task._notes("umem-planned", timed) == ((words,) if is_noted else ())


@pytest.mark.parametrize(
    ("corrected", "looks"), [((), 1), ((1,), 1), ((2,), 2), ((3, 5), 1), ((2, 5), 3)]
)
def test_what_is_looked_at_goes_by_one_plan(corrected: Sequence[int], looks: int) -> None:
    manager = _Planner(corrected=corrected)
    training: Any = SimpleNamespace(manager=manager, step=manager.step)
    manager.step()
    seen = []

    def look() -> int:
        manager.step()
        seen.append(manager.steps)
        return len(seen)

    assert managed.under_one_plan(training, look) == looks == len(seen)
    training.manager = None
    assert managed.under_one_plan(training, look) == looks + 1


def test_a_plan_was_running_only_if_every_timed_step_followed_it() -> None:
    assert timed_steps(_Planner(strayed=(1,)))[0].plan_running is True
    assert timed_steps(_Planner(strayed=(1, 3)))[0].plan_running is False
    manager = _Planner()
    manager.state = "recording"
    assert timed_steps(manager)[0].plan_running is False

    class Failing(_Planner):
        def step(self) -> torch.Tensor:
            self.state = "off" if self.steps == 2 else self.state
            return super().step()

    assert timed_steps(Failing())[0].plan_running is False


@dataclass
class Ledger:
    """In place of umem's allocator, and of its books of what is away."""

    now_bytes: int = 0
    peak_bytes: int = 0
    away_bytes: int = 0
    looks: int = 0

    def allocate(self, size_bytes: int) -> None:
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def take_peak_bytes(self, _device: int) -> int:
        taken, self.peak_bytes = self.peak_bytes, self.now_bytes
        return taken

    def residency(self, _device: int) -> dict[TensorClass, int]:
        self.looks += 1
        return {TensorClass.WEIGHTS: self.now_bytes - self.away_bytes}


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    made = Ledger()
    monkeypatch.setattr("umem.swap.runtime", lambda: SimpleNamespace(allocator=made))
    monkeypatch.setattr("umem.executor.residency", made.residency)
    return made


class _Steps:
    """The small Llama, with no manager to speak of."""

    def __init__(self) -> None:
        self.model = build_llama(TINY, "sft", CPU)
        self.optimizers = (torch.optim.AdamW(self.model.parameters()),)
        self.tokens = torch.randint(0, TINY.vocabulary, (2, TINY.tokens))
        self.manager = SimpleNamespace(watch=lambda _: None)

    def step(self) -> None:
        self.model(self.tokens, self.tokens).backward()
        self.optimizers[0].step()


def test_residency_is_looked_at_on_both_ways(ledger: Ledger) -> None:
    training: Any = _Steps()
    ledger.allocate(5)

    most = managed.resident_bytes(training)

    assert most == 5
    each_step = TINY.layers * 2 + len(list(training.model.parameters())) + 2
    looks = 2 * each_step + 2  # at the beginning and at the end
    assert ledger.looks == looks
    training.step()
    assert ledger.looks == looks


@pytest.mark.parametrize(("before_bytes", "after_bytes"), [(30, 10), (10, 30)])
def test_residency_has_what_lives_between_two_looks(
    before_bytes: int, after_bytes: int, ledger: Ledger
) -> None:
    training: Any = _Steps()
    ledger.allocate(100)
    part = training.model.network.model.layers[1].mlp

    def begins(*_: object) -> None:
        ledger.away_bytes = before_bytes

    def lives_here(*_: object) -> None:
        ledger.allocate(50)

    def dies_here(*_: object) -> None:
        ledger.allocate(-50)
        ledger.away_bytes = after_bytes

    training.model.register_forward_pre_hook(begins)
    part.register_forward_pre_hook(lives_here)
    part.register_forward_hook(dies_here)

    # Of the 30 that were away at one of the two looks, 20 may have been there between them.
    assert managed.resident_bytes(training) == 150 - 10


@pytest.mark.parametrize("planner", ["planned", "lookahead", "fault"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_steps_that_are_looked_at_go_as_planned(
    planner: str, in_backward: bool, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("run", "run_part"):
        monkeypatch.setattr(
            PartialOptimizerStep, name, _told(getattr(PartialOptimizerStep, name), done)
        )
    ledger.allocate(GIB)
    inner = Training()
    manager = inner.manage(planner, 34 * MIB, step_in_backward=in_backward)
    training: Any = _Managed(inner, manager)
    inner.steps(12)
    before = manager.status()
    assert before.state == "running", before

    def away(*_: object) -> int:
        return sum(manager.away_bytes().values())

    usual: list[int] = []
    manager.watch(lambda: usual.append(away()))
    done.clear()
    inner.steps(2)
    usual_parts = list(done)
    looked: list[int] = []

    def residency(_device: int) -> dict[TensorClass, int]:
        looked.append(away())
        return {TensorClass.WEIGHTS: ledger.now_bytes - looked[-1]}

    monkeypatch.setattr("umem.executor.residency", residency)
    done.clear()
    most_bytes = managed.resident_bytes(training)

    after = manager.status()
    manager.close()
    assert done == usual_parts != []
    assert set(looked) == set(usual)
    assert most_bytes == ledger.now_bytes - min(usual)
    assert (after.steps, after.diverged_steps) == (before.steps + 4, before.diverged_steps)
    count = len(looked)
    inner.step()
    assert len(looked) == count


def _told(method: Callable[..., None], calls: list[str]) -> Callable[..., None]:
    def told(*arguments: Any) -> None:
        calls.append(method.__name__)
        method(*arguments)

    return told


@pytest.mark.parametrize(
    ("variant", "in_backward", "is_noted"),
    [
        ("umem-backward-step", False, True),
        ("umem-backward-step", True, False),
        ("umem-planned", False, False),
    ],
)
def test_a_step_that_stayed_where_it_was_is_noted(
    variant: Variant, in_backward: bool, is_noted: bool
) -> None:
    timed: Any = SimpleNamespace(
        after=SimpleNamespace(step_in_backward=in_backward), is_corrected=False
    )

    words = "the optimizer's step stayed behind the backward pass"
    assert task._notes(variant, timed) == ((words,) if is_noted else ())


class SilentCollector:
    """In place of CUPTI, which has handed over nothing where gigabytes moved."""

    source: Source = "cupti"

    def start(self) -> None:
        pass

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def stop(self) -> tuple[MigrationRecords, int]:
        return records_of([]), 0


FROZEN = TensorClass.FROZEN_WEIGHTS


def hinted(op: str, moved_bytes: int, tensor_class: TensorClass = TensorClass.WEIGHTS) -> HintUse:
    none: dict[str, Any] = {it.name: 0 for it in fields(HintUse)}
    return replace(HintUse(**none), op=op, tensor_class=tensor_class, moved_bytes=moved_bytes)


@pytest.mark.parametrize(
    ("recorded_bytes", "uses", "words"),
    [
        (0, [hinted("prefetch", 2 * MIB)], "records of 0 B, and 2 MiB moved, by the hint"),
        (MIB - 1, [hinted("prefetch", MIB), hinted("evict", MIB)], "and 2 MiB moved, by the"),
        (MIB, [hinted("prefetch", MIB), hinted("evict", MIB)], None),
        # Frozen weights come, and are dropped.
        (
            MIB,
            [hinted(op, 2 * MIB, FROZEN) for op in ("prefetch", "evict")],
            None,
        ),
        # Copies, and pages that stay and are mapped, are no transfers to the driver.
        (0, [hinted("copy_in", MIB), hinted("copy_out", MIB), hinted("advise", MIB)], None),
        (0, [], None),
    ],
)
def test_lost_records_are_not_taken_for_zeros(
    recorded_bytes: int, uses: list[HintUse], words: str | None
) -> None:
    said = managed.loss_of_hinted_records(report_of(recorded_bytes, uses))

    assert (said is None) == (words is None)
    assert (words or "") in (said or "")


@pytest.mark.parametrize(
    ("recorded_bytes", "paged_bytes", "words"),
    [
        (0, None, None),
        (0, 0, None),
        (9 * MIB, 10 * MIB, None),
        (9 * MIB, 10 * MIB + 2, "lower bounds: there are records of 9 MiB, and 10 MiB are"),
        (0, MIB, "records of 0 B, and 1 MiB are predicted"),
    ],
)
def test_what_faults_at_once_may_be_more_than_was_recorded(
    recorded_bytes: int, paged_bytes: int | None, words: str | None
) -> None:
    said = managed.loss_of_paged_records(report_of(recorded_bytes, []), paged_bytes)

    assert (said is None) == (words is None)
    assert (words or "") in (said or "")


def report_of(recorded_bytes: int, uses: list[HintUse]) -> MeasuredReport:
    def traffic(cause: Cause, moved_bytes: int) -> Traffic:
        return Traffic("to_device", cause, TensorClass.WEIGHTS, moved_bytes, 0.1, 1)

    return MeasuredReport(
        workload="net", hardware="GPU", policy="sft", planner="measured", step_s=1.0,
        traffic=(traffic("fault", recorded_bytes), traffic("copy", 9 * MIB)),
        memory_ops_s=0.0, memory_ops_bytes=0, memory_ops_count=0, fault_batches=0,
        collected=True, step_count=1, gpu_faults=0, cpu_faults=0, unattributed_bytes=0, notes=(),
        hints=HintReport(tuple(uses), 0, 0, 0) if uses else None,
    )  # fmt: skip


@pytest.mark.parametrize("planner", ["planned", "lookahead", "fault"])
def test_a_step_whose_records_were_lost_has_no_figures(
    planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.telemetry.profiler.LiveCollector", SilentCollector)
    monkeypatch.setattr(managed, "move_known", lambda: None)
    monkeypatch.setattr(managed, "loss_of_known_records", lambda _: None)
    inner = Training()
    training: Any = _Managed(inner, inner.manage(planner, 34 * MIB))
    inner.steps(9)
    assert training.manager.status().state == "running", training.manager.status()

    profile, hinted, notes = managed.profile_step(training, "net")

    training.manager.close()
    assert profile is None
    assert any("unified-memory figures are not known: there are" in note for note in notes)
    if planner == "fault":
        assert hinted is None
        return
    # What hints moved is known all the same.
    assert hinted is not None
    assert hinted.predicted_bytes is not None
    assert hinted.moved_bytes["to_device"] > 0
    ours = outcome("umem-planned", hinted=hinted)
    (noted,) = (it for it in details(made_up_run(ours)) if it.title == "Notes")
    assert "hinted bytes are the hint engine's own count" in noted.rows[0][-1]
    found = {it.name: it for it in differences(ours)}
    assert set(found) == {"hinted_to_device", "hinted_to_host"}
    assert found["hinted_to_device"].measured == hinted.moved_bytes["to_device"]
    assert found["hinted_to_host"].predicted == hinted.predicted_bytes["to_host"]


class KnownCollector(SilentCollector):
    """In place of CUPTI, which has handed over so many bytes that were hinted, and that faulted."""

    moved_bytes: tuple[int, int, int] = (0, 0, 0)
    moves: list[int]
    """When they moved."""

    def stop(self) -> tuple[MigrationRecords, int]:
        (moved_ns,) = self.moves
        row = (int(RecordKind.TO_DEVICE), moved_ns, moved_ns, 4096)
        causes = map(CAUSE_OF_NUMBER.index, ("hint", "fault", "speculation"))
        moved = zip(self.moved_bytes, causes, strict=True)
        return records_of([(*row, size, 0, cause, 0, 0) for size, cause in moved]), 0


@pytest.mark.parametrize(
    ("moved_bytes", "words"),
    [
        ((64 * MIB, 4 * MIB, 60 * MIB), None),
        ((58 * MIB, 0, 58 * MIB), None),
        (
            (0, 0, 0),
            "records of 0 B where 64 MiB were prefetched, and of 0 B where as much faulted",
        ),
        ((57 * MIB, 64 * MIB, 0), "where 64 MiB were prefetched"),
        ((64 * MIB, 27 * MIB, 30 * MIB), "records of 64 MiB where"),
    ],
)
def test_zeros_are_believed_only_of_a_profiler_that_sees_what_is_known(
    moved_bytes: tuple[int, int, int], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KnownCollector, "moved_bytes", moved_bytes)
    monkeypatch.setattr(KnownCollector, "moves", [], raising=False)
    monkeypatch.setattr("umem.telemetry.profiler.LiveCollector", KnownCollector)
    block = Range(4096, 2 * scratch.PART_BYTES)
    monkeypatch.setattr(scratch, "managed_on_host", lambda _: nullcontext(block))
    monkeypatch.setattr(
        scratch, "_move", lambda _: KnownCollector.moves.append(time.monotonic_ns())
    )
    # A step without a hint and without a plan has nothing else to be held against.
    training: Any = SimpleNamespace(model=None, manager=None, step=lambda: None)

    profile, hinted, notes = managed.profile_step(training, "net")

    assert hinted is None
    assert (profile is None) == (words is not None)
    assert any((words or "none") in note for note in notes) == (words is not None)
    # What was moved to see whether it is seen is not the step's.
    assert profile is None or profile.transfers == ()


def test_without_cupti_there_is_nothing_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCollector(SilentCollector):
        def start(self) -> None:
            raise UnsupportedError("no CUPTI here")

    monkeypatch.setattr("umem.telemetry.profiler.LiveCollector", NoCollector)
    block = Range(4096, 2 * scratch.PART_BYTES)
    monkeypatch.setattr(scratch, "managed_on_host", lambda _: nullcontext(block))
    monkeypatch.setattr(scratch, "_move", lambda _: None)

    training: Any = SimpleNamespace(model=None, manager=None, step=lambda: None)
    profile, _, notes = managed.profile_step(training, "net")

    assert profile is None
    assert not any("not known" in note for note in notes)


# --- what is on the device beside it ---


def test_state_on_the_host_is_taken_off_in_whole_blocks() -> None:
    ours = outcome("umem-optimizer-host", peak_bytes=6 * GIB, optimizer_state_bytes=2 * GIB)
    padded = ours.model_copy(update={"host_state_bytes": 3 * GIB})

    assert device_peak_bytes(padded) == 3 * GIB
    assert device_peak_bytes(ours) == 4 * GIB  # a file of earlier days
    bounded = padded.model_copy(update={"mapped_bytes_per_s": float(GIB)})
    assert lower_bound_s(made_up_run(outcome("stock"), bounded), "long") == 4.0


def test_paged_state_is_charged_as_if_it_were_on_the_device() -> None:
    paged = outcome("bnb-paged-adamw", peak_bytes=4 * GIB, unseen_bytes=3 * GIB)
    tensors = [torch.zeros(3), torch.zeros(5, dtype=torch.uint8)]
    manager = SimpleNamespace(paged_tensors=tensors)

    assert device_peak_bytes(paged) == 7 * GIB
    run = made_up_run(outcome("stock"), paged)
    assert [fits(run, paged, percent) for percent in (60.0, 70.0)] == [False, True]
    optimizer: Any = SimpleNamespace(is_paged=True, page_mng=manager)
    assert task._unseen_bytes([optimizer]) == 17
    assert task._unseen_bytes(on_the_cpu("stock", "sft").optimizers) is None


def test_state_that_is_prefetched_in_every_step_is_not_off_the_device() -> None:
    run = made_up_run(
        outcome("stock"),
        outcome("umem-optimizer-host", optimizer_state_bytes=GIB, mapped_bytes_per_s=16e9),
        outcome("bnb-paged-adamw"),
        outcome("torchao-offload"),
    )

    (grid,) = (it for it in details(run) if "off the device" in it.title)

    assert [row[0] for row in grid.rows] == [
        "stock", "umem-optimizer-host", "torchao-offload", "lower bound",
    ]  # fmt: skip


# --- DeepSpeed ---


def deepspeed_job(method: Method) -> TrainingJob:
    return TrainingJob(
        model=TINY,
        method=method,
        variant="deepspeed-offload",
        budget_bytes=None,
        steps=1,
        deterministic=False,
        managed_limit_bytes=0,
        device="cpu",
    )


def test_adapters_in_another_type_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_llama(TINY, "lora", CPU)
    adapters = [it for it in model.parameters() if it.requires_grad]
    assert {it.dtype for it in adapters} == {torch.float32}
    model.bfloat16()  # as DeepSpeed's engine does
    assert {it.dtype for it in adapters} == {torch.bfloat16}
    monkeypatch.setattr(task, "place_allocator", lambda _: pytest.fail("it was begun"))

    answer = task.measure(deepspeed_job("lora"))

    assert answer.state == "not comparable"
    assert "trains in float32" in (answer.reason or "")
    told: dict[str, Any] = {"workload": "long", "method": "lora", "variant": "deepspeed-offload"}
    told |= {"budget_percent": None, "budget_bytes": None}
    assert Outcome.model_validate(told | answer.model_dump(include={"state", "reason"})).reason
    assert step.incomparable(deepspeed_job("sft")) is None


def test_deepspeeds_buckets_are_not_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def initialize(config: dict[str, Any], **_: Any) -> tuple[Any, Any, None, None]:
        asked.append(config["zero_optimization"])
        return None, None, None, None

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")

    step.make_training(deepspeed_job("sft"))

    sizes = {asked[0][f"{name}_bucket_size"] for name in ("reduce", "allgather")}
    assert sizes == {step.BUCKET_ELEMENTS} == {50_000_000}


# --- before the processes ---


def test_few_layers_compile_all_that_plans_need() -> None:
    compile_planner.compile_planner()
    run_step: Any = _engine.run_step
    compiled = len(run_step.signatures)
    check_trace(compile_planner._few_layers(), "few layers")

    for planner in ("planned", "lookahead", "fault"):
        inner = Training()
        manager = inner.manage(planner)
        inner.steps(9)
        assert manager.status().state == "running", manager.status()
        manager.close()

    assert len(run_step.signatures) == compiled >= 1


def test_a_build_that_is_not_ready_is_ended_with_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "deepspeed" / "ops" / "op_builder"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import pathlib, time\n"
        "class CPUAdamBuilder:\n"
        "    def load(self, verbose):\n"
        f"        lock = pathlib.Path({str(tmp_path / 'lock')!r})\n"
        "        lock.touch()\n"
        "        try:\n"
        "            time.sleep(60)\n"
        "        finally:\n"
        "            lock.unlink()\n"
        f"            pathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    end_s = time.monotonic() + 20

    with building_deepspeed(wanted=True):
        while not (tmp_path / "lock").exists() and time.monotonic() < end_s:
            time.sleep(0.02)
        assert (tmp_path / "lock").exists()

    assert (tmp_path / "ended").exists()
    assert not (tmp_path / "lock").exists()
    with building_deepspeed(wanted=False):
        assert not (tmp_path / "lock").exists()


def test_other_budgets_and_variants_keep_stock_first() -> None:
    asked: TrainingSettings = settings(
        variants=("umem-fault", "save-on-cpu"), budgets_percent=(100.0, 45.0), methods=("lora",)
    )

    assert [str(it) for it in configurations(asked)] == [
        "long, lora, stock",
        "long, lora, save-on-cpu",
        "long, lora, umem-fault at 100 %",
        "long, lora, umem-fault at 45 %",
    ]
