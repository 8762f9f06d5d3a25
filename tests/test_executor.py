"""Managed trainings on the CPU: recorded, planned, carried out, and bit-equal to stock ones."""

from __future__ import annotations

import gc
import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from managed_training import (
    MIB,
    TIGHT,
    WIDTH,
    Net,
    Scale,
    Training,
    both,
    hook_count,
    host_machine,
)

import umem
from umem.capture.live import Block
from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.schedule import HintOp
from umem.executor import Manager, ManagerState
from umem.executor import admission as _room
from umem.executor import program as _program
from umem.executor.manage import manage_on, managers
from umem.executor.plans import Plans
from umem.executor.program import Hints, PhaseWork, Program
from umem.executor.runner import Runner
from umem.offload import ActivationStore
from umem.planning.running_step import with_gradient_lifetimes
from umem.runtime.hints import HintEngine, HintOutcome
from umem.trace import check_trace, is_optimizer_phase, phase_of_access

pytestmark = pytest.mark.usefixtures("one_thread")

PLANNERS = ("planned", "lookahead", "fault")

BEFORE_PLANNED = 7
"""Steps that warm up, are recorded and are planned; the next one is the first by plan."""

OWN_HOOKS = 3


@pytest.fixture(scope="module")
def stock() -> Training:
    """Sixteen steps that nobody manages."""
    training = Training()
    training.steps(16)
    return training


def program_of(manager: Manager) -> Program:
    program = manager._runner.program
    assert program is not None
    return program


def asked(manager: Manager) -> Counter[tuple[str, TensorClass]]:
    """Requests so far, by operation and class."""
    counts = manager.engine.statistics().counts
    return Counter({key: sum(of.requests.values()) for key, of in counts.items()})


# ------------------------------------------------------------------------------------ the rule


@pytest.mark.parametrize("planner", PLANNERS)
def test_values_are_those_of_a_stock_run(planner: str, stock: Training) -> None:
    training = Training()
    manager = training.manage(planner)
    assert manager.status().state == "warming up"
    training.steps(16)
    assert training.equals(stock)
    status = manager.status()
    assert status.state is ManagerState.RUNNING
    assert status.planner == planner
    assert status.budget_bytes == TIGHT
    assert (status.steps, status.diverged_steps) == (16 - BEFORE_PLANNED, 0)
    assert (status.plans, status.unplanned, status.wait_timeouts) == (1, 0, 0)
    assert status.predicted is not None
    assert status.predicted.planner == planner
    assert status.predicted.step_s >= status.predicted.ideal_s
    assert manager.engine.statistics().failures == ()


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("budget_mib", [34, 48])
def test_the_plan_keeps_the_budget_in_every_phase(planner: str, budget_mib: int) -> None:
    training = Training()
    manager = training.manage(planner, budget_mib * MIB)
    training.steps(BEFORE_PLANNED)
    timeline = program_of(manager).candidate.predicted.timeline
    assert timeline is not None
    assert timeline.resident_bytes.sum(axis=1).max() <= budget_mib * MIB
    trace = manager.trace
    assert trace is not None
    assert len(timeline.resident_bytes) == trace.phase_count


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_step_asks_for_the_hints_of_its_schedule(planner: str) -> None:
    training = Training()
    manager = training.manage(planner)
    training.steps(BEFORE_PLANNED + 2)
    before = asked(manager)
    training.step()
    schedule, trace = program_of(manager).candidate.schedule, manager.trace
    assert trace is not None
    classes = list(TensorClass)
    expected = Counter(
        (HintOp(op).name.lower(), classes[trace.tensor_class[tensor]])
        for op, tensor in zip(schedule.hint_op.tolist(), schedule.hint_tensor.tolist(), strict=True)
        if op in (HintOp.PREFETCH, HintOp.EVICT)
    )
    assert expected
    assert asked(manager) - before == expected


