"""Managed trainings on the CPU: their plans, their hints, and values equal to a stock run."""

from __future__ import annotations

import gc
import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from managed_training import (
    BEFORE_PLANNED,
    MIB,
    TIGHT,
    WIDTH,
    Net,
    Scale,
    Training,
    both,
    current_phase,
    hook_count,
    host_machine,
    program_of,
    replan,
    run_phases,
)

import umem
from umem.capture.live import Block, StepRecording
from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.schedule import HintOp
from umem.hardware import load_hardware
from umem.managing import manage_on, managers
from umem.offloading import ActivationStore
from umem.pages import ManagerState
from umem.pages.plan.running_step import with_gradient_lifetimes
from umem.pages.run import step_plan
from umem.pages.run.admission import plan_admission, used_tensors
from umem.pages.run.plans import Plans
from umem.pages.run.program import Hints, PhaseWork, Program
from umem.pages.run.runner import Runner
from umem.pages.run.step_plan import PhasePlan, plan_releases
from umem.policy import resolve
from umem.runtime.hints import HintEngine, HintOutcome
from umem.trace import check_trace, phase_of_access

PLANNERS = ("planned", "lookahead", "fault")

STEPS = BEFORE_PLANNED + 4

OWN_HOOKS = 3
"""Hooks of a manager outside of recorded and planned steps."""


@pytest.fixture(scope="module")
def stock() -> Training:
    """Steps without a manager."""
    training = Training()
    training.steps(STEPS)
    return training


def requests(engine: HintEngine) -> Counter[tuple[str, TensorClass]]:
    """Requests so far, by operation and class."""
    counts = engine.statistics().counts
    return Counter({key: of.asked for key, of in counts.items()})


