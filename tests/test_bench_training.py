"""The training benchmark: the model, what is measured of it, real processes on the CPU, tables."""

from __future__ import annotations

import importlib
import math
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from managed_training import MIB, Training
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_runs import GIB, MIGRATION, TINY, made_up_run, result, settings
from typer.testing import CliRunner
from umem_bench.cli import app
from umem_bench.compile_planner import compile_planner, small_step
from umem_bench.llama import ChunkedLoss, build_llama
from umem_bench.results import (
    BUDGETED,
    METHODS,
    Method,
    Run,
    TrainingResult,
    Variant,
    median,
    read_results,
    write_results,
)
from umem_bench.training import measure as measuring
from umem_bench.training import migration, variants
from umem_bench.training.run import cells, run_training
from umem_bench.training.status import (
    has_followed,
    is_settled,
    predicted_step_s,
    status_notes,
    why_off,
)
from umem_bench.training.tables import (
    CARD_MARGIN_BYTES,
    checks,
    device_peak_bytes,
    fits,
    heading,
    tables,
    tokens_per_s,
    working_set_bytes,
)
from umem_bench.training.variants import WORKLOADS, TrainingJob, make_training, place_allocator
from umem_bench.workers import Worker, WorkerError

from umem import TensorClass, UmemError, UnsupportedError, load_policy
from umem.core.report import HintReport, HintUse, MeasuredReport, Traffic
from umem.policy import class_rule
from umem.streaming import StreamedStatus
from umem.streaming.step.step import StepCounts
from umem.streaming.tune.states import TuningState, TuningStatus
from umem.trace import check_trace

CPU = torch.device("cpu")
FLOAT32 = TINY.model_copy(update={"weights": "float32"})
PAGE = 64 << 10
MARGIN = CARD_MARGIN_BYTES
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 0, reason="it is about a machine without a GPU"
)


def chunked(method: Method = "sft", **changes: Any) -> ChunkedLoss:
    shape = TINY.model_copy(update=changes)
    return ChunkedLoss(build_llama(shape, method, CPU), shape.loss_chunk_tokens)


def job(variant: Variant, method: Method = "sft", **changes: Any) -> TrainingJob:
    asked: dict[str, Any] = {
        "model": TINY,
        "method": method,
        "variant": variant,
        "budget_bytes": None,
        "steps": 1,
        "deterministic": False,
        "managed_limit_bytes": GIB,
        "device": "cpu",
    }
    return TrainingJob.model_validate(asked | changes)


# ---- the model ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk_tokens", [5, 32])
def test_the_loss_in_chunks_is_that_of_transformers(method: Method, chunk_tokens: int) -> None:
    model = chunked(method, loss_chunk_tokens=chunk_tokens)
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
    assert len(model.layers) == TINY.layers


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    model = chunked()
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
        model = chunked(checkpoint=checkpoint).train()
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


# ---- the variants ----


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_steps_in_the_backward_pass_do_the_arithmetic_of_stock(method: Method) -> None:
    stock, ours = make_training(job("stock", method)), make_training(job("backward-step", method))

    losses, own_losses = ([float(it.step()).hex() for _ in range(3)] for it in (stock, ours))

    assert own_losses == losses
    assert losses[0] != losses[-1]
    pairs = zip(ours.model.parameters(), stock.model.parameters(), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)
    assert len(ours.optimizers) == sum(it.requires_grad for it in ours.model.parameters())


def test_no_gradient_waits_for_the_end_of_the_backward_pass() -> None:
    training = make_training(job("backward-step"))
    weights = list(training.model.parameters())
    held: list[int] = []
    for weight in weights:  # after the training's own hook
        weight.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(it.grad is not None for it in weights))
        )

    training.step()

    assert held == [0] * len(weights)


