"""What a manager does to the machine that it shares: the allocator's budget, sizes, bandwidths."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from managed_training import MIB, WIDTH, Net, Training, host_machine

from umem.core.block_sizes import LARGE_BYTES, block_bytes
from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.executor import Manager, ManagerState
from umem.executor.budget_lift import BudgetLift, lifted_bytes
from umem.executor.calibration import BandwidthCalibration
from umem.executor.machine import Machine
from umem.executor.manage import manage_on
from umem.executor.program import Hints
from umem.executor.tensor_addresses import in_blocks
from umem.runtime.hints import HintCounts, HintEngine, HintSettings, HintStatistics
from umem.runtime.native_library import native

pytestmark = pytest.mark.usefixtures("one_thread")

BEFORE_PLANNED = 7
GIB = 1 << 30
BUDGET = 48 * MIB
ODD_WIDTH = WIDTH + 1000
"""Numbers in no whole number of pages."""


@dataclass(eq=False)
class CountingAllocator:
    """Keeps what it is told of budgets, and tells the peaks that it is given."""

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


# ------------------------------------------------------------------------------------ sizes


def asked_activations(manager: Manager) -> Counter[str]:
    """Page hints for activations so far."""
    counts = manager.engine.statistics().counts
    return Counter(
        {
            op: sum(of.requests.values())
            for (op, tensor_class), of in counts.items()
            if tensor_class is TensorClass.ACTIVATIONS
        }
    )


@pytest.mark.parametrize("has_allocator", [False, True])
def test_activations_of_any_size_get_their_hints(
    has_allocator: bool, allocator: CountingAllocator
) -> None:
    training = Training(lambda: Net(numbers=ODD_WIDTH), width=ODD_WIDTH)
    machine = machine_with(allocator if has_allocator else None, 56 * MIB)
    manager = managed(training, machine, "lookahead")
    training.steps(BEFORE_PLANNED + 2)
    program, trace = manager._runner.program, manager.trace
    assert program is not None
    assert trace is not None
    before = asked_activations(manager)
    training.steps(2)
    schedule = program.candidate.schedule
    of_class = trace.tensor_class[schedule.hint_tensor] == TensorClass.ACTIVATIONS.number
    expected = Counter(HintOp(op).name.lower() for op in schedule.hint_op[of_class].tolist())
    assert expected["evict"] > 0
    assert asked_activations(manager) - before == expected + expected


def test_what_was_not_asked_for_is_not_away(allocator: CountingAllocator) -> None:
    training = Training()
    manager = managed(training, machine_with(allocator, 40 * MIB), "fault")
    training.steps(BEFORE_PLANNED + 1)
    most: Counter[TensorClass] = Counter()

    def look() -> None:
        for tensor_class, size_bytes in manager.away_bytes().items():
            most[tensor_class] = max(most[tensor_class], size_bytes)

    for layer in training.model.modules():
        layer.register_forward_hook(lambda *_: look())
    training.step()
    assert most[TensorClass.ACTIVATIONS] > 0
    most.clear()
    training.step(rows=1)  # a hint would reach beyond its tensors
    assert most[TensorClass.ACTIVATIONS] == 0
    assert most[TensorClass.OPTIMIZER_STATE] > 0


def test_only_what_the_engine_takes_was_asked_for() -> None:
    engine = HintEngine.on_host(HintSettings(capacity=2))
    training = Training()
    manager = managed(training, replace(host_machine(BUDGET), engine=engine))
    addresses = [(1 << 40) + number * LARGE_BYTES for number in range(4)]
    classes = [TensorClass.WEIGHTS] * 4
    batch = engine.batch([HintOp.EVICT] * 4, addresses, [LARGE_BYTES] * 4, classes)
    hints = Hints(batch, ((1, lambda: 0),), (40, 41, 42, 43))
    assert manager._runner._fire(hints) == {40, 42}
    engine.shutdown()
    assert manager._runner._fire(hints) == frozenset()
    manager.close()


def test_a_trace_is_in_the_allocators_blocks(allocator: CountingAllocator) -> None:
    training = Training()
    manager = managed(training, machine_with(None))
    training.steps(BEFORE_PLANNED + 1)
    trace = manager.trace
    assert trace is not None
    sizes = [1, 513, LARGE_BYTES - 513, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 7 * MIB]
    count = len(sizes)
    told = np.concatenate([sizes, trace.tensor_bytes[count:]]).astype(np.int64)
    found = in_blocks(replace(trace, tensor_bytes=told)).tensor_bytes[:count].tolist()
    blocks = block_bytes(sizes).tolist()
    assert blocks[3] == LARGE_BYTES  # as long as a large one, and shares pages
    assert found == [*blocks[:3], LARGE_BYTES - 1, *blocks[4:]]
    assert found[:3] == [512, 1024, LARGE_BYTES - 512]
    assert found[5] == LARGE_BYTES + (64 << 10)


# ------------------------------------------------------------------------------------ budget


def test_the_bound_without_the_budget_leaves_room_for_contexts() -> None:
    assert lifted_bytes(90 * GIB, 140 * GIB) == 133 * GIB
    assert lifted_bytes(8 * GIB, 12 * GIB) == 11 * GIB
    assert lifted_bytes(139 * GIB, 140 * GIB) == 139 * GIB
    assert lifted_bytes(20 * MIB, 64 * MIB) == 20 * MIB


def test_the_allocator_has_a_bound_until_a_plan_runs(allocator: CountingAllocator) -> None:
    training = Training()
    machine = machine_with(allocator)
    manager = managed(training, machine)
    card_bytes = machine.hardware.device_bytes
    training.steps(BEFORE_PLANNED - 1)
    assert allocator.budgets == [lifted_bytes(BUDGET, card_bytes)]
    assert BUDGET < allocator.budgets[0] < card_bytes
    training.steps(3)
    assert manager.status().state is ManagerState.RUNNING
    assert allocator.budgets[1:] == [0]
    manager.close()
    manager.close()
    assert allocator.budgets[2:] == [BUDGET]


def test_a_training_that_is_dropped_gives_the_budget_back(allocator: CountingAllocator) -> None:
    training = Training()
    manager = managed(training, machine_with(allocator))
    training.steps(BEFORE_PLANNED + 1)
    assert manager.status().state is ManagerState.RUNNING
    del training, manager
    gc.collect()
    assert allocator.budgets[-1] == BUDGET


def test_the_last_manager_of_a_device_gives_the_budget_back(allocator: CountingAllocator) -> None:
    trainings = Training(), Training()
    first, second = (managed(training, machine_with(allocator)) for training in trainings)
    trainings[0].steps(BEFORE_PLANNED + 1)
    second.close()
    assert first.status().state is ManagerState.RUNNING
    assert BUDGET not in allocator.budgets
    other = CountingAllocator()
    elsewhere = BudgetLift(machine_with(other))
    elsewhere.acquire()
    elsewhere.release()
    assert other.budgets[1:] == [BUDGET]
    assert BUDGET not in allocator.budgets
    first.close()
    assert allocator.budgets[-1] == BUDGET


def test_where_the_policy_has_no_budget_nothing_is_lifted(allocator: CountingAllocator) -> None:
    machine = machine_with(allocator)
    lift = BudgetLift(replace(machine, policy=replace(machine.policy, device_budget_bytes=None)))
    lift.acquire()
    lift.release()
    assert allocator.budgets == []


@pytest.mark.parametrize(("card_bytes", "comes_back"), [(2 * GIB, True), (64 * MIB, False)])
def test_what_was_mapped_comes_back_where_the_card_has_room(
    card_bytes: int, comes_back: bool
) -> None:
    settings = [native().ClassSetting()] * len(TensorClass)
    config = native().Config(settings, device_budget_bytes=20 * MIB)
    allocator = native().Allocator.on_host(config, device_total_bytes=card_bytes)
    blocks = [allocator.malloc(16 * MIB) for _ in range(3)]
    # A request without pages of its own must not move its neighbours.
    blocks.append(allocator.malloc(LARGE_BYTES - 1))
    assert allocator.kind_stats(0)["managed"]["spilled_bytes"] >= 32 * MIB
    machine = machine_with(allocator, 20 * MIB)
    machine = replace(machine, hardware=replace(machine.hardware, device_bytes=card_bytes))
    lift = BudgetLift(machine)
    lift.acquire()
    lift.acquire()
    counts = machine.engine.statistics().counts
    prefetches = sum(
        sum(of.requests.values()) for (op, _), of in counts.items() if op == "prefetch"
    )
    assert prefetches == (2 if comes_back else 0)  # the first one had room
    lift.release()
    for address in blocks:
        allocator.free(address)


# ------------------------------------------------------------------------------------ peaks


@pytest.mark.parametrize(
    ("highest_mib", "state"), [(100, ManagerState.RECORDING), (40, ManagerState.RESIDENT)]
)
def test_a_loop_that_resets_peaks_does_not_seem_to_fit(
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


# ------------------------------------------------------------------------------------ bandwidths


class CountingEngine:
    """Tells what it is told to have moved."""

    def __init__(self) -> None:
        self.moved: dict[Any, tuple[int, float]] = {}

    def move(self, op: str, size_bytes: int, seconds: float) -> None:
        key = op, TensorClass.WEIGHTS
        before_bytes, before_s = self.moved.get(key, (0, 0.0))
        self.moved[key] = before_bytes + size_bytes, before_s + seconds

    def statistics(self) -> HintStatistics:
        zero = dict.fromkeys(HintCounts.__dataclass_fields__, 0)
        counts: dict[Any, HintCounts] = {
            key: HintCounts(**{**zero, "moved_bytes": size_bytes, "driver_s": seconds})  # type: ignore[arg-type]
            for key, (size_bytes, seconds) in self.moved.items()
        }
        zero = dict.fromkeys(HintStatistics.__dataclass_fields__, 0)
        return HintStatistics(**{**zero, "counts": counts})  # type: ignore[arg-type]


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


def correction_of(engine: CountingEngine) -> tuple[BandwidthCalibration, Any]:
    hardware = replace(
        host_machine(BUDGET).hardware,
        to_device_bytes_per_s=50e9,
        to_host_bytes_per_s=25e9,
        link_bytes_per_s=60e9,
    )
    return BandwidthCalibration(engine), hardware  # type: ignore[arg-type]


def test_a_bandwidth_is_moved_bytes_by_the_links_time(engine: CountingEngine) -> None:
    correction, hardware = correction_of(engine)
    engine.move("prefetch", 1 * GIB, GIB / 20e9)
    assert not correction.is_due(3, hardware)
    assert correction.is_due(4, hardware)
    assert correction.apply(hardware).to_device_bytes_per_s == pytest.approx(20e9)
    assert correction.apply(hardware).to_host_bytes_per_s == 25e9
    engine.move("prefetch", 1 * GIB, GIB / 20e9)
    assert not correction.is_due(8, hardware)
    assert correction.count == 1


def test_a_link_that_was_slow_at_first_is_believed_again(engine: CountingEngine) -> None:
    correction, hardware = correction_of(engine)
    engine.move("evict", 1 * GIB, GIB / 10e9)
    assert correction.is_due(4, hardware)
    assert correction.apply(hardware).to_host_bytes_per_s == pytest.approx(10e9)
    engine.move("evict", 1 * GIB, GIB / 11e9)
    assert not correction.is_due(8, hardware)
    engine.move("evict", 1 * GIB, GIB / 20e9)
    assert correction.is_due(12, hardware)
    assert correction.apply(hardware).to_host_bytes_per_s == pytest.approx(20e9)


def test_no_link_is_believed_to_be_faster_than_the_hardware_says(engine: CountingEngine) -> None:
    correction, hardware = correction_of(engine)
    engine.move("evict", 4 * GIB, 4 * GIB / 100e9)  # of which most was there already
    assert not correction.is_due(4, hardware)
    engine.move("evict", 1 * GIB, GIB / 10e9)
    assert correction.is_due(8, hardware)
    engine.move("evict", 4 * GIB, 4 * GIB / 100e9)
    assert correction.is_due(12, hardware)
    assert correction.apply(hardware).to_host_bytes_per_s == 25e9


def test_a_direction_is_slow_below_its_part_of_the_link(engine: CountingEngine) -> None:
    correction, hardware = correction_of(engine)
    engine.move("prefetch", 1 * GIB, GIB / 40e9)  # 60 of 75: both have 0.8 of their own
    engine.move("evict", 1 * GIB, GIB / 20e9)
    assert not correction.is_due(4, hardware)
    engine.move("evict", 1 * GIB, GIB / 16e9)
    assert correction.is_due(8, hardware)
    assert correction.apply(hardware).to_host_bytes_per_s == pytest.approx(16e9)


def test_little_is_believed_once_it_is_enough(engine: CountingEngine) -> None:
    correction, hardware = correction_of(engine)
    engine.move("prefetch", 300 * MIB, 0.012)  # 26 GB/s, of which one pause may be half
    assert not correction.is_due(4, hardware)
    engine.move("evict", 200 * MIB, 0.1)
    assert not correction.is_due(8, hardware)
    engine.move("prefetch", 300 * MIB, 0.012)
    assert correction.is_due(12, hardware)
    assert correction.apply(hardware).to_device_bytes_per_s == pytest.approx(600 * MIB / 0.024)
    assert correction.apply(hardware).to_host_bytes_per_s == 25e9


def test_a_link_that_is_used_in_place_too_is_not_slow_for_that(engine: CountingEngine) -> None:
    correction, hardware = correction_of(engine)
    engine.move("prefetch", 1 * GIB, 4 * 0.02 + GIB / 40e9)
    assert not correction.is_due(4, hardware, in_place_s=0.02)
    engine.move("prefetch", 1 * GIB, 4 * 0.02 + GIB / 20e9)
    assert correction.is_due(8, hardware, in_place_s=0.02)
    assert correction.apply(hardware).to_device_bytes_per_s == pytest.approx(20e9)
