"""Trainings that change under a plan, and searches that run beside them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from managed_training import BEFORE_PLANNED, MIB, Net, Training, both, host_machine, program_of

from umem.core.errors import PlanError
from umem.managing import manage_on
from umem.pages import Manager, ManagerState
from umem.pages.plan.plan_search import search_plan
from umem.pages.run.background import run_in_thread
from umem.pages.run.states import TRANSITIONS
from umem.runtime.hints import HintEngine, HintOutcome

ROOT = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------------- changes


@pytest.mark.slow
def test_a_layer_that_is_frozen_is_planned_anew() -> None:
    def train(training: Training) -> None:
        for step in range(BEFORE_PLANNED + 10):
            if step == BEFORE_PLANNED + 2:
                training.model.get_submodule("layers.0").requires_grad_(False)
            training.step()

    _, manager = both(train, "lookahead")
    status = manager.status()
    assert (status.state, status.diverged_steps) == (ManagerState.RUNNING, 0)
    assert manager.trace is not None
    assert "layers.0.weight.grad" not in manager.trace.tensor_names


@pytest.mark.slow
def test_a_parameter_group_that_is_added_is_planned_anew() -> None:
    def frozen_head() -> Net:
        model = Net()
        model.head.requires_grad_(False)
        return model

    def train(training: Training) -> None:
        head = training.model.get_parameter("head.weight")
        for step in range(BEFORE_PLANNED + 12):
            if step == BEFORE_PLANNED + 2:
                head.requires_grad_(True)
                training.optimizer.add_param_group({"params": [head]})
            training.step()

    _, manager = both(train, "lookahead", make_model=frozen_head)
    assert manager.status().state is ManagerState.RUNNING
    assert manager.trace is not None
    assert "head.weight.exp_avg" in manager.trace.tensor_names


class Growing(Net):
    """Uses one of its layers only from some step on."""

    short = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: 3 if self.short else 4]:
            x = layer(x)
        return self.head(x)


@pytest.mark.slow
def test_steps_that_diverge_for_good_are_planned_anew() -> None:
    def train(training: Training) -> None:
        model: Any = training.model
        for step in range(BEFORE_PLANNED + 14):
            model.short = step < BEFORE_PLANNED + 2
            training.step()

    _, manager = both(train, "lookahead", make_model=Growing)
    status = manager.status()
    assert (status.state, status.diverged_steps) == (ManagerState.RUNNING, 3)
    assert manager.trace is not None
    assert "backward layers.3" in manager.trace.phase_names


@pytest.mark.slow
def test_steps_that_always_diverge_are_recorded_ever_less_often() -> None:
    training = Training(Growing)
    manager = training.manage("lookahead")
    model: Any = training.model
    training.steps(BEFORE_PLANNED + 1)
    planned, begins, state = True, 0, ManagerState.RUNNING
    for _ in range(60):
        if state is ManagerState.RUNNING:
            model.short = not planned  # never as it was recorded
        else:
            planned = model.short
        training.step()
        before, state = state, manager.status().state
        begins += state is ManagerState.RECORDING and before is ManagerState.RUNNING
    assert 2 <= begins <= 4


# ---------------------------------------------------------------------- addresses


@pytest.mark.slow
def test_parameters_that_move_are_found_again() -> None:
    training = Training()
    manager = training.manage("lookahead", 34 * MIB)
    training.steps(BEFORE_PLANNED + 1)
    plan = program_of(manager).plan
    kept = [parameter.data for parameter in training.model.parameters()]
    for parameter in training.model.parameters():
        parameter.data = parameter.data.clone()
    training.step()
    assert len(kept) == 5
    assert program_of(manager).plan is plan
    addresses = set(program_of(manager).addresses.fixed.values())
    assert {it.data_ptr() for it in training.model.parameters()} <= addresses
    assert manager.status().diverged_steps == 0


@pytest.mark.slow
def test_state_that_is_cleared_is_planned_anew() -> None:
    def train(training: Training) -> None:
        training.steps(BEFORE_PLANNED + 1)
        training.optimizer.state.clear()
        training.steps(8)

    training, manager = both(train, "lookahead", 34 * MIB)
    assert manager.status().state is ManagerState.RUNNING
    states = training.optimizer.state.values()
    moments = {state[key].data_ptr() for state in states for key in ("exp_avg", "exp_avg_sq")}
    assert moments <= set(program_of(manager).addresses.fixed.values())


@pytest.mark.slow
def test_another_type_is_planned_anew() -> None:
    def train(training: Training) -> None:
        training.steps(BEFORE_PLANNED + 1)
        training.model.to(torch.float64)
        training.optimizer.state.clear()
        for _ in range(8):
            loss = training.model(training.batch().double()).square().mean()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.losses.append(loss.item())

    _, manager = both(train, "lookahead", 80 * MIB, make_model=lambda: Net(8))
    assert manager.status().state is ManagerState.RUNNING
    trace = manager.trace
    assert trace is not None
    assert trace.tensor_bytes[trace.tensor_names.index("head.weight")] == 4 * MIB


# ---------------------------------------------------------------------- graphs, late pages


@pytest.mark.slow
def test_a_captured_step_runs_without_the_plan() -> None:
    """A graph that waits for hints, or copies into their memory, could not be replayed."""
    training, stock = Training(), Training()
    captures = [False]
    machine = replace(host_machine(34 * MIB), is_capturing=lambda: captures[0])
    manager = manage_on(training.model, training.optimizer, lambda: machine, "planned")

    def open_requests() -> int:
        counts = manager.engine.statistics().counts.values()
        return sum(it.asked for it in counts)

    training.steps(BEFORE_PLANNED + 2)
    before, copied = open_requests(), manager.store.statistics.bytes_out
    captures[0] = True
    training.step()
    assert (open_requests(), manager.store.statistics.bytes_out) == (before, copied)
    captures[0] = False
    training.steps(2)
    status = manager.status()
    assert (status.state, status.diverged_steps) == (ManagerState.RUNNING, 1)
    assert open_requests() > before
    stock.steps(BEFORE_PLANNED + 5)
    assert training.equals(stock)


@pytest.mark.slow
def test_waits_that_time_out_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    manager = training.manage("planned", 34 * MIB)
    training.steps(BEFORE_PLANNED + 1)
    patience: list[float] = []

    def never(_engine: HintEngine, _ticket: int, *, timeout_s: float) -> HintOutcome:
        patience.append(timeout_s)
        return HintOutcome.OPEN

    monkeypatch.setattr(HintEngine, "wait", never)
    training.steps(4)
    assert len(patience) > 8
    assert patience[0] == 2.0
    assert sum(patience) < 1.5 * patience[0]
    monkeypatch.undo()
    assert manager.status().wait_timeouts == len(patience)
    waits: list[float] = []
    wait = HintEngine.wait

    def noted(engine: HintEngine, ticket: int, *, timeout_s: float) -> HintOutcome:
        waits.append(timeout_s)
        return wait(engine, ticket, timeout_s=timeout_s)

    monkeypatch.setattr(HintEngine, "wait", noted)
    training.steps(8)
    assert waits[-1] == 2.0  # it is patient again where pages come in time


# ---------------------------------------------------------------------- search


class Search:
    """A search that takes until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end, self.ended = (threading.Event() for _ in range(3))

        def slow(*given: Any, **more: Any) -> Any:
            self.begun.set()
            assert self.may_end.wait(60)
            return search_plan(*given, **more)

        monkeypatch.setattr("umem.pages.run.plans.search_plan", slow)

    def start(self, work: Callable[[], Any]) -> Any:
        future = run_in_thread(work)
        future.add_done_callback(lambda _: self.ended.set())
        return future

    def end(self, manager: Manager) -> None:
        self.may_end.set()
        manager.wait_for_search(60)
        assert self.ended.wait(60)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    return Search(monkeypatch)