@needs_no_gpu
@pytest.mark.parametrize("variant", [*BUDGETED, "umem-optimizer-host", "save-on-cpu"])
def test_umem_is_given_planner_and_budget(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UMEM_PLANNER", "UMEM_DEVICE_BUDGET", "UMEM_POLICY", "UMEM_MANAGED_LIMIT"):
        monkeypatch.setenv(name, "another's")

    with pytest.raises(UmemError):
        place_allocator(job(variant, budget_bytes=6000, device="cuda"))

    assert os.environ.get("UMEM_PLANNER") == BUDGETED.get(variant)
    assert os.environ.get("UMEM_DEVICE_BUDGET") == ("6000" if variant in BUDGETED else None)
    assert os.environ["UMEM_MANAGED_LIMIT"] == str(GIB)
    assert "UMEM_POLICY" not in os.environ


def test_the_policy_for_state_on_the_host_says_so() -> None:
    policy = load_policy(variants.OPTIMIZER_ON_HOST)

    state = class_rule(policy, TensorClass.OPTIMIZER_STATE)
    assert (state.placement, state.mechanism, state.accessed_by_device) == ("host", "map", True)
    assert class_rule(policy, TensorClass.WEIGHTS).placement == "device"
    assert policy.device_budget is None


def test_variants_that_cannot_be_compared_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("bitsandbytes", "torchao.optim", "deepspeed"):
        monkeypatch.setitem(sys.modules, package, None)

    for variant, package in (
        ("bnb-paged-adamw", "bitsandbytes"),
        ("torchao-offload", "torchao"),
        ("deepspeed-offload", "deepspeed"),
    ):
        (answer,) = measuring.measure(job(variant))  # type: ignore[arg-type]
        assert answer["state"] == "not installed"
        assert package in answer["reason"]
    # DeepSpeed's engine makes adapters bfloat16.
    (answer,) = measuring.measure(job("deepspeed-offload", "lora"))
    assert answer["state"] == "not comparable"
    assert "float32" in answer["reason"]
    (answer,) = measuring.measure(job("deepspeed-offload", model=FLOAT32))
    assert answer["state"] == "not comparable"
    for variant in ("save-on-cpu", "umem-backward-step", "torchao-offload"):
        (answer,) = measuring.measure(job(variant, trainer_batches=2))  # type: ignore[arg-type]
        assert (answer["state"], "Trainer" in answer["reason"]) == ("not comparable", True)


@pytest.mark.parametrize("variant", ["stock", "backward-step"])
def test_float32_weights_are_trained_under_autocast(variant: Variant) -> None:
    training = make_training(job(variant, model=FLOAT32))
    seen: set[torch.dtype] = set()
    training.model.layers[0].mlp.register_forward_hook(lambda *it: seen.add(it[2].dtype))

    losses = [float(training.step()) for _ in range(3)]

    assert seen == {torch.bfloat16}
    assert {it.dtype for it in training.model.parameters()} == {torch.float32}
    assert losses == sorted(losses, reverse=True)


def test_the_trainer_accumulates_and_clips_and_waits_after_each_step() -> None:
    pytest.importorskip("accelerate")
    training = make_training(job("stock", model=FLOAT32, trainer_batches=2))
    weights = list(training.model.parameters())
    batches: list[torch.Size] = []
    norms: list[float] = []

    def stepped(*_: Any) -> None:
        gradients: list[Any] = [it.grad for it in weights]
        norms.append(float(torch.cat([it.flatten() for it in gradients]).norm()))

    training.model.register_forward_pre_hook(
        lambda _, __, given: batches.append(given["input_ids"].shape), with_kwargs=True
    )
    hook = register_optimizer_step_pre_hook(stepped)
    with training.around:
        for steps in (1, 2, 3):
            loss = float(training.step())
            assert batches == [(TINY.batch, TINY.tokens)] * 2 * steps
            assert len(norms) == steps
            # Random weights expect each token alike.
            assert loss == pytest.approx(math.log(TINY.vocabulary), abs=0.1)
    hook.remove()

    assert max(norms) == pytest.approx(1.0, abs=1e-3)
    assert len(norms) == 3
    assert "Trainer" not in {it.name for it in threading.enumerate()}


def test_an_error_in_the_trainer_is_the_steps_error() -> None:
    pytest.importorskip("accelerate")
    training = make_training(job("stock", model=FLOAT32, trainer_batches=2))

    def fail(*_: Any) -> None:
        raise MemoryError("full")

    training.model.register_forward_pre_hook(fail)
    with training.around, pytest.raises(MemoryError, match="full"):
        training.step()


def test_deepspeed_has_small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def initialize(config: dict[str, Any], **_: Any) -> tuple[Any, Any, None, None]:
        asked.append(config["zero_optimization"])
        return None, None, None, None

    # When it is imported, transformers looks for a package that was installed.
    importlib.import_module("transformers.models.llama.modeling_llama")
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")

    make_training(job("deepspeed-offload"))

    sizes = {asked[0][f"{name}_bucket_size"] for name in ("reduce", "allgather")}
    assert sizes == {variants.DEEPSPEED_BUCKET_ELEMENTS}


# ---- steps under umem's manager ----


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


@pytest.mark.slow
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

    measuring.warm_up(training, losses)

    status = training.manager.status()
    training.manager.close()
    assert status.state == state
    if state == "running":
        # Under every planner alike.
        planned_steps = status.steps + status.diverged_steps
        assert planned_steps == measuring.ARRANGING_STEPS
    else:
        assert len(losses) <= 8
        assert "6 MiB" in status.reason


class _Planner:
    """A manager whose steps may diverge."""

    def __init__(self, *, diverged: Sequence[int] = ()) -> None:
        self.diverged = diverged
        self.state = "running"
        self.steps = 0

    def step(self) -> torch.Tensor:
        self.steps += 1
        return torch.tensor(1.0)

    def status(self) -> Any:
        return SimpleNamespace(
            state=self.state,
            diverged_steps=sum(it <= self.steps for it in self.diverged),
        )


def test_a_plan_was_running_only_if_every_timed_step_followed_it() -> None:
    class Failing(_Planner):
        def step(self) -> torch.Tensor:
            self.state = "off" if self.steps == 2 else self.state
            return super().step()

    recording = _Planner()
    recording.state = "recording"
    for manager, expected in (
        (_Planner(diverged=(1,)), True),
        (_Planner(diverged=(1, 3)), False),
        (recording, False),
        (Failing(), False),
    ):
        training: Any = SimpleNamespace(manager=manager, step=manager.step)
        losses = [training.step()]
        timed = measuring.time_steps(training, 3, losses, None)
        assert (len(timed.steps_s), len(losses)) == (3, 4)
        assert timed.plan_running is expected


def tuned(state: TuningState, plans: int = 1, **more: Any) -> TuningStatus:
    """What a training with streamed state says of its plan."""
    plain: dict[str, Any] = {it.name: 0 for it in fields(TuningStatus)}
    return TuningStatus(**{**plain, "state": state, "plans": plans, "predicted_s": 0.5, **more})


def streamed(tuning: TuningStatus | None, *, is_settled: bool = True) -> StreamedStatus:
    return StreamedStatus(
        state_bytes=0,
        slots_bytes=0,
        counts=StepCounts(),
        step_in_backward=False,
        is_settled=is_settled,
        measured_s=None,
        tuning=tuning,
    )


def test_streamed_state_is_waited_for_and_has_a_plan() -> None:
    measured, planned = (streamed(tuned(it)) for it in (TuningState.MEASURING, TuningState.PLANNED))
    again, full = streamed(tuned(TuningState.PLANNED, 2)), streamed(tuned(TuningState.NO_PLAN_FITS))
    assert not is_settled(streamed(tuned(TuningState.MEASURING), is_settled=False))
    assert is_settled(planned)
    assert has_followed(planned, planned)
    for before, after in ((measured, planned), (planned, again), (full, full)):
        assert not has_followed(before, after)
    assert not has_followed(streamed(None), streamed(None))
    assert predicted_step_s(planned) == 0.5
    assert status_notes(planned) == ()
    assert "no plan fits" in status_notes(full)[0]
    spilled = streamed(tuned(TuningState.PLANNED, spilled_bytes=6 * MIB))
    assert "6 MiB" in status_notes(spilled)[0]
    assert why_off(full) == ""


@pytest.mark.parametrize(
    ("manager", "words"),
    [
        (None, "no manager"),
        (streamed(tuned(TuningState.PLANNED)), ""),
        (replace(streamed(tuned(TuningState.PLANNED)), counts=StepCounts(in_line=7)), "7 steps"),
    ],
)
def test_a_loop_that_umem_manages_by_itself_says_what_became_of_it(
    manager: StreamedStatus | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        steps.append(torch.tensor(1.0))
        return steps[-1]

    def find() -> Any:
        assert len(steps) == 1  # its optimizer is not known before
        return manager and SimpleNamespace(status=lambda: manager)

    training = variants.Training(torch.nn.Linear(2, 2), (), step)
    monkeypatch.setattr(measuring, "place_allocator", lambda _: None)
    monkeypatch.setattr(measuring, "make_training", lambda _: training)
    monkeypatch.setattr(measuring, "find_manager", find)

    answer = next(measuring.measure(job("umem", budget_bytes=GIB, trainer_batches=2)))

    assert answer["state"] == "measured"
    assert answer["plan_running"] is (None if manager is None else True)
    assert len(answer["notes"]) == bool(words)
    assert words in str(answer["notes"])


def use(op: str, moved_bytes: int, tensor_class: TensorClass = TensorClass.WEIGHTS) -> HintUse:
    none: dict[str, Any] = {it.name: 0 for it in fields(HintUse)}
    return replace(HintUse(**none), op=op, tensor_class=tensor_class, moved_bytes=moved_bytes)


@pytest.mark.parametrize(
    ("recorded_bytes", "uses", "paged_bytes", "words"),
    [
        (0, [use("prefetch", 2 * MIB)], None, "not known: there are records of 0 B, and 2 MiB"),
        (MIB - 1, [use("prefetch", MIB), use("evict", MIB)], None, "and 2 MiB moved"),
        (MIB, [use("prefetch", MIB), use("evict", MIB)], None, ""),
        # Frozen weights come, and are dropped.
        (MIB, [use(it, 2 * MIB, TensorClass.FROZEN_WEIGHTS) for it in ("prefetch", "evict")],
         None, ""),
        # Copies and advice are no transfers to the driver.
        (0, [use("copy_in", MIB), use("copy_out", MIB), use("advise", MIB)], None, ""),
        (0, [], 0, ""),
        (9 * MIB, [], 10 * MIB, ""),
        (9 * MIB, [], 10 * MIB + 2, "lower bounds: there are records of 9 MiB, and 10 MiB"),
    ],
)  # fmt: skip
def test_lost_records_are_not_taken_for_zeros(
    recorded_bytes: int, uses: list[HintUse], paged_bytes: int | None, words: str
) -> None:
    report = MeasuredReport(
        workload="net", hardware="GPU", policy="sft", planner="measured", step_s=1.0,
        traffic=(
            Traffic("to_device", "fault", TensorClass.WEIGHTS, recorded_bytes, 0.1, 1),
            Traffic("to_device", "copy", TensorClass.WEIGHTS, 9 * MIB, 0.1, 1),
        ),
        memory_ops_s=0.0, memory_ops_bytes=0, memory_ops_count=0, fault_batches=0,
        collected=True, step_count=1, gpu_faults=0, cpu_faults=0, unattributed_bytes=0, notes=(),
        hints=HintReport(tuple(uses), 0, 0, 0) if uses else None,
    )  # fmt: skip

    said, is_lower_bound = migration.missing_records(report, paged_bytes)

    assert words in said
    assert bool(said) == bool(words)
    assert is_lower_bound == ("lower bounds" in words)


@needs_no_gpu
def test_without_a_profiler_the_step_has_no_migration() -> None:
    training: Any = SimpleNamespace(model=None, manager=None, step=lambda: None)

    found, notes = migration.profile_step(training, "net")

    assert found is None
    assert not any("not known" in note for note in notes)


def test_the_small_step_compiles_what_plans_need() -> None:
    check_trace(small_step(), "small step")
    compile_planner()


# ---- a run ----


@needs_no_gpu
def test_without_a_gpu_it_says_so() -> None:
    done = CliRunner().invoke(app, ["training"])

    assert isinstance(done.exception, UnsupportedError)
    assert "umem doctor" in str(done.exception)


@pytest.mark.parametrize(
    "option",
    ["--workloads=medium", "--methods=qlora", "--variants=vllm", "--budgets=0", "--budgets=120",
     "--budgets=60,half", "--steps=0", "--batch=0", "--seconds-limit=0"],
)  # fmt: skip
def test_unknown_choices_end_with_status_2(option: str) -> None:
    assert CliRunner().invoke(app, ["training", option]).exit_code == 2


def test_stock_comes_first_and_once_more_at_the_end() -> None:
    asked = settings().model_copy(update={"workloads": tuple(WORKLOADS.values())})

    order = cells(asked)

    assert len(set(order)) == len(order) == 69
    for name, workload in WORKLOADS.items():
        for method in workload.methods:
            own = [it for it in order if it[:2] == (name, method)]
            assert own[0] == (name, method, "stock", None)
    assert {it[2] for it in order[-4:]} == {"stock-again"}
    assert ("long", "lora", "umem-optimizer-host", None) not in order
    chosen: dict[str, Any] = {"variants": ("umem-fault", "save-on-cpu"), "methods": ("lora",)}
    assert cells(settings(**chosen, budgets_percent=(45.0,))) == [
        ("long", "lora", "stock", None),
        ("long", "lora", "umem-fault", 45.0),
        ("long", "lora", "save-on-cpu", None),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_processes_train_the_same_model_and_say_what_they_cannot_do(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    said: list[str] = []
    asked = settings(variants=("stock", "umem-planned", "save-on-cpu"), deterministic=True)
    begun = settings(
        TINY.model_copy(update={"checkpoint": True}), methods=("sft",), deterministic=True
    )

    run = run_training(asked, said.append, lambda it: write_results(it, path), device="cpu")
    again = run_training(begun, said.append, device="cpu")

    assert read_results(path) == run
    first, adapters = (it for it in run.trainings if it.variant == "stock")
    for it in (first, adapters):
        losses = [float.fromhex(loss) for loss in it.losses_hex]
        assert it.state == "measured"
        assert len(it.steps_s) == 3
        assert losses == sorted(losses, reverse=True)
        assert len(losses) == measuring.KEPT_LOSSES
        assert it.process_s > sum(it.steps_s)
    # The same seed gives the same bits, with checkpoints too, and adapters begin as the model that
    # they are put on.
    assert again.trainings[0].losses_hex == first.losses_hex
    assert adapters.losses_hex[0] == first.losses_hex[0] != adapters.losses_hex[1]
    # The CPU counts no peak, so that no budget is a share of it.
    budgeted = [it for it in run.trainings if it.variant == "umem-planned"]
    assert {(it.state, "not measured" in str(it.reason)) for it in budgeted} == {("left out", True)}
    saving = next(it for it in run.trainings if it.variant == "save-on-cpu")
    assert (saving.state, "needs a GPU" in str(saving.reason)) == ("failed", True)
    assert len(said) == len(run.trainings) + 1
    assert " ms a step" in said[0]


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("name", ["short", "trainer"])
def test_processes_train_float32_weights_by_either_loop(name: str) -> None:
    batches = 2 if name == "trainer" else None
    if batches:
        pytest.importorskip("accelerate")
    asked = settings(
        FLOAT32, name=name, trainer_batches=batches, methods=("sft",), deterministic=True
    )

    first = run_training(asked, lambda _: None, device="cpu")

    (stock,) = first.trainings
    assert (stock.workload, stock.state, len(stock.steps_s)) == (name, "measured", 3)
    assert len(stock.losses_hex) == measuring.KEPT_LOSSES
    if batches:  # the other loop repeats in the test above
        again = run_training(asked, lambda _: None, device="cpu")
        assert stock.losses_hex == again.trainings[0].losses_hex
    # A step of either loop is of all its batches.
    step_s = median(stock.steps_s)
    assert step_s
    assert round(tokens_per_s(first, stock) * step_s) == TINY.batch * TINY.tokens * (batches or 1)
    assert "115,008 parameters in 2 layers, float32" in next(tables(first)).title


class _ToldWorker(Worker):
    """In place of a process: answers by variant."""

    answers: dict[str, Any]
    started: list[str]

    def __init__(self, _: object, job: Any, preload: Sequence[str]) -> None:
        self.variant = job.variant
        self.started.append(job.variant)

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, limit_s: float) -> Any:
        answer = self.answers[self.variant]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[_ToldWorker]:
    measured = {"state": "measured", "steps_s": (0.1,), "peak_allocated_bytes": 10 * GIB}
    _ToldWorker.answers = dict.fromkeys(("stock", "umem-planned", "save-on-cpu"), measured)
    _ToldWorker.started = []
    monkeypatch.setattr("umem_bench.rows.Worker", _ToldWorker)
    return _ToldWorker


def test_budgets_are_shares_of_stocks_peak(told: type[_ToldWorker]) -> None:
    run = run_training(
        settings(variants=("umem-planned",), methods=("sft",)), lambda _: None, device="cpu"
    )

    shares = [it.budget_bytes and it.budget_bytes / GIB for it in run.trainings]
    assert shares == [None, 10, 6, 3]


def test_the_planner_is_compiled_only_where_pages_are_planned(
    told: type[_ToldWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = told.started
    monkeypatch.setattr("umem_bench.training.run.compile_planner", lambda: order.append("compiled"))
    streamed: tuple[Variant, ...] = ("umem", "umem-backward-step", "save-on-cpu")
    for variant in streamed:
        told.answers[variant] = told.answers["stock"]
    sft: dict[str, Any] = {"methods": ("sft",), "budgets_percent": (60.0,)}

    run_training(settings(variants=streamed, **sft), lambda _: None, device="cpu")
    assert order == ["stock", "umem", "umem-backward-step", "save-on-cpu"]
    order.clear()
    run_training(settings(variants=("umem-planned",), **sft), lambda _: None, device="cpu")
    assert order == ["stock", "compiled", "umem-planned"]
    order.clear()
    run_training(
        settings(variants=("umem-planned",), **sft), lambda _: None, device="cpu", seconds_limit=0
    )
    assert "compiled" not in order


def test_a_variant_that_hangs_is_not_waited_for_twice(told: type[_ToldWorker]) -> None:
    told.answers["save-on-cpu"] = WorkerError("no answer within 240 s", timed_out=True)
    asked = settings(variants=("save-on-cpu",))

    run = run_training(asked, lambda _: None, device="cpu")
    later = run_training(asked, lambda _: None, device="cpu", earlier=run)

    states = [(it.method, it.variant, it.state) for it in run.trainings]
    assert states == [
        ("sft", "stock", "measured"), ("sft", "save-on-cpu", "failed"),
        ("lora", "stock", "measured"), ("lora", "save-on-cpu", "left out"),
    ]  # fmt: skip
    assert "no answer within 240 s" in str(run.trainings[3].reason)
    # A later call tries it once more.
    assert told.started == ["stock", "save-on-cpu", "stock", "save-on-cpu"]
    assert len(later.trainings) == 4


def test_time_that_is_not_left_leaves_out_and_continuing_runs_it(told: type[_ToldWorker]) -> None:
    asked = settings(variants=("save-on-cpu",), methods=("sft",))
    some = made_up_run(result("stock", process_s=9.0), variants=("save-on-cpu",))
    first = run_training(asked, lambda _: None, device="cpu", seconds_limit=0.0)
    spent = Run(first.header, (*first.trainings[:1], result("save-on-cpu", state="left out")))

    short = run_training(asked, lambda _: None, device="cpu", earlier=spent, seconds_limit=-1.0)
    whole = run_training(asked, lambda _: None, device="cpu", earlier=short)

    assert [it.state for it in short.trainings] == ["measured", "left out"]
    assert [it.state for it in whole.trainings] == ["measured", "measured"]
    assert run_training(asked, lambda _: None, device="cpu", earlier=whole) == whole
    with pytest.raises(UmemError, match=r"cannot be continued.*machine.*Made-up GPU"):
        run_training(asked, lambda _: None, device="cpu", earlier=some)


def test_no_process_is_started_beside_one_that_cannot_be_ended(
    told: type[_ToldWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told, "stuck", "process 1234 did not end")

    run = run_training(settings(), lambda _: None, device="cpu")

    assert told.started == []
    assert {(it.state, it.reason) for it in run.trainings} == {
        ("left out", "process 1234 did not end")
    }


def test_workloads_have_their_own_methods_unless_others_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def run(asked: Any, *_: object, **__: object) -> Run:
        seen.append([it.methods for it in asked.workloads])
        return made_up_run()

    monkeypatch.setattr("umem_bench.cli.trainings.run_training", run)

    for words in ([], ["--methods", "lora"]):
        CliRunner().invoke(app, ["training", "--workloads", "activations,trainer", *words])

    assert seen == [[METHODS, ("sft",)], [("lora",)] * 2]


def test_the_command_goes_on_with_a_file_and_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    before, after = made_up_run(result("stock")), made_up_run()
    write_results(before, path)
    seen: list[Any] = []

    def run(_: object, __: object, keep: Any, *, seconds_limit: float, earlier: Run) -> Run:
        seen.append((seconds_limit, earlier))
        keep(after)
        return after

    monkeypatch.setattr("umem_bench.cli.trainings.run_training", run)

    done = CliRunner().invoke(app, ["training", "--continue", str(path)])

    assert done.exit_code == 0, done.output
    assert seen == [(280, before)]
    assert read_results(path) == after


# ---- tables, picture and limits ----


@pytest.mark.parametrize(
    ("entry", "fitted"),
    [
        (result("stock"), [100]),
        (result("save-on-cpu", peak_bytes=6 * GIB + PAGE - 1), [100, 60]),
        (result("save-on-cpu", peak_bytes=6 * GIB + PAGE), [100]),
        (result("torchao-offload", peak_bytes=3 * GIB), [100, 60, 30]),
        # Its optimizer's state is on the host, and bitsandbytes' is not counted by torch.
        (result("umem-optimizer-host", host_state_bytes=4 * GIB), [100, 60]),
        (result("bnb-paged-adamw", peak_bytes=4 * GIB, paged_state_bytes=3 * GIB), [100]),
        # It keeps to its budget, whatever is allocated, unless it is seen not to.
        (result("umem-planned", peak_bytes=12 * GIB, percent=60.0), [100, 60]),
        (result("umem-planned", percent=60.0, resident_bytes=6 * GIB + PAGE), []),
        (result("rmm-pool", peak_bytes=None), []),
        (result("save-on-cpu", peak_bytes=GIB, state="failed", steps_s=()), []),
    ],
)
def test_a_variant_fits_the_budgets_that_its_peak_fits(
    entry: TrainingResult, fitted: list[float]
) -> None:
    run = made_up_run(result("stock"), entry)

    assert [it for it in (100, 60, 30) if fits(run, entry, it)] == fitted
    on_host = result("umem-optimizer-host", host_state_bytes=3 * GIB)
    assert device_peak_bytes(run, on_host) == 7 * GIB


@pytest.mark.parametrize(
    ("entry", "fitted"),
    [
        # Stock's tensors take 10 GiB of the card, and its process 1 more.
        (result("stock", card_peak_bytes=11 * GIB, outside_bytes=GIB), [100]),
        (result("save-on-cpu", card_peak_bytes=7 * GIB + MARGIN - 1), [100, 60]),
        (result("save-on-cpu", card_peak_bytes=7 * GIB + MARGIN), [100]),
        # Whatever the allocator of a variant counts.
        (result("bnb-paged-adamw", card_peak_bytes=9 * GIB, paged_state_bytes=0), [100]),
        (result("rmm-pool", peak_bytes=None, card_peak_bytes=4 * GIB), [100, 60, 30]),
        (result("umem-planned", percent=60.0, card_peak_bytes=7 * GIB), [100, 60]),
        (result("umem-planned", percent=60.0, card_peak_bytes=7 * GIB + MARGIN), []),
        # A further context of umem's is no excuse.
        (result("umem-planned", percent=60.0, card_peak_bytes=8 * GIB, base_bytes=2 * GIB), []),
    ],
)
def test_nvmls_peak_counts_where_it_is_known(entry: TrainingResult, fitted: list[float]) -> None:
    stock = result("stock", peak_bytes=8 * GIB, card_peak_bytes=11 * GIB, outside_bytes=GIB)
    run = made_up_run(stock, entry)

    assert [it for it in (100, 60, 30) if fits(run, entry, it)] == fitted
    assert working_set_bytes(stock) == 10 * GIB


def test_speeds_are_by_variant_and_budget() -> None:
    over = result("umem-lookahead", percent=60.0, resident_bytes=7 * GIB)

    speeds, *_ = tables(made_up_run(*made_up_run().trainings, over))

    assert "working set 10 GiB" in speeds.title
    assert speeds.columns[2:] == ("100 %", "60 %", "30 %")
    reason = "off: phases[3] uses 8 GiB at once, and the device budget is 3 GiB"
    no = "does not fit"
    assert {row[0]: tuple(row[1:]) for row in speeds.rows} == {
        "stock": ("10,000, 10 GiB", "10,000", no, no),
        "umem-planned": ("—", "—", "5,000 (50 %)", "2,500 (25 %) without its plan"),
        "umem-lookahead": ("—", "—", "over its budget", "—"),
        "umem-fault": ("—", "—", "—", reason),
        "umem-optimizer-host": ("3,333 (33.3 %), 8 GiB", "3,333 (33.3 %)", no, no),
        "save-on-cpu": ("2,000 (20 %), 6 GiB", "2,000 (20 %)", "2,000 (20 %)", no),
        "torchao-offload": ("1,250 (12.5 %), 7 GiB", "1,250 (12.5 %)", no, no),
        "rmm-pool": ("8,000 (80 %), not counted", no, no, no),
    }


def test_steps_are_beside_stock_and_their_prediction() -> None:
    _, steps, notes = tables(made_up_run())

    rows = {tuple(row[:2]): row[2:] for row in steps.rows}
    none = ("—",) * 4
    assert rows["stock", "—"] == ("100 [90 to 120]", "100 %", "10 GiB", "—", *none, "10.2500")
    assert rows["umem-planned", "60 %, 6 GiB"] == (
        "200 [180 to 240]", "50 %", "6 GiB", "190", *none, "10.2500 same bits"
    )  # fmt: skip
    assert rows["umem-planned", "30 %, 3 GiB"][4:8] == (
        "2 GiB (1 GiB)", "1 GiB (1 GiB)", "12", "50 %"
    )  # fmt: skip
    assert rows["umem-fault", "30 %, 3 GiB"][0] == "off"
    # Another optimizer: its losses are not compared.
    assert rows["torchao-offload", "—"][-1] == "10.2500"
    assert [row[2] for row in notes.rows] == ["off", "note", "not installed"]


@pytest.mark.parametrize(
    ("deterministic", "words"), [(True, "10.2500 differs"), (False, "10.2500")]
)
def test_losses_differ_where_they_must_not(deterministic: bool, words: str) -> None:
    other = result("umem-planned", percent=60.0, losses_hex=((10.75).hex(), (10.25).hex()))

    _, steps = tables(made_up_run(result("stock"), other, deterministic=deterministic))

    assert steps.rows[1][-1] == words


def test_the_heading_names_machine_and_model() -> None:
    text = heading(made_up_run())

    for part in ("Made-up GPU", "driver 1.2", "transformers 5.0", "umem 0.1.0 (0123456789ab)",
                 "3 steps", "2026-01-02"):  # fmt: skip
        assert part in text
    panels = [it.title for it in tables(made_up_run())]
    assert sum("558,000,000 parameters in 24 layers, bfloat16" in it for it in panels) == 2


@pytest.mark.slow
def test_the_picture_shows_what_fits(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from umem_bench.training.picture import training_figure

    figure = training_figure(made_up_run())

    (axes,) = figure.axes
    (line,) = axes.lines
    assert set(line.get_ydata()) == {10_000.0}  # type: ignore[arg-type]
    bars = [
        (round(it.get_height()), round(it.get_x() + it.get_width() / 2), bool(it.get_hatch()))  # type: ignore[attr-defined]
        for it in axes.patches
    ]
    # save-on-cpu has 6 GiB on the device, and RMM's pool is not counted.
    assert {bar for bar in bars if bar[0] == 2000} == {
        (2000, 0, False), (2000, 1, False), (2000, 2, True)
    }  # fmt: skip
    assert all(hatched for height, _, hatched in bars if height == 8000)
    # What has a budget stands in its own group only.
    assert [bar for bar in bars if bar[0] in (5000, 2500)] == [(5000, 1, False), (2500, 2, False)]
    assert "umem-fault at 30 %" in axes.get_xlabel()
    write_results(made_up_run(), tmp_path / "run.jsonl")
    words = ["report", str(tmp_path / "run.jsonl"), "--plot", str(tmp_path / "run.svg")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert "<svg" in (tmp_path / "run.svg").read_text()
    with pytest.raises(UmemError, match="no variant to draw"):
        training_figure(made_up_run(result("stock")))


def planned(step_s: float, fault_batches: int = 1, **more: Any) -> TrainingResult:
    moved = MIGRATION.model_copy(update={"fault_batches": fault_batches, "predicted_bytes": None})
    asked: dict[str, Any] = {"percent": 60.0, "plan_running": True, "migration": moved}
    return result("umem-planned", step_s, **(asked | more))


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (planned(0.11, 12), []),
        (planned(0.118), ["stock's"]),
        (planned(0.15), ["demand paging's", "stock's"]),
        (planned(0.11, 13), ["fault batches"]),
        (planned(0.11, predicted_step_s=0.1), []),
        (planned(0.11, predicted_step_s=0.09), ["step of the predicted"]),
        (planned(0.11, migration=MIGRATION), ["bytes to_device of the predicted"]),
        (planned(0.11, resident_bytes=7 * GIB), ["within its budget"]),
        (planned(0.11, plan_running=False), ["umem-planned at 60 %"]),
        (planned(0.11, state="off", reason="too large", steps_s=()), ["umem-planned at 60 %"]),
    ],
)
def test_plans_are_held_against_limits(ours: TrainingResult, missed: list[str]) -> None:
    paged = result("umem-fault", 0.36, percent=60.0, migration=planned(1, 1200).migration)

    found = [it for it in checks(made_up_run(result("stock"), paged, ours)) if not it.passed]

    assert len(found) == len(missed)
    for check, words in zip(found, missed, strict=True):
        assert words in check.subject