def test_activations_leave_and_come_back_in_time() -> None:
    training = Training()
    manager = training.manage("planned")
    training.steps(BEFORE_PLANNED)
    schedule, trace = program_of(manager).candidate.schedule, manager.trace
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


def test_a_phase_that_waits_for_room_lets_go_of_what_leaves_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One tensor after the other, of the same block too: not a phase later, when all of it left."""
    asked: list[tuple[Any, ...]] = []
    made = _program._releases

    def noted(*given: Any) -> Any:
        asked.append(given)
        return made(*given)

    monkeypatch.setattr(_program, "_releases", noted)
    training = Training()
    manager = training.manage("planned", 34 * MIB)
    training.steps(BEFORE_PLANNED)
    manager.close()
    candidate, _, sends, saved, followed, forward_labels, machine = asked[-1]
    key = ("layers.1", 0)
    large = candidate.trace.tensor_bytes == 4 * MIB
    ordinals = [it.ordinal for it in saved if (it.block, it.call) == key and large[it.tensor]]
    assert len(ordinals) == 2
    trace = candidate.trace
    sent = next(it.phase for it in followed if it.label == forward_labels[key[0]]) + 1

    def phases(computes_s: list[float]) -> list[int]:
        """When each tensor goes, if it takes a second to leave and phases begin once a second."""
        start_s = np.arange(trace.phase_count, dtype=np.float64)
        end_s = start_s + durations_s
        end_s[sent : sent + len(computes_s)] = durations_s[0] + np.array(computes_s) + sent
        timeline = replace(candidate.predicted.timeline, phase_start_s=start_s, phase_end_s=end_s)
        slow = replace(machine.hardware, copy_to_host_bytes_per_s=float(4 * MIB))
        found = made(
            replace(
                candidate, trace=trace_, predicted=replace(candidate.predicted, timeline=timeline)
            ),
            {key: frozenset(ordinals)},
            [[] for _ in sends],
            saved,
            followed,
            forward_labels,
            replace(machine, hardware=slow),
        )
        gone = {it: phase for phase, parts in found.items() for _, row in parts for it in row}
        return [gone[it] - sent for it in ordinals]

    durations_s = np.full(trace.phase_count, 0.5)
    trace_ = replace(trace, duration_s=durations_s)
    assert phases([0.0, 1.0, 2.0, 3.0]) == [1, 2]
    assert phases([0.0, 2.1, 2.5, 3.0]) == [1, 1]
    assert phases([1.5, 2.1, 2.5, 3.0]) == [0, 1]


def test_activations_come_back_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sooner than planned, no later than they are used, and each once."""
    asked: list[tuple[Any, ...]] = []

    def noted(*given: Any) -> Any:
        asked.append(given)
        return _room.plan_admission(*given)

    monkeypatch.setattr(_program, "plan_admission", noted)
    training = Training()
    manager = training.manage("planned", 34 * MIB)
    training.steps(BEFORE_PLANNED)
    manager.close()
    candidate, _, leaving, coming, released, fetched = asked[-1]
    planned = {tensor: phase for phase, row in enumerate(fetched) for tensor in row}
    assert len(planned) >= 3

    def phases(budget_bytes: int) -> dict[int, int]:
        room = _room.plan_admission(candidate, budget_bytes, leaving, coming, released, fetched)
        assert sum(map(len, room.fetches)) == len(planned)
        # Prefetches as well, in this step or, if it is late in it, in the next one.
        assert sorted(it for row in room.coming for it in row) == sorted(
            it for row in coming for it in row
        )
        return {tensor: phase for phase, row in enumerate(room.fetches) for tensor in row}

    def next_use(tensor: int) -> int:
        uses = (it for it in range(planned[tensor], candidate.trace.phase_count))
        return next(it for it in uses if tensor in _room.used_tensors(candidate.trace, it))

    assert phases(400 * MIB) == planned
    tight = phases(28 * MIB)
    assert all(planned[it] <= tight[it] <= next_use(it) for it in planned)
    assert any(planned[it] < tight[it] for it in planned)
    assert phases(0) == {it: next_use(it) for it in planned}
    none = _room.plan_admission(candidate, 0, leaving, coming, released, fetched)
    assert all(
        tensor in _room.used_tensors(candidate.trace, phase)
        for phase, row in enumerate(none.coming)
        for _, tensor in row
    )


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_nobody_uses_any_more_is_counted(planner: str) -> None:
    """Gradients that the optimizer has used are there until the program drops them."""
    training = Training()
    manager = training.manage(planner, 40 * MIB)
    training.steps(BEFORE_PLANNED)
    program, trace = program_of(manager), manager.trace
    assert trace is not None
    assert not (program.candidate.schedule.hint_op == HintOp.DISCARD).any()
    there: list[int] = []

    def look() -> None:
        phase = manager._runner._phase
        lives = (trace.first_phase <= phase) & (trace.last_phase >= phase)
        there.append(int(trace.tensor_bytes[lives].sum()) - sum(manager.away_bytes().values()))

    manager.watch(look)
    training.step()
    manager.watch(None)
    parts = [it for it, name in enumerate(trace.phase_names) if is_optimizer_phase(name)]
    assert len(there) >= 2 * trace.phase_count > 2 * len(parts) > 8
    # Behind what each phase asks for: in front of it, memory that it frees is there still.
    assert max(there[1::2][-len(parts) :]) <= 40 * MIB


