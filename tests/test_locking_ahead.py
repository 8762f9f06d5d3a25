"""Page-locked memory is locked beside the first passes, and homes are served from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from lazy_lanes import HostStateMemory, LazyLanes
from measured_models import BASE, LAYER_STATE, LAYERS, SLACK, Machine, Net, WallClockOf, batch
from other_process import run_python
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from umem.core.classes import TensorClass
from umem.hardware import load_hardware
from umem.offloading import ActivationStore
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.locking_ahead import end_locking_ahead
from umem.streaming.plan import FIRST_SLOTS, largest_slot_bytes, least_slack_bytes
from umem.streaming.stage import CudaRoom, StateRoom
from umem.streaming.training import StreamedTraining
from umem.streaming.tune import StreamTuner, planning

MIB = 1 << 20
WEIGHTS = 16
"""Of as many :data:`WEIGHT_BYTES`."""
WEIGHT_BYTES = 64 * MIB
STATE = TensorClass.OPTIMIZER_STATE.number


def allocator(budget_bytes: int, pinned_limit_bytes: int = 0) -> Allocator:
    """State is at home in page-locked memory, all else on the device."""
    settings = [ClassSetting(kind="device") for _ in TensorClass]
    settings[STATE] = ClassSetting(kind="pinned")
    config = Config(
        settings, device_budget_bytes=budget_bytes, pinned_limit_bytes=pinned_limit_bytes
    )
    return Allocator.on_host(config, 0, 1)


def budget_for(copies: float) -> int:
    """A budget with room for so many times the weights, beside slack and slots."""
    most_bytes = 8 << 30
    beside_bytes = least_slack_bytes(most_bytes) + FIRST_SLOTS * largest_slot_bytes(most_bytes)
    return int(copies * WEIGHTS * WEIGHT_BYTES) + beside_bytes


def model() -> nn.Module:
    """On a GPU that is not there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = [torch.empty(WEIGHT_BYTES // 4, device="cuda") for _ in range(WEIGHTS)]
        return nn.ParameterList(map(nn.Parameter, weights))


def locked_bytes(memory: Allocator) -> int:
    return int(memory.stats(0)["locked_ahead_bytes"])


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def born(memory: Allocator, size_bytes: int) -> str:
    """The kind of memory that state gets."""
    with memory.class_override(STATE):
        address = memory.malloc(size_bytes)
    return {block[0]: block[-1] for block in memory.live_blocks()}[address]


def pinned_bytes(memory: Allocator) -> int:
    return memory.kind_stats(0)["pinned"]["reserved_bytes"]


def test_state_is_born_in_memory_that_was_locked_beside_the_passes() -> None:
    """Of four times the weights, the budget has room for three: half of the state finds some."""
    budget_bytes = budget_for(3)
    memory, trained = allocator(budget_bytes), model()
    room = StateRoom(memory, [budget_bytes])
    optimizer = torch.optim.AdamW(trained.parameters(), fused=True)
    memory.malloc(WEIGHTS * WEIGHT_BYTES)
    room.expect(trained)
    least_bytes = WEIGHTS * WEIGHT_BYTES // 2
    wait_for(lambda: locked_bytes(memory) >= least_bytes)
    memory.malloc(WEIGHTS * WEIGHT_BYTES)  # the gradients
    room.open(optimizer)
    kinds = [born(memory, WEIGHT_BYTES) for _ in range(2 * WEIGHTS)]
    room.close(optimizer)
    served = memory.stats(0)["served"]
    on_device = kinds.count("device")
    assert kinds == ["device"] * on_device + ["pinned"] * (2 * WEIGHTS - on_device)
    assert 0 < on_device < 2 * WEIGHTS
    # No request has locked memory itself, and there is no more than was asked for.
    assert served["segment"] == 2 + on_device
    assert pinned_bytes(memory) == locked_bytes(memory) == kinds.count("pinned") * WEIGHT_BYTES


Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda it: torch.optim.AdamW(it.parameters(), fused=True), 2),
        (lambda it: torch.optim.Adam(it.parameters(), fused=True, amsgrad=True), 3),
        (lambda it: torch.optim.SGD(it.parameters(), fused=True, momentum=0.9), 1),
        (lambda it: torch.optim.SGD(it.parameters(), fused=True), 0),
        (lambda it: torch.optim.Rprop(it.parameters(), foreach=False), 0),
    ],
)
def test_the_class_of_an_optimizer_tells_its_state(make: Make, copies: int) -> None:
    """Of others nothing is locked ahead."""
    memory, trained = allocator(budget_for(1)), model()
    _optimizer = make(trained)
    memory.malloc(WEIGHTS * WEIGHT_BYTES)
    StateRoom(memory, [budget_for(1)]).expect(trained)
    wait_for(lambda: locked_bytes(memory) == copies * WEIGHTS * WEIGHT_BYTES)