def arguments_of(function: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Arguments of the first call of a function of `step_plan`, for the plan and no lookahead."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(step_plan, function)

    def noted(*given: Any) -> Any:
        calls.append(given)
        return original(*given)

    monkeypatch.setattr(step_plan, function, noted)
    training = Training()
    manager = training.manage("planned", 34 * MIB)
    training.steps(BEFORE_PLANNED)
    manager.close()
    return calls[0]


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_run_has_stocks_values_its_schedules_hints_and_keeps_the_budget(
    planner: str, stock: Training
) -> None:
    training = Training()
    manager = training.manage(planner, 34 * MIB)
    assert manager.status().state == "warming up"
    training.steps(STEPS - 1)
    before = requests(manager.engine)
    training.step()
    assert training.equals(stock)

    status = manager.status()
    assert status.state is ManagerState.RUNNING
    assert status.planner == planner
    assert status.budget_bytes == 34 * MIB
    assert (status.steps, status.diverged_steps) == (STEPS - BEFORE_PLANNED, 0)
    assert (status.plans, status.unplanned, status.wait_timeouts) == (1, 0, 0)
    assert status.predicted is not None
    assert status.predicted.planner == planner
    assert status.predicted.step_s >= status.predicted.ideal_s
    assert manager.engine.statistics().failures == ()

    candidate, trace = program_of(manager).plan.candidate, manager.trace
    assert trace is not None
    timeline = candidate.predicted.timeline
    assert timeline is not None
    assert timeline.resident_bytes.sum(axis=1).max() <= 34 * MIB
    assert len(timeline.resident_bytes) == trace.phase_count

    schedule, classes = candidate.schedule, list(TensorClass)
    expected = Counter(
        (HintOp(op).name.lower(), classes[trace.tensor_class[tensor]])
        for op, tensor in zip(schedule.hint_op.tolist(), schedule.hint_tensor.tolist(), strict=True)
        if op in (HintOp.PREFETCH, HintOp.EVICT)
    )
    assert expected
    assert requests(manager.engine) - before == expected


@pytest.mark.slow
def test_activations_are_copied_out_and_back_in_time() -> None:
    training = Training()
    manager = training.manage("planned")
    training.steps(BEFORE_PLANNED)
    schedule, trace = program_of(manager).plan.candidate.schedule, manager.trace
    assert trace is not None
    leaving = schedule.hint_tensor[schedule.hint_op == HintOp.COPY_OUT]
    step_bytes = int(trace.tensor_bytes[leaving].sum())
    assert step_bytes > 0
    before = manager.store.statistics
    training.steps(3)
    after = manager.store.statistics
    assert after.bytes_out - before.bytes_out == 3 * step_bytes
    assert after.bytes_in - before.bytes_in == 3 * step_bytes
    assert after.late_fetches == 0
    assert after.kept_for_lack_of_host_bytes == 0


@pytest.mark.slow
def test_activations_are_released_one_by_one_with_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tensor does not wait for other tensors of its block."""
    arguments = arguments_of("plan_releases", monkeypatch)
    candidate, _, sends, saved, followed, forward_labels, hardware = arguments
    key = ("layers.1", 0)
    large = candidate.trace.tensor_bytes == 4 * MIB
    ordinals = [it.ordinal for it in saved if (it.block, it.call) == key and large[it.tensor]]
    assert len(ordinals) == 2
    trace = candidate.trace
    sent = next(it.phase for it in followed if it.label == forward_labels[key[0]]) + 1

    def phases(computes_s: list[float]) -> list[int]:
        """Phases of the releases if a copy takes a second and phases begin once a second."""
        start_s = np.arange(trace.phase_count, dtype=np.float64)
        end_s = start_s + durations_s
        end_s[sent : sent + len(computes_s)] = durations_s[0] + np.array(computes_s) + sent
        timeline = replace(candidate.predicted.timeline, phase_start_s=start_s, phase_end_s=end_s)
        slow = replace(hardware, copy_to_host_bytes_per_s=float(4 * MIB))
        found = plan_releases(
            replace(
                candidate, trace=trace_, predicted=replace(candidate.predicted, timeline=timeline)
            ),
            {key: frozenset(ordinals)},
            [[] for _ in sends],
            saved,
            followed,
            forward_labels,
            slow,
        )
        gone = {it: phase for phase, parts in found.items() for _, row in parts for it in row}
        return [gone[it] - sent for it in ordinals]

    durations_s = np.full(trace.phase_count, 0.5)
    trace_ = replace(trace, duration_s=durations_s)
    assert phases([0.0, 1.0, 2.0, 3.0]) == [1, 2]
    assert phases([0.0, 2.1, 2.5, 3.0]) == [1, 1]
    assert phases([1.5, 2.1, 2.5, 3.0]) == [0, 1]


@pytest.mark.slow
def test_activations_come_back_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, no sooner than planned, and no later than they are used."""
    arguments = arguments_of("plan_admission", monkeypatch)
    candidate, _, leaving, coming, released, fetched = arguments
    planned = {tensor: phase for phase, row in enumerate(fetched) for tensor in row}
    assert len(planned) >= 3

    def phases(budget_bytes: int) -> dict[int, int]:
        plan = plan_admission(candidate, budget_bytes, leaving, coming, released, fetched)
        assert sum(map(len, plan.fetches)) == len(planned)
        # Each prefetch too, in this step or early in the next one.
        assert sorted(chain(*plan.coming)) == sorted(chain(*coming))
        return {tensor: phase for phase, row in enumerate(plan.fetches) for tensor in row}

    def next_use(tensor: int) -> int:
        uses = (it for it in range(planned[tensor], candidate.trace.phase_count))
        return next(it for it in uses if tensor in used_tensors(candidate.trace, it))

    assert phases(400 * MIB) == planned
    tight = phases(28 * MIB)
    assert all(planned[it] <= tight[it] <= next_use(it) for it in planned)
    assert any(planned[it] < tight[it] for it in planned)
    assert phases(0) == {it: next_use(it) for it in planned}
    none = plan_admission(candidate, 0, leaving, coming, released, fetched)
    assert all(
        tensor in used_tensors(candidate.trace, phase)
        for phase, row in enumerate(none.coming)
        for _, tensor in row
    )


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["planned", "fault"])
def test_used_gradients_count_until_the_program_drops_them(
    planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    manager = training.manage(planner, 40 * MIB)
    training.steps(BEFORE_PLANNED)
    trace = manager.trace
    assert trace is not None
    assert not (program_of(manager).plan.candidate.schedule.hint_op == HintOp.DISCARD).any()
    there: list[int] = []

    begin = Runner._begin

    def look(runner: Runner, program: Program, work: PhaseWork) -> None:
        begin(runner, program, work)
        phase = current_phase(manager)
        lives = (trace.first_phase <= phase) & (trace.last_phase >= phase)
        there.append(int(trace.tensor_bytes[lives].sum()) - sum(manager.away_bytes().values()))

    monkeypatch.setattr(Runner, "_begin", look)
    training.step()
    assert trace.phase_names[-1] == "optimizer"
    assert len(there) >= trace.phase_count > 4
    # After the phase's hints: before them, memory that the phase frees is still there.
    assert there[-1] <= 40 * MIB


@pytest.mark.slow
def test_gradient_lifetimes_change_neither_live_bytes_nor_accesses() -> None:
    training = Training()
    with umem.record(training.model, training.optimizer, steps=1, warmup=1) as recording:
        training.steps(3)
    trace = recording.trace
    made = with_gradient_lifetimes(trace)
    check_trace(made, "with gradient lifetimes")
    assert with_gradient_lifetimes(made) is made
    for phase in range(trace.phase_count):
        lives = [(it.first_phase <= phase) & (it.last_phase >= phase) for it in (trace, made)]
        before, after = (
            int(it.tensor_bytes[row].sum()) for it, row in zip((trace, made), lives, strict=True)
        )
        assert before == after
    old = made.access_tensor < trace.tensor_count
    assert made.access_tensor[old].tolist() == trace.access_tensor.tolist()
    assert phase_of_access(made)[old].tolist() == phase_of_access(trace).tolist()
    gradients = trace.tensor_class == TensorClass.GRADIENTS.number
    assert int(made.tensor_bytes[trace.tensor_count :].sum()) >= int(
        trace.tensor_bytes[gradients].sum()
    ) - int(trace.tensor_bytes[gradients].max())


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["lookahead", "fault"])
def test_live_bytes_less_evicted_and_copied_bytes_stay_within_the_budget(planner: str) -> None:
    training = Training()
    manager = training.manage(planner, 34 * MIB)
    training.steps(BEFORE_PLANNED + 1)
    trace = manager.trace
    assert trace is not None
    on_device = {}

    def watch(name: str) -> Callable[..., None]:
        phase = trace.phase_names.index(f"forward {name}")
        lives = (trace.first_phase <= phase) & (trace.last_phase >= phase)

        def look(*_: object) -> None:
            live_bytes = int(trace.tensor_bytes[lives].sum())
            copies = manager.store.statistics
            away_bytes = sum(manager.away_bytes().values()) + copies.bytes_out - copies.bytes_in
            on_device[name] = (live_bytes, live_bytes - away_bytes)

        return look

    for name in ("layers.0", "layers.3", "head"):
        training.model.get_submodule(name).register_forward_hook(watch(name))
    training.step()
    assert on_device["head"][0] > 60 * MIB
    assert all(0 < there <= 34 * MIB for _, there in on_device.values())