def test_what_lingers_is_in_use() -> None:
    training = Training()
    with umem.record(training.model, training.optimizer, steps=1, warmup=1) as recording:
        training.steps(3)
    trace = recording.trace
    made = with_gradient_lifetimes(trace)
    check_trace(made, "what lingers")
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


@pytest.mark.parametrize("planner", ["lookahead", "fault"])
def test_what_lives_less_what_is_away_keeps_the_budget(planner: str) -> None:
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
            on_device[name] = (live_bytes, live_bytes - sum(manager.away_bytes().values()))

        return look

    for name in ("layers.0", "layers.3", "head"):
        training.model.get_submodule(name).register_forward_hook(watch(name))
    training.step()
    assert on_device["head"][0] > 60 * MIB
    assert all(0 < there <= 34 * MIB for _, there in on_device.values())


# ------------------------------------------------------------------------------------ what is not


@pytest.mark.parametrize("planner", PLANNERS)
def test_where_all_fits_only_its_own_hooks_stay(planner: str, stock: Training) -> None:
    training = Training()
    manager = training.manage(planner, 400 * MIB)
    training.steps(16)
    assert manager.status().state is ManagerState.RESIDENT
    assert hook_count(training) == OWN_HOOKS
    assert asked(manager).total() == 0
    assert training.equals(stock)


