"""A manager and its machine: block sizes, the allocator's budget."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from managed_training import (
    BEFORE_PLANNED,
    MIB,
    Net,
    Training,
    host_machine,
    run_phases,
)

from umem.capture.live import Block
from umem.core.block_sizes import LARGE_BYTES, block_bytes
from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.managing import manage_on, unpromised_bytes
from umem.offloading import ActivationStore
from umem.pages import Manager, ManagerState
from umem.pages.run.machine import Machine
from umem.pages.run.mapped_blocks import AllocatorBudget, bring_back_spilled
from umem.pages.run.program import Hints, PhaseWork
from umem.pages.run.runner import Runner
from umem.pages.run.step_plan import PhasePlan
from umem.pages.run.tensor_addresses import in_blocks
from umem.runtime.hints import HintEngine, HintSettings
from umem.runtime.native_library import native
from umem.runtime.peak_reader import PeakReader

GIB = 1 << 30
BUDGET = 48 * MIB


@dataclass(eq=False)
class CountingAllocator:
    """An allocator that notes its budgets, and reports the peaks set here."""

    highest_bytes: int = 1 << 40
    peak_bytes: int = 1 << 40
    budgets: list[int] = field(default_factory=list)

    def set_device_budget(self, _device: int, size_bytes: int) -> None:
        self.budgets.append(size_bytes)

    def kind_stats(self, _device: int) -> dict[str, dict[str, int]]:
        return {"managed": {"spilled_bytes": 0}}

    def stats(self, _device: int) -> dict[str, Any]:
        peaks = {"allocated_bytes": {"all": {"peak": self.peak_bytes}}}
        return {**peaks, "highest_bytes": self.highest_bytes}


@pytest.fixture
def allocator() -> CountingAllocator:
    return CountingAllocator()


def machine_with(allocator: Any, budget_bytes: int = BUDGET, **hints: Any) -> Machine:
    return replace(host_machine(budget_bytes, **hints), allocator=allocator)


def managed(training: Training, machine: Machine, planner: Any = "planned") -> Manager:
    return manage_on(training.model, training.optimizer, lambda: machine, planner)


def test_only_hints_that_the_engine_accepts_count() -> None:
    engine = HintEngine.on_host(HintSettings(capacity=2))
    machine = replace(host_machine(BUDGET), engine=engine)
    store = ActivationStore(machine.device)
    addresses = [(1 << 40) + number * LARGE_BYTES for number in range(4)]
    classes = [TensorClass.WEIGHTS] * 4
    batch = engine.batch([HintOp.EVICT] * 4, addresses, [LARGE_BYTES] * 4, classes)
    work = PhaseWork(PhasePlan(), leaving=Hints(batch, ((1, lambda: 0),), (40, 41, 42, 43)))
    accepted: list[Any] = [{40, 42}, set()]  # by a queue of two, by an engine that was shut down
    for tensors in accepted:
        runner = Runner(machine, store, Block("Net", Net()))
        run_phases(runner, work)
        assert runner.away_bytes() == tensors
        engine.shutdown()


@pytest.mark.slow
def test_a_trace_has_the_sizes_of_the_allocators_blocks(allocator: CountingAllocator) -> None:
    training = Training()
    manager = managed(training, machine_with(None))
    training.steps(BEFORE_PLANNED + 1)
    trace = manager.trace
    assert trace is not None
    sizes = [1, 513, LARGE_BYTES - 513, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 7 * MIB]
    count = len(sizes)
    sizes_of_trace = np.concatenate([sizes, trace.tensor_bytes[count:]]).astype(np.int64)
    found = in_blocks(replace(trace, tensor_bytes=sizes_of_trace)).tensor_bytes[:count].tolist()
    blocks = block_bytes(sizes).tolist()
    assert blocks[3] == LARGE_BYTES  # rounded to a large block, but it shares pages
    assert found == [*blocks[:3], LARGE_BYTES - 1, *blocks[4:]]
    assert found[:3] == [512, 1024, LARGE_BYTES - 512]
    assert found[5] == LARGE_BYTES + (64 << 10)


@pytest.mark.slow
def test_the_allocator_keeps_the_budget_until_a_plan_does(allocator: CountingAllocator) -> None:
    training = Training()
    manager = managed(training, machine_with(allocator))
    training.steps(BEFORE_PLANNED - 1)
    assert manager.status().state is ManagerState.RECORDING
    assert allocator.budgets == []  # it has the policy's from the start
    training.steps(3)
    assert manager.status().state is ManagerState.RUNNING
    assert allocator.budgets == [0]
    manager.close()
    manager.close()
    assert allocator.budgets == [0, BUDGET]


@pytest.mark.slow
def test_a_dropped_training_restores_the_budget(allocator: CountingAllocator) -> None:
    training = Training()
    manager = managed(training, machine_with(allocator))
    training.steps(BEFORE_PLANNED + 1)
    assert manager.status().state is ManagerState.RUNNING
    del training, manager
    gc.collect()
    assert allocator.budgets == [0, BUDGET]


@pytest.mark.slow
def test_trainings_of_a_process_leave_each_other_host_memory() -> None:
    assert unpromised_bytes(600 * MIB) == 600 * MIB
    first, second = Training(), Training()
    kept = [managed(first, machine_with(None, 34 * MIB)), managed(second, machine_with(None))]
    assert unpromised_bytes(600 * MIB) == 200 * MIB, "none has a plan, and one more comes"
    first.steps(BEFORE_PLANNED + 1)
    assert kept[0].status().state is ManagerState.RUNNING
    trace = kept[0].trace
    assert trace is not None
    promised_bytes = kept[0].promised_host_bytes()
    assert 0 < promised_bytes < trace.tensor_bytes.sum() - 34 * MIB
    assert unpromised_bytes(600 * MIB) == (600 * MIB - promised_bytes) // 2
    assert unpromised_bytes(promised_bytes // 2) == 0
    for manager in kept:
        manager.close()
    assert unpromised_bytes(600 * MIB) == 600 * MIB


@pytest.mark.slow
def test_many_optimizers_of_one_model_are_warned_of_once(
    allocator: CountingAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model.children()]
    optimizers = [*optimizers, *(torch.optim.SGD(model.parameters(), 0.1) for _ in range(3))]
    with caplog.at_level(logging.WARNING, "umem"):
        kept = [
            manage_on(model, it, lambda: machine_with(allocator), "planned") for it in optimizers
        ]
        other = managed(Training(), machine_with(allocator))
    assert len(caplog.records) == 1
    assert caplog.records[0].args == (2, "Net")
    assert [it.status().state is ManagerState.OFF for it in kept] == [True] * 4 + [False]
    assert other.status().state is not ManagerState.OFF
    for manager in (*kept, other):
        manager.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_larger_first", [False, True])
def test_many_optimizers_of_one_model_have_one_plan(is_larger_first: bool) -> None:
    """Two would keep what each likes on the device: more than the budget that each has."""

    def split(model: Any) -> list[torch.optim.Optimizer]:
        parts = [model.layers, model.head] if is_larger_first else [model.head, model.layers]
        return [torch.optim.AdamW(it.parameters(), lr=1e-2) for it in parts]

    def steps(training: Training, optimizers: list[torch.optim.Optimizer]) -> None:
        for _ in range(BEFORE_PLANNED + 4):
            loss = training.forward()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            training.losses.append(loss.item())

    stock, training = Training(), Training()
    steps(stock, split(stock.model))
    optimizers = split(training.model)
    kept = [
        manage_on(training.model, it, lambda: host_machine(40 * MIB), "planned")
        for it in optimizers
    ]
    steps(training, optimizers)
    states = [it.status().state for it in kept]
    assert states[not is_larger_first] is ManagerState.RUNNING
    assert states[is_larger_first] is ManagerState.OFF
    assert training.losses == stock.losses
    for manager in kept:
        manager.close()


def test_readers_of_a_peak_do_not_hide_it_from_each_other() -> None:
    config = native().Config([native().ClassSetting()] * len(TensorClass))
    allocator = native().Allocator.on_host(config, devices=2)
    first, second, elsewhere = (PeakReader(allocator, device) for device in (0, 0, 1))
    allocator.free(allocator.malloc(16 * MIB))
    assert first.take() == 16 * MIB
    assert second.take() == 16 * MIB
    assert elsewhere.take() == 0
    block = allocator.malloc(2 * MIB)
    assert (first.take(), first.take(), second.take()) == (2 * MIB,) * 3
    allocator.free(block)


@pytest.mark.slow
def test_the_last_plan_of_a_device_restores_the_budget(allocator: CountingAllocator) -> None:
    trainings = Training(), Training()
    first, second = (managed(training, machine_with(allocator)) for training in trainings)
    for training in trainings:
        training.steps(BEFORE_PLANNED + 1)
    second.close()
    assert first.status().state is ManagerState.RUNNING
    assert set(allocator.budgets) == {0}
    elsewhere = CountingAllocator()
    managed(Training(), machine_with(elsewhere)).close()
    assert elsewhere.budgets == []
    first.close()
    assert allocator.budgets[-1] == BUDGET


def test_without_a_budget_the_allocator_gets_none(allocator: CountingAllocator) -> None:
    machine = machine_with(allocator)
    budget = AllocatorBudget(
        replace(machine, policy=replace(machine.policy, device_budget_bytes=None))
    )
    budget.keep(None)
    budget.keep()
    assert allocator.budgets == []


@pytest.mark.slow
def test_memory_that_recording_leaves_on_the_host_is_no_part_of_the_budget(
    allocator: CountingAllocator,
) -> None:
    training = Training()
    manager = managed(training, machine_with(allocator, 34 * MIB), "fault")
    training.steps(BEFORE_PLANNED + 2)
    away_bytes = sum(manager.away_bytes().values())
    assert away_bytes > 0
    training.steps(2, rows=3)  # recorded from its second step on
    assert manager.status().state is ManagerState.RECORDING
    held_bytes = sum(manager.away_bytes().values())
    assert 0 < held_bytes <= away_bytes
    assert allocator.budgets[-1] == 34 * MIB + held_bytes


def test_spilled_memory_comes_back_where_a_plan_wants_it() -> None:
    settings = [native().ClassSetting()] * len(TensorClass)
    config = native().Config(settings, device_budget_bytes=20 * MIB)
    allocator = native().Allocator.on_host(config, device_total_bytes=2 * GIB)
    blocks = [allocator.malloc(16 * MIB) for _ in range(3)]
    # A block that shares its pages must not move its neighbours.
    blocks.append(allocator.malloc(LARGE_BYTES - 1))
    assert allocator.kind_stats(0)["managed"]["spilled_bytes"] >= 32 * MIB
    machine = machine_with(allocator, 20 * MIB)
    bring_back_spilled(machine, stay={blocks[2]})
    bring_back_spilled(machine)
    counts = machine.engine.statistics().counts
    prefetches = sum(of.asked for (op, _), of in counts.items() if op == "prefetch")
    assert prefetches == 1  # the first one had room
    for address in blocks:
        allocator.free(address)


@pytest.mark.slow
def test_a_plan_that_moves_nothing_leaves_the_training_alone(allocator: CountingAllocator) -> None:
    """Such as where only the first steps have passed the budget."""
    training = Training()
    manager = managed(training, machine_with(allocator, 400 * MIB))
    training.steps(BEFORE_PLANNED + 4)
    status = manager.status()
    assert (status.state, status.plans, status.unplanned) == (ManagerState.RESIDENT, 1, 0)
    assert allocator.budgets == []
    training.model.get_submodule("layers.0").requires_grad_(False)
    training.step()
    assert manager.status().state is ManagerState.RECORDING  # it may not fit any more
    training.steps(8)
    assert manager.status().state is ManagerState.RESIDENT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("highest_mib", "state"), [(100, ManagerState.RECORDING), (40, ManagerState.RESIDENT)]
)
def test_resetting_torchs_peaks_does_not_make_a_training_fit(
    highest_mib: int, state: ManagerState, allocator: CountingAllocator
) -> None:
    training = Training()
    manager = managed(training, machine_with(allocator))
    allocator.highest_bytes = highest_mib * MIB
    for _ in range(4):
        allocator.peak_bytes = 20 * MIB  # as after a reset at the top of the loop
        training.step()
    assert manager.status().state is state
    manager.close()