@pytest.mark.slow
def test_a_training_that_fits_keeps_only_own_hooks(stock: Training) -> None:
    training = Training()
    manager = training.manage("planned", 400 * MIB)
    training.steps(STEPS)
    assert manager.status().state is ManagerState.RESIDENT
    assert hook_count(training) == OWN_HOOKS
    assert requests(manager.engine).total() == 0
    assert training.equals(stock)


@pytest.mark.slow
def test_a_budget_below_a_phase_turns_the_manager_off_with_one_warning(
    stock: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    manager = training.manage("planned", 10 * MIB)
    with caplog.at_level(logging.WARNING, "umem"):
        training.steps(STEPS)
    (record,) = caplog.records
    said = record.getMessage()
    assert "(backward head) uses 20 MiB at once, and the device budget is 10 MiB" in said
    assert "raise the budget" in said
    status = manager.status()
    assert status.state is ManagerState.OFF
    assert status.reason in said
    assert hook_count(training) == OWN_HOOKS
    assert training.equals(stock)


def test_a_planner_that_runs_no_training_is_refused() -> None:
    training = Training()
    with pytest.raises(PlanError, match=r"'none' runs no training: .*fault, lookahead, planned"):
        training.manage("none")
    assert hook_count(training) == 0


def test_a_step_in_the_backward_pass_needs_streamed_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    managers = sys.modules["umem.managing"]
    policy = umem.load_policy("managed")
    resolved = resolve(policy, load_hardware("h200"), {})
    enabled = SimpleNamespace(policy=policy, resolved=resolved)
    monkeypatch.setattr(managers, "runtime", lambda: enabled)
    training = Training()
    with pytest.raises(PlanError, match=r"'managed' plans pages.* sft"):
        umem.manage(training.model, training.optimizer, step_in_backward=True)
    assert hook_count(training) == 0


def test_an_optimizer_has_one_manager() -> None:
    training = Training()
    manager = training.manage()
    assert training.manage() is manager
    assert hook_count(training) == OWN_HOOKS
    manager.close()
    assert manager not in managers()
    again = training.manage("fault")
    assert again is not manager
    assert again.status().planner == "fault"
    assert hook_count(training) == OWN_HOOKS


@pytest.mark.slow
def test_a_manager_gives_way_to_one_of_another_model_until_it_has_a_plan() -> None:
    """`umem.enable` may have taken a module of the model that the program calls."""
    training, other = Training(), Net()

    def manage_other() -> Any:
        return manage_on(other, training.optimizer, lambda: host_machine(TIGHT), "planned")

    first = manage_other()
    training.step()
    manager = training.manage()
    assert first.is_closed
    assert hook_count(training) == OWN_HOOKS

    training.steps(BEFORE_PLANNED + 1)
    with pytest.raises(PlanError, match=r"another model, a Net, already: .* close\(\)"):
        manage_other()
    assert training.manage() is manager


@pytest.mark.slow
def test_close_leaves_nothing_behind() -> None:
    for steps in (1, 4, BEFORE_PLANNED + 2):  # warming up, recording, running
        stock, training = Training(), Training()
        manager = training.manage()
        training.steps(steps)
        manager.close()
        assert hook_count(training) == 0
        assert manager.status().state is ManagerState.OFF
        assert manager.status().reason == "closed"
        assert manager.store.statistics.pinned_bytes == 0
        training.steps(3)
        stock.steps(steps + 3)
        assert training.equals(stock)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4, BEFORE_PLANNED + 2])