def test_a_budget_below_a_phase_ends_with_one_plain_warning(
    stock: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    manager = training.manage("planned", 10 * MIB)
    with caplog.at_level(logging.WARNING, "umem"):
        training.steps(16)
    (record,) = caplog.records
    said = record.getMessage()
    assert "(backward head) uses 20 MiB at once, and the device budget is 10 MiB" in said
    assert "raise the budget" in said
    status = manager.status()
    assert status.state is ManagerState.OFF
    assert status.reason in said
    assert hook_count(training) == OWN_HOOKS
    assert training.equals(stock)


def test_planners_that_run_nothing_are_refused() -> None:
    training = Training()
    with pytest.raises(PlanError, match=r"'plannd' runs no training, did you mean 'planned'\?"):
        training.manage("plannd")
    with pytest.raises(PlanError, match="'none' runs no training"):
        training.manage("none")
    assert hook_count(training) == 0


def test_an_optimizer_has_one_manager() -> None:
    training = Training()
    manager = training.manage()
    assert training.manage() is manager
    assert training.manage(None) is manager
    with pytest.raises(PlanError, match=r"managed with planner 'planned' already: .* close\(\)"):
        training.manage("fault")
    with pytest.raises(PlanError, match="with another model, a Net, already"):
        manage_on(Net(), training.optimizer, lambda: host_machine(TIGHT), "planned")
    assert hook_count(training) == OWN_HOOKS
    manager.close()
    assert manager not in managers()
    again = training.manage("fault")
    assert again is not manager
    assert again.status().planner == "fault"
    assert hook_count(training) == OWN_HOOKS


def test_a_manager_that_nobody_chose_gives_way_until_it_has_planned() -> None:
    """As the one that comes with `umem.enable`."""
    training = Training()
    first = training.manage(None)
    training.step()
    chosen = training.manage("lookahead")
    assert first.is_closed
    assert chosen.status().planner == "lookahead"
    assert hook_count(training) == OWN_HOOKS
    with pytest.raises(PlanError, match="without step_in_backward already"):
        training.manage("lookahead", step_in_backward=True)

    training = Training()
    manager = training.manage(None)
    training.steps(BEFORE_PLANNED + 1)
    with pytest.raises(PlanError, match="with planner 'planned' already"):
        training.manage("fault")
    assert training.manage() is manager


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


@pytest.mark.parametrize("steps", [1, 4, BEFORE_PLANNED + 2])
def test_a_model_that_nobody_wants_is_let_go(steps: int) -> None:
    training = Training()
    manager = training.manage()
    training.steps(steps)
    alive = [weakref.ref(item) for item in (training.model, training.optimizer, manager)]
    del training, manager
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]


@pytest.mark.parametrize("steps", [1, BEFORE_PLANNED + 2])
def test_an_optimizer_that_stays_does_not_keep_the_model(steps: int) -> None:
    training = Training()
    training.manage()
    training.steps(steps)
    model, optimizer = weakref.ref(training.model), training.optimizer
    del training
    gc.collect()
    assert model() is None
    optimizer.step()


# ------------------------------------------------------------------------------------ shapes


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


def test_a_smaller_batch_gets_no_hints_beyond_its_tensors() -> None:
    training = Training()
    manager = training.manage("fault", TIGHT)
    training.steps(BEFORE_PLANNED + 1)
    present = program_of(manager).present
    assert present  # of the step before
    training.step(rows=1)
    assert not program_of(manager).present


def test_a_shape_that_comes_again_gets_a_plan() -> None:
    def train(training: Training) -> None:
        for step in range(24):
            training.step(rows=3 if step > 9 else 2)

    _, manager = both(train, budget_bytes=60 * MIB)
    status = manager.status()
    assert (status.state, status.plans, status.diverged_steps) == (ManagerState.RUNNING, 2, 0)
    assert status.unplanned == 2


def test_shapes_in_turn_get_a_plan_each() -> None:
    def train(training: Training) -> None:
        for step in range(40):
            training.step(rows=2 + step % 2)

    _, manager = both(train, budget_bytes=60 * MIB)
    assert manager.status().plans == 2
    assert manager.status().diverged_steps == 0


def test_a_shape_that_cannot_be_planned_is_left_to_a_lookahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(training: Training) -> None:
        for rows in (2, 8, 2):
            training.steps(12, rows)

    with caplog.at_level(logging.WARNING, "umem"):
        _, manager = both(train, budget_bytes=34 * MIB)
    (record,) = caplog.records
    said = record.getMessage()
    assert f"no plan for batches of 0 8x{WIDTH} float32, which run under a lookahead" in said
    assert "uses 68 MiB at once" in said
    status = manager.status()
    assert (status.state, status.plans) == (ManagerState.RUNNING, 1)
    assert status.steps >= 12 - BEFORE_PLANNED + 12


