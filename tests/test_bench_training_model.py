"""The model of the training benchmark, what umem says of its training, and the order of a run."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from managed_training import MIB, Training
from training_runs import TINY, settings

from umem.bench.train import compile_planner, managed, step, task
from umem.bench.train.build_deepspeed import building_deepspeed
from umem.bench.train.jobs import TrainingJob
from umem.bench.train.model import build_llama
from umem.bench.train.order import WORKLOADS, configurations
from umem.bench.train.results import Method, TrainingSettings, Variant
from umem.classes import TensorClass
from umem.cuda import _bindings
from umem.report import Cause, HintReport, HintUse, MeasuredReport, Traffic
from umem.simulator import _engine
from umem.telemetry import MigrationRecords, records_of
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
    model.network.lm_head.register_forward_hook(lambda *it: rows.append(it[2].shape[1]))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        model(tokens, tokens)

    assert rows == [TINY.loss_chunk_tokens] * 2
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
    ("planner", "budget_bytes", "state", "planned_steps"),
    [
        ("planned", 40 * MIB, "running", 11),
        ("fault", 40 * MIB, "running", 2),
        ("planned", 6 * MIB, "off", 0),
    ],
)
def test_warming_up_ends_when_the_manager_has_decided(
    planner: str, budget_bytes: int, state: str, planned_steps: int
) -> None:
    inner = Training()
    training: Any = _Managed(inner, inner.manage(planner, budget_bytes))
    losses: list[torch.Tensor] = []

    count = task._warm_up(training, losses)

    status = training.manager.status()
    figures = managed.manager_figures(status, status, 5)
    training.manager.close()
    assert status.state == figures.state == state
    assert count == len(losses)
    if state == "running":
        assert figures.steps + figures.strays == planned_steps
        assert figures.predicted_step_s is not None
        assert figures.wait_s == 0
    else:
        assert count <= 8
        assert "and the device budget is 6 MiB" in figures.reason


def test_residency_is_looked_at_on_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = iter(range(1, 1000))
    asked: list[int] = []

    def residency() -> dict[TensorClass, int]:
        asked.append(next(phases))
        in_backward = torch._C._current_graph_task_id() != -1
        return {TensorClass.WEIGHTS: 5, TensorClass.ACTIVATIONS: 7 if in_backward else 1}

    monkeypatch.setattr("umem.executor.residency", residency)
    model = build_llama(TINY, "sft", CPU)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, TINY.vocabulary, (2, TINY.tokens))

    class _Steps:
        def step(self) -> None:
            model(tokens, tokens).backward()
            optimizer.step()

    training: Any = _Steps()
    training.model, training.optimizers = model, (optimizer,)
    most = managed.resident_bytes(training)

    assert most == 12
    looks = 2 * (TINY.layers * 2 + len(list(model.parameters())) + 2)
    assert len(asked) == looks
    training.step()
    assert len(asked) == looks


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
    status: Any = SimpleNamespace(step_in_backward=in_backward)

    words = "the optimizer's step stayed behind the backward pass"
    assert task._notes(variant, status) == ((words,) if is_noted else ())


class SilentCollector:
    """In place of CUPTI, which has handed over nothing where gigabytes moved."""

    def start(self) -> None:
        pass

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def stop(self) -> tuple[MigrationRecords, int]:
        return records_of([]), 0


def hinted(op: str, moved_bytes: int) -> HintUse:
    none: dict[str, Any] = {it.name: 0 for it in fields(HintUse)}
    return replace(
        HintUse(**none), op=op, tensor_class=TensorClass.WEIGHTS, moved_bytes=moved_bytes
    )


@pytest.mark.parametrize(
    ("recorded_bytes", "uses", "paged_bytes", "words"),
    [
        (0, [hinted("prefetch", 2 * MIB)], None, "records of 0 B, and 2 MiB moved, by the hint"),
        (MIB - 1, [hinted("prefetch", MIB), hinted("evict", MIB)], None, "and 2 MiB moved, by the"),
        (MIB, [hinted("prefetch", MIB), hinted("evict", MIB)], None, None),
        # Copies, and pages that stay and are mapped, are no transfers to the driver.
        (0, [hinted("copy_in", MIB), hinted("copy_out", MIB), hinted("advise", MIB)], None, None),
        (0, [], None, None),
        (0, [], 0, None),
        (MIB, [], 2 * MIB, None),
        (MIB, [], 2 * MIB + 1, "records of 1 MiB, and 2 MiB moved, as predicted of demand paging"),
    ],
)
def test_lost_records_are_not_taken_for_zeros(
    recorded_bytes: int, uses: list[HintUse], paged_bytes: int | None, words: str | None
) -> None:
    def traffic(cause: Cause, moved_bytes: int) -> Traffic:
        return Traffic("to_device", cause, TensorClass.WEIGHTS, moved_bytes, 0.1, 1)

    report = MeasuredReport(
        workload="net", hardware="GPU", policy="sft", planner="measured", step_s=1.0,
        traffic=(traffic("fault", recorded_bytes), traffic("copy", 9 * MIB)),
        memory_ops_s=0.0, memory_ops_bytes=0, memory_ops_count=0, fault_pages=0,
        collected=True, step_count=1, gpu_faults=0, cpu_faults=0, unattributed_bytes=0, notes=(),
        hints=HintReport(tuple(uses), 0, 0, 0) if uses else None,
    )  # fmt: skip

    said = managed.loss_of_records(report, paged_bytes)

    assert (said is None) == (words is None)
    assert (words or "") in (said or "")


@pytest.mark.parametrize("planner", ["lookahead", "fault"])
def test_a_step_whose_records_were_lost_has_no_figures(
    planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.telemetry._entry.CuptiCollector", SilentCollector)
    inner = Training()
    training: Any = _Managed(inner, inner.manage(planner, 34 * MIB))
    inner.steps(9)
    assert training.manager.status().state == "running", training.manager.status()

    profile, notes = managed.profile_step(training, "net")

    training.manager.close()
    assert profile is None
    assert any("unified-memory figures are not known: CUPTI handed" in note for note in notes)


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


def test_a_run_begins_with_what_matters_most() -> None:
    every = configurations(settings(name="long").model_copy(update={
        "workloads": tuple(WORKLOADS.values())
    }))  # fmt: skip

    assert [str(it) for it in every[:9]] == [
        "long, sft, stock",
        "long, sft, umem-planned at 60 %",
        "long, sft, umem-fault at 60 %",
        "long, sft, umem-backward-step at 60 %",
        "long, sft, umem-lookahead at 60 %",
        "long, sft, umem-planned at 30 %",
        "long, sft, umem-backward-step at 30 %",
        "long, sft, backward-step",
        "long, sft, umem-optimizer-host",
    ]
    words = list(map(str, every))
    assert len(set(words)) == len(words) == 51
    for name in WORKLOADS:
        for method in ("sft", "lora"):
            own = [it for it in words if it.startswith(f"{name}, {method}")]
            assert own[0] == f"{name}, {method}, stock"
    assert words.index("long, sft, deepspeed-offload") > words.index("activations, lora, stock")
    at_most = [it for it in every if it.percent == 100]
    assert {(it.workload, it.method, it.variant) for it in at_most} == {
        ("long", method, variant)
        for method in ("sft", "lora")
        for variant in ("umem-planned", "umem-backward-step")
    }
    assert not any("lora, umem-optimizer-host" in it for it in words)
    # Only what was measured long after the first can show that the machine drifts.
    assert sorted(words[-4:]) == sorted(
        f"{name}, {method}, stock-again" for name in WORKLOADS for method in ("sft", "lora")
    )


def test_other_budgets_and_variants_keep_stock_first() -> None:
    asked: TrainingSettings = settings(
        variants=("umem-fault", "save-on-cpu"), budgets_percent=(100.0, 45.0), methods=("lora",)
    )

    assert [str(it) for it in configurations(asked)] == [
        "long, lora, stock",
        "long, lora, umem-fault at 45 %",
        "long, lora, save-on-cpu",
    ]