def test_a_dropped_training_is_freed(steps: int) -> None:
    """Its optimizer does not keep the model alive."""
    training = Training()
    manager, optimizer = training.manage(), training.optimizer
    training.steps(steps)
    model, *others = (weakref.ref(item) for item in (training.model, optimizer, manager))
    del training, manager
    gc.collect()
    assert model() is None
    optimizer.step()
    del optimizer
    gc.collect()
    assert [it() for it in others] == [None, None]


@pytest.mark.slow
def test_a_shape_that_comes_once_runs_under_a_lookahead() -> None:
    def train(training: Training) -> None:
        for step in range(14):
            training.step(rows=3 if step == 10 else 2)

    _, manager = both(train, budget_bytes=60 * MIB)
    status = manager.status()
    assert (status.plans, status.unplanned, status.diverged_steps) == (1, 1, 0)
    assert status.state is ManagerState.RUNNING
    assert status.predicted is not None
    assert status.predicted.planner == "planned"


@pytest.mark.slow
def test_a_shape_that_comes_again_gets_a_plan() -> None:
    def train(training: Training) -> None:
        for step in range(24):
            training.step(rows=3 if step > 9 else 2)

    _, manager = both(train, budget_bytes=60 * MIB)
    status = manager.status()
    assert (status.state, status.plans, status.diverged_steps) == (ManagerState.RUNNING, 2, 0)
    assert status.unplanned == 2