def searching(training: Training, search: Search, planner: Any = "lookahead") -> Manager:
    """A training whose manager is searching."""
    machine = replace(host_machine(34 * MIB), background=search.start)
    manager = manage_on(training.model, training.optimizer, lambda: machine, planner)
    training.steps(BEFORE_PLANNED)
    assert search.begun.wait(60)
    assert manager.status().state is ManagerState.PLANNING
    return manager


@pytest.mark.slow
def test_a_training_goes_on_while_a_plan_is_searched_for(search: Search) -> None:
    training, stock = Training(), Training()
    manager = searching(training, search)
    training.steps(3)
    status = manager.status()
    assert (status.state, status.plans, status.steps) == (ManagerState.PLANNING, 0, 0)
    search.end(manager)
    training.steps(3)
    status = manager.status()
    assert (status.state, status.plans, status.steps) == (ManagerState.RUNNING, 1, 2)
    stock.steps(BEFORE_PLANNED + 6)
    assert training.equals(stock)


@pytest.mark.slow
def test_a_manager_may_be_closed_while_a_plan_is_searched_for(search: Search) -> None:
    training, stock = Training(), Training()
    manager = searching(training, search)
    manager.close()
    assert manager.status().reason == "closed"
    search.end(manager)
    training.steps(2)
    assert (manager.status().state, manager.status().plans) == (ManagerState.OFF, 0)
    stock.steps(BEFORE_PLANNED + 2)
    assert training.equals(stock)