def test_where_there_can_be_no_lookahead_the_reason_is_told(
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
def test_plans_are_bounded() -> None:
    def train(training: Training) -> None:
        for rows in (1, 2, 3, 4, 5, 6):
            training.steps(9, rows)

    _, manager = both(train, "lookahead", 80 * MIB, make_model=lambda: Net(2))
    status = manager.status()
    assert status.plans == 4
    assert status.unplanned >= 18  # nine steps of two shapes each
    assert status.state in (ManagerState.RUNNING, ManagerState.RESIDENT)


def test_what_two_plans_map_stays_and_what_one_maps_comes_back() -> None:
    class Whole(torch.optim.AdamW):
        """Not done in parts, so that its state does not fit beside weights and gradients."""

    training = Training(make_optimizer=Whole)
    manager = training.manage("planned")
    training.steps(BEFORE_PLANNED + 1)
    mapped = len(program_of(manager).mapped)
    assert mapped > 0
    advice = ("advise", TensorClass.OPTIMIZER_STATE)
    assert asked(manager)[advice] == mapped
    training.steps(3)
    assert asked(manager)[advice] == mapped
    manager.close()
    assert asked(manager)[advice] == 2 * mapped


def test_mapped_memory_is_brought_back_when_its_optimizer_goes() -> None:
    class Whole(torch.optim.AdamW):
        """Not done in parts, so that its state does not fit beside weights and gradients."""

    training = Training(make_optimizer=Whole)
    manager = training.manage("planned")
    training.steps(BEFORE_PLANNED + 1)
    mapped, engine = len(program_of(manager).mapped), manager.engine
    del training, manager
    gc.collect()
    counts = engine.statistics().counts["advise", TensorClass.OPTIMIZER_STATE]
    assert sum(counts.requests.values()) == 2 * mapped > 0


@pytest.mark.parametrize("planner", ["planned", "lookahead"])
def test_every_prefetch_is_seen_to_be_early_or_late(planner: str) -> None:
    training = Training()
    manager = training.manage(planner, 34 * MIB)

    def prefetches() -> tuple[int, int]:
        while manager.engine.statistics().open_requests:
            time.sleep(0.001)
        counts = manager.engine.statistics().counts
        found = [of for (op, _), of in counts.items() if op == "prefetch"]
        done = sum(it.requests.get(HintOutcome.DONE, 0) for it in found)
        return done, sum(it.late + it.early for it in found)

    training.steps(BEFORE_PLANNED + 2)  # what is asked for in one step may be needed in the next
    done, seen = prefetches()
    training.steps(4)
    done_later, seen_later = prefetches()
    assert done_later - done > 10
    assert seen_later - seen == done_later - done


# ------------------------------------------------------------------------------------ corrections


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_is_away_stays_so_when_the_plan_is_made_anew(planner: str) -> None:
    training = Training()
    manager = training.manage(planner, 34 * MIB)
    training.steps(BEFORE_PLANNED + 3)
    before = manager.away_bytes()
    assert sum(before.values()) > 0
    program = program_of(manager)
    manager._plans.make()
    manager._load(next(iter(manager._plans._programs.values())))
    assert program_of(manager) is not program
    activations = TensorClass.ACTIVATIONS  # which die with the step
    assert {**manager.away_bytes(), activations: 0} == {**before, activations: 0}
    training.steps(2)
    assert manager.status().diverged_steps == 0
    manager._load(None)
    assert not any(manager.away_bytes().values())


def test_a_slower_link_than_known_is_planned_for_anew() -> None:
    steps = BEFORE_PLANNED + 20
    stock, training = Training(lambda: Net(10)), Training(lambda: Net(10))
    manager = training.manage("lookahead", 60 * MIB, bytes_per_s=5e9)
    training.steps(steps)
    status = manager.status()
    assert status.corrections >= 1
    assert (status.state, status.steps, status.diverged_steps) == (ManagerState.RUNNING, 20, 0)
    # Those of a follower, once: before and after the model and each of its eleven blocks.
    assert hook_count(training) == OWN_HOOKS + 2 * 12
    corrected = manager._plans._calibration.apply(manager._machine.hardware)
    assert corrected.to_device_bytes_per_s < 6e9
    stock.steps(steps)
    assert training.equals(stock)


def test_a_phase_waits_for_the_pages_of_all_batches_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are two workers: the last one that was asked for may be there first."""
    machine = host_machine(TIGHT)
    model = Net()
    store = ActivationStore(machine.device, machine.mover)
    runner = Runner(machine, store, Block("Net", model), lambda _: None)
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
    for hints in coming:
        assert machine.engine.submit_batch(hints.batch, 0)
    waited: list[int] = []
    wait = HintEngine.wait

    def spy(engine: HintEngine, ticket: int, **timeout: Any) -> HintOutcome:
        waited.append(ticket)
        return wait(engine, ticket, **timeout)

    monkeypatch.setattr(HintEngine, "wait", spy)
    needing = PhaseWork(needs=((0, 0), (0, 1), (1, 0)), waits=True)
    phases = (*(PhaseWork(coming=hints) for hints in coming), needing)
    runner._need(cast(Program, SimpleNamespace(work=phases)), needing)
    assert waited == [ticket for hints in coming for ticket in hints.batch.tickets]


# ------------------------------------------------------------------------------------ overhead


def test_a_boundary_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    manager = training.manage("lookahead", 34 * MIB)
    training.steps(BEFORE_PLANNED + 1)
    runner, program = manager._runner, program_of(manager)

    def hints(op: HintOp, first: int) -> Hints:
        addresses = (np.arange(first, first + 15) << 21) + (1 << 40)
        weights = [TensorClass.WEIGHTS] * 15
        return Hints(manager.engine.batch([op] * 15, addresses, [2 * MIB] * 15, weights), ())

    program.work[1].leaving, program.work[1].coming = (
        hints(HintOp.EVICT, 0),
        hints(HintOp.PREFETCH, 15),
    )
    program.work[1].room, program.work[1].needs = None, ()
    labels = [one.label for one in program.followed if one.phase <= 1]
    before = asked(manager)
    took_s = []
    for _ in range(200):
        runner.step_begins()
        began_s = time.thread_time()
        for label in labels:
            runner.phase_begins(label)
        took_s.append(time.thread_time() - began_s)
    with capsys.disabled():
        print(f"\ntwo boundaries, one with 30 hints: median {median(took_s) * 1e6:.1f} us", end="")
    new = asked(manager) - before
    assert new["evict", TensorClass.WEIGHTS] == new["prefetch", TensorClass.WEIGHTS] == 200 * 15
    assert median(took_s) < 1e-3


# ------------------------------------------------------------------------------------ small blocks


def test_small_tensors_stay() -> None:
    class Small(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.bias

    _, manager = both(lambda training: training.steps(10), "lookahead", 34 * MIB, make_model=Small)
    schedule, trace = program_of(manager).candidate.schedule, manager.trace
    assert trace is not None
    assert trace.tensor_bytes[schedule.hint_tensor].min() >= 2 * MIB
    assert min(trace.tensor_bytes) < 2 * MIB
    assert isinstance(_.model.head, Scale)


# ------------------------------------------------------------------------------------ residency


def test_residency_is_that_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another device's managers have sent away says nothing about this device."""

    def sent_away(device: int, size_bytes: int) -> SimpleNamespace:
        away = {TensorClass.WEIGHTS: size_bytes}
        return SimpleNamespace(device=torch.device("cuda", device), away_bytes=lambda: away)

    allocated = {"allocated_bytes": {"current": 100}}
    allocator = SimpleNamespace(class_stats=lambda _device: [allocated] * len(TensorClass))
    manage = sys.modules["umem.executor.manage"]  # the package's attribute is the function
    monkeypatch.setattr(manage, "runtime", lambda: SimpleNamespace(allocator=allocator))
    monkeypatch.setattr(manage, "managers", lambda: [sent_away(0, 30), sent_away(1, 60)])
    found = [umem.executor.residency(device)[TensorClass.WEIGHTS] for device in (0, 1, 2)]
    assert found == [70, 40, 100]