@pytest.mark.slow
def test_a_shape_without_a_plan_is_left_to_a_lookahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(training: Training) -> None:
        for rows, steps in ((2, BEFORE_PLANNED + 1), (8, 6), (2, 3)):
            training.steps(steps, rows)

    with caplog.at_level(logging.WARNING, "umem"):
        _, manager = both(train, budget_bytes=34 * MIB)
    (record,) = caplog.records
    said = record.getMessage()
    assert f"no plan for batches of 0 8x{WIDTH} float32, which run under a lookahead" in said
    assert "uses 68 MiB at once" in said
    status = manager.status()
    assert (status.state, status.plans) == (ManagerState.RUNNING, 1)
    assert status.steps >= 1 + 3


@pytest.mark.slow
def test_a_lookahead_that_fails_turns_the_manager_off_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_plans: Plans) -> Program:
        raise PlanError("too small for a lookahead")

    monkeypatch.setattr(Plans, "lookahead", fails)
    stock, training = Training(), Training()
    manager = training.manage()
    with caplog.at_level(logging.WARNING, "umem"):
        for it in (stock, training):
            it.steps(BEFORE_PLANNED + 1)
            it.steps(2, rows=3)
    (record,) = caplog.records
    assert record.exc_info is None
    assert manager.status().state is ManagerState.OFF
    assert manager.status().reason == "too small for a lookahead"
    assert training.equals(stock)


@pytest.mark.slow
def test_at_most_four_shapes_get_a_plan() -> None:
    def train(training: Training) -> None:
        for rows in (1, 2, 3, 4, 5, 6):
            training.steps(BEFORE_PLANNED + 1 if rows == 1 else 5, rows)

    _, manager = both(train, "lookahead", 80 * MIB, make_model=lambda: Net(2))
    status = manager.status()
    assert status.plans == 4
    assert status.unplanned >= 10  # five steps of two shapes each
    assert status.state in (ManagerState.RUNNING, ManagerState.RESIDENT)


@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_mapped_state_is_advised_once_and_brought_back_at_the_end(is_closed: bool) -> None:
    class Whole(torch.optim.AdamW):
        """A subclass does not run in parts, and its state does not fit beside the gradients."""

    training = Training(make_optimizer=Whole)
    manager, advice = training.manage("planned"), ("advise", TensorClass.OPTIMIZER_STATE)
    engine = manager.engine
    training.steps(BEFORE_PLANNED + 1)
    mapped = len(program_of(manager).mapped)
    assert requests(engine)[advice] == mapped > 0
    training.steps(3)
    assert requests(engine)[advice] == mapped
    if is_closed:
        manager.close()
    else:
        del training, manager
        gc.collect()
    assert requests(engine)[advice] == 2 * mapped


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["planned", "lookahead"])
def test_every_prefetch_counts_as_early_or_late(planner: str) -> None:
    training = Training()
    manager = training.manage(planner, 34 * MIB)

    def prefetches() -> tuple[int, int]:
        while manager.engine.statistics().open_requests:
            time.sleep(0.001)
        counts = manager.engine.statistics().counts
        found = [of for (op, _), of in counts.items() if op == "prefetch"]
        done = sum(it.done for it in found)
        return done, sum(it.late + it.early for it in found)

    training.steps(BEFORE_PLANNED + 2)  # a prefetch of one step may be needed in the next
    done, seen = prefetches()
    training.steps(4)
    done_later, seen_later = prefetches()
    assert done_later - done > 10
    assert seen_later - seen == done_later - done


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["planned", "lookahead"])
def test_evicted_memory_stays_evicted_when_the_plan_is_made_again(planner: str) -> None:
    training = Training()
    manager = training.manage(planner, 34 * MIB)
    training.steps(BEFORE_PLANNED + 3)
    before = manager.away_bytes()
    assert sum(before.values()) > 0
    planned = program_of(manager)
    replan(manager)
    assert program_of(manager) is not planned
    activations = TensorClass.ACTIVATIONS  # which die with the step
    assert {**manager.away_bytes(), activations: 0} == {**before, activations: 0}
    training.steps(2)
    assert manager.status().diverged_steps == 0
    manager.close()
    assert not any(manager.away_bytes().values())