@pytest.mark.slow
def test_a_plan_that_comes_too_late_is_dropped(search: Search) -> None:
    training = Training()
    manager = searching(training, search)
    training.model.get_submodule("layers.0").requires_grad_(False)
    training.step()
    assert manager.status().state is ManagerState.RECORDING
    search.end(manager)
    training.steps(2)
    assert manager.status().plans == 0
    training.steps(6)
    assert manager.status().state is ManagerState.RUNNING
    assert manager.trace is not None
    assert "layers.0.weight.grad" not in manager.trace.tensor_names


@pytest.mark.slow
def test_known_shapes_keep_their_plan_while_others_are_planned(search: Search) -> None:
    training = Training()
    manager = searching(training, search, "fault")
    search.end(manager)
    training.steps(2)
    search.begun.clear()
    search.may_end.clear()
    training.steps(6, rows=1)
    assert search.begun.wait(60)
    assert manager.status().state is ManagerState.PLANNING
    steps = manager.status().steps
    training.steps(2)
    assert manager.status().steps == steps + 2
    assert program_of(manager).plan.candidate.schedule.planner == "fault"
    search.ended.clear()
    search.end(manager)
    training.steps(2, rows=1)
    assert (manager.status().state, manager.status().plans) == (ManagerState.RUNNING, 2)


@pytest.mark.slow
def test_an_error_of_the_search_is_why_the_manager_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise PlanError("too large for any plan")

    monkeypatch.setattr("umem.pages.run.plans.search_plan", fails)
    training = Training()
    manager = training.manage()
    training.steps(BEFORE_PLANNED + 1)
    assert manager.status().state is ManagerState.OFF
    assert manager.status().reason == "too large for any plan"


@pytest.mark.slow
def test_a_process_may_end_while_a_search_runs() -> None:
    program = (
        "import threading\n"
        "from umem.pages.run.background import run_in_thread\n"
        "begun = threading.Event()\n"
        "def work():\n"
        "    begun.set()\n"
        "    threading.Event().wait()\n"
        "run_in_thread(work)\n"
        "begun.wait()\n"
        "print('ends')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "ends\n"


def test_the_docs_have_the_table_of_states() -> None:
    text = (ROOT / "docs" / "executor.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    table = {
        (row[0].strip("`"), row[1].strip("`")): row[2].strip("`") for row in rows if len(row) == 4
    }
    for (state, event), following in TRANSITIONS.items():
        key = "any" if event == "ended" else str(state), str(event)
        assert table.get(key) == following, (state, event)
    assert len(table) == len({("any" if e == "ended" else s, e) for s, e in TRANSITIONS})