@pytest.mark.parametrize("why", ["fits", "no budget", "no gradients", "frozen", "has state"])
def test_what_is_not_streamed_has_no_thread(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    budget_bytes = budget_for(6 if why == "fits" else 1)
    memory, trained = allocator(budget_bytes), model()
    optimizer = torch.optim.AdamW(trained.parameters(), fused=True)
    if why == "has state":
        optimizer.state[next(trained.parameters())]["exp_avg"] = torch.zeros(1)
    trained.requires_grad_(why != "frozen")
    begun: list[Any] = []
    monkeypatch.setattr(
        "umem.streaming.stage.state_room.lock_ahead", lambda *its: begun.append(its)
    )
    with torch.set_grad_enabled(why != "no gradients"):
        StateRoom(memory, [None if why == "no budget" else budget_bytes]).expect(trained)
    assert [list(it[2]) for it in begun] == ([[]] if why == "has state" else [])


def test_a_plan_has_its_homes_locked_and_the_rest_goes_back() -> None:
    memory = allocator(1 << 30)
    room = CudaRoom(memory, 0, 1 << 30, [TensorClass.OPTIMIZER_STATE])
    born(memory, 128 * MIB)
    room.lock_ahead([128 * MIB, *[64 * MIB] * 6])  # the first is there
    wait_for(lambda: locked_bytes(memory) == 384 * MIB)
    before = memory.stats(0)["served"]["segment"]
    for _ in range(2):
        born(memory, 64 * MIB)
    assert memory.stats(0)["served"]["segment"] == before
    assert pinned_bytes(memory) == (128 + 384) * MIB
    for _ in range(2):
        room.end_locking_ahead()
        wait_for(lambda: pinned_bytes(memory) == (128 + 128) * MIB)


def test_a_refusal_is_no_error() -> None:
    memory = allocator(1 << 30, pinned_limit_bytes=600 * MIB)
    room = CudaRoom(memory, 0, 1 << 30, [TensorClass.OPTIMIZER_STATE])
    room.lock_ahead([256 * MIB] * 4)
    wait_for(lambda: locked_bytes(memory) == 512 * MIB)
    assert [born(memory, 256 * MIB) for _ in range(2)] == ["pinned"] * 2
    born(memory, 64 * MIB)  # as far as the limit goes
    with pytest.raises(MemoryError):
        born(memory, 64 * MIB)
    end_locking_ahead(memory, 0)


class Room(Machine):
    """Notes which homes are expected."""

    def __init__(self, more_bytes: int) -> None:
        super().__init__(more_bytes)
        self.begun: list[list[int]] = []
        self.ends = 0

    def lock_ahead(self, sizes: Iterable[int]) -> None:
        self.begun.append(list(sizes))

    def end_locking_ahead(self) -> None:
        self.ends += 1


@pytest.fixture
def usual_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it would have room for these small models as a whole."""
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))


@pytest.mark.usefixtures("usual_slack")
def test_the_homes_are_those_of_the_plan() -> None:
    torch.manual_seed(0)
    machine = Room(3 * LAYER_STATE)
    net: Any = Net(machine)
    assert machine.budget_bytes == SLACK + BASE + 3 * LAYER_STATE
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        net(batch(number)).square().mean().backward()
        optimizer.step()

    step(0)
    memory = HostStateMemory(1024, parameters=net.parameters())
    clock, store = WallClockOf(machine), ActivationStore("cpu", LazyMover(), min_bytes=1024)
    tuner = StreamTuner(net, load_hardware("h200"), clock, machine, store)
    training = StreamedTraining(net, optimizer, LazyLanes(net, 0.5, 1), memory, tuner)
    for number in range(1, 6):
        step(number)
        if not machine.begun:
            ends = machine.ends
    status: Any = training.status().tuning
    assert status.plans == len(machine.begun) == 1
    home_bytes = LAYERS * LAYER_STATE - status.resident_bytes
    assert sum(machine.begun[0]) == home_bytes > 0
    assert machine.ends > ends  # behind the first step under the plan
    training.close()


AMID_IT = """
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.locking_ahead import lock_ahead

memory = Allocator.on_host(Config([ClassSetting(kind="pinned")] * 6), 0, 1)
lock_ahead(memory, 0, [256 << 20], 0)
memory.lock_ahead(0, [2 << 20] * 4096, 0, 0)
while not memory.stats(0)["locked_ahead_bytes"]:
    pass
print(memory.stats(0)["locked_ahead_bytes"] < 8 << 30)
"""


def test_a_process_that_ends_amid_it() -> None:
    assert run_python("-c", AMID_IT) == "True\n"