def test_a_phase_waits_for_pages_of_all_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are two workers: a later batch may be over before an earlier one."""
    machine = host_machine(TIGHT)
    model = Net()
    store = ActivationStore(machine.device, machine.mover)
    runner = Runner(machine, store, Block("Net", model))
    weights = list(model.parameters())[:3]
    coming = [
        Hints(
            machine.engine.batch(
                [HintOp.PREFETCH] * len(part),
                [it.data_ptr() for it in part],
                [it.nbytes for it in part],
                [TensorClass.WEIGHTS] * len(part),
            ),
            lookups=(),
        )
        for part in (weights[:2], weights[2:])
    ]
    waited: list[int] = []
    wait = HintEngine.wait

    def spy(engine: HintEngine, ticket: int, **timeout: Any) -> HintOutcome:
        waited.append(ticket)
        return wait(engine, ticket, **timeout)

    monkeypatch.setattr(HintEngine, "wait", spy)
    needing = PhaseWork(PhasePlan(needs=((0, 0), (0, 1), (1, 0)), waits=True))
    run_phases(runner, *(PhaseWork(PhasePlan(), coming=hints) for hints in coming), needing)
    assert waited == [ticket for hints in coming for ticket in hints.batch.tickets]


@pytest.mark.slow
def test_small_tensors_stay() -> None:
    class Small(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.bias

    _, manager = both(lambda training: training.steps(10), "lookahead", 34 * MIB, make_model=Small)
    schedule, trace = program_of(manager).plan.candidate.schedule, manager.trace
    assert trace is not None
    assert trace.tensor_bytes[schedule.hint_tensor].min() >= 2 * MIB
    assert min(trace.tensor_bytes) < 2 * MIB
    assert isinstance(_.model.head, Scale)


def test_residency_ignores_managers_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def manager_of(device: int, size_bytes: int) -> SimpleNamespace:
        away = {TensorClass.WEIGHTS: size_bytes}
        return SimpleNamespace(device=torch.device("cuda", device), away_bytes=lambda: away)

    allocated = {"allocated_bytes": {"current": 100}}
    allocator = SimpleNamespace(class_stats=lambda _device: [allocated] * len(TensorClass))
    managers = sys.modules["umem.managing"]
    monkeypatch.setattr(managers, "runtime", lambda: SimpleNamespace(allocator=allocator))
    monkeypatch.setattr(managers, "managers", lambda: [manager_of(0, 30), manager_of(1, 60)])
    found = [umem.managing.residency(device)[TensorClass.WEIGHTS] for device in (0, 1, 2)]
    assert found == [70, 40, 100]


@pytest.mark.slow
def test_a_plan_leaves_room_for_the_process_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepRecording, "outside_bytes", 10 * MIB)
    _, manager = both(lambda it: it.steps(10), budget_bytes=48 * MIB)
    assert manager.status().budget_bytes == 48 * MIB
    timeline = program_of(manager).plan.candidate.predicted.timeline
    assert timeline is not None
    assert 20 * MIB < timeline.resident_bytes.sum(axis=1).max() <= 38 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget_bytes", "said"),
    [
        (61 * MIB, "(that is the budget of 61 MiB less 60 MiB that other tensors of the process"),
        (60 * MIB, "the device budget is 60 MiB, and 60 MiB of other tensors of the process"),
        (48 * MIB, "the device budget is 48 MiB, and 60 MiB of other tensors of the process"),
    ],
)
def test_the_reason_names_other_memory_that_leaves_too_little(
    budget_bytes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepRecording, "outside_bytes", 60 * MIB)
    training = Training()
    manager = training.manage(budget_bytes=budget_bytes)
    training.steps(BEFORE_PLANNED + 1)
    assert manager.status().state is ManagerState.OFF
    assert said in manager.status().reason
    assert "raise the budget" in manager.status().reason
