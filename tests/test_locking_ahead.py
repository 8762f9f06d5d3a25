"""Page-locked memory is locked beside the first passes, and homes are served from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from lazy_lanes import HostStateMemory, LazyLanes
from measured_models import LAYER_STATE, LAYERS, Machine, Net, WallClockOf, batch
from other_process import run_python
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from umem.core.classes import TensorClass
from umem.hardware import load_hardware
from umem.offloading import ActivationStore
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.streaming.stage import CudaRoom, StateRoom
from umem.streaming.training import StreamedTraining
from umem.streaming.tune import StreamTuner

GIB = 1 << 30
STATE = TensorClass.OPTIMIZER_STATE.number


class Training:
    """A GiB of weights on a GPU that is not there; state is page-locked where it has no room."""

    def __init__(self, budget_gib: int | None) -> None:
        kinds = {STATE: "pinned"}
        settings = [ClassSetting(kind=kinds.get(it.number, "device")) for it in TensorClass]
        budget_bytes = None if budget_gib is None else budget_gib * GIB
        self.memory = Allocator.on_host(Config(settings, device_budget_bytes=budget_bytes or 0))
        self.memory.malloc(GIB)
        self.room = StateRoom(self.memory, [budget_bytes])
        with FakeTensorMode(allow_non_fake_inputs=True):
            weights = [torch.empty(1 << 24, device="cuda") for _ in range(16)]
            self.model = nn.ParameterList(map(nn.Parameter, weights))

    @property
    def locked_bytes(self) -> int:
        return int(self.memory.stats(0)["locked_ahead_bytes"])

    @property
    def pinned_bytes(self) -> int:
        return self.memory.kind_stats(0)["pinned"]["reserved_bytes"]

    def bear(self, size_bytes: int) -> None:
        with self.memory.class_override(STATE):
            self.memory.malloc(size_bytes)


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_state_is_born_in_memory_that_was_locked_beside_the_passes() -> None:
    training = Training(3)
    optimizer = torch.optim.AdamW(training.model.parameters(), fused=True)
    training.room.expect(training.model)
    wait_for(lambda: training.locked_bytes > GIB)
    training.memory.malloc(GIB)  # the gradients
    training.room.open(optimizer)
    before = training.memory.stats(0)["served"]
    for _ in range(32):
        training.bear(GIB // 16)
    training.room.close(optimizer)
    after = training.memory.stats(0)["served"]
    homes = sum(it[1] == GIB // 16 and it[-1] == "pinned" for it in training.memory.live_blocks())
    assert 16 < homes < 32
    # The last one exceeds the estimate: it is the only one that has memory locked for itself.
    assert after["cached"] - before["cached"] == homes - 1
    assert (homes - 1) * GIB // 16 <= training.locked_bytes < homes * GIB // 16


@pytest.mark.parametrize(
    ("kind", "options", "copies"),
    [
        ("Adam", {"amsgrad": True}, 3),
        ("SGD", {"momentum": 0.9}, 1),
        ("SGD", {}, 0),
        ("Rprop", {}, 0),
    ],
)
def test_the_class_of_an_optimizer_tells_its_state(kind: str, options: Any, copies: int) -> None:
    training = Training(1)
    _kept = getattr(torch.optim, kind)(training.model.parameters(), **options)
    training.room.expect(training.model)
    wait_for(lambda: training.locked_bytes == copies * GIB)


@pytest.mark.parametrize(("budget_gib", "records"), [(8, True), (None, True), (1, False)])
def test_what_is_not_streamed_has_no_thread(budget_gib: int | None, records: bool) -> None:
    training = Training(budget_gib)
    _kept = torch.optim.AdamW(training.model.parameters(), fused=True)
    with torch.set_grad_enabled(records), pytest.MonkeyPatch.context() as patch:
        patch.delattr(f"{StateRoom.__module__}.lock_ahead")
        training.room.expect(training.model)


def test_a_plan_has_its_homes_locked_and_the_rest_goes_back() -> None:
    training = Training(8)
    training.bear(GIB)
    room = CudaRoom(training.memory, 0, 8 * GIB, [TensorClass.OPTIMIZER_STATE])
    room.lock_ahead(3 * GIB)
    wait_for(lambda: training.pinned_bytes == 3 * GIB)
    training.bear(GIB // 2)
    room.end_locking_ahead()
    wait_for(lambda: training.pinned_bytes == 2 * GIB)


class Room(Machine):
    """Notes for which homes memory is to be locked, and after how many ends of steps."""

    ends = 0
    begun: tuple[int, int] | None = None

    def lock_ahead(self, home_bytes: int) -> None:
        self.begun = home_bytes, self.ends

    def end_locking_ahead(self) -> None:
        self.ends += 1


def test_the_homes_are_those_of_the_plan() -> None:
    machine = Room()
    net: Any = Net(machine)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    clock, store = WallClockOf(machine), ActivationStore("cpu", LazyMover(), min_bytes=1024)
    memory = HostStateMemory(1024, parameters=net.parameters())
    tuner = StreamTuner(net, load_hardware("h200"), clock, machine, store, state_share=0.5)

    def step(number: int) -> None:
        optimizer.zero_grad()
        net(batch(number)).square().mean().backward()
        optimizer.step()

    step(0)
    training: Any = StreamedTraining(net, optimizer, LazyLanes(net, 0.5, 1), memory, tuner)
    for number in range(1, 6):
        step(number)
    assert machine.begun is not None
    assert machine.begun[0] == LAYERS * LAYER_STATE - memory.device_bytes > 0
    assert machine.ends > machine.begun[1]  # behind the first step under the plan
    training.close()


AMID_IT = """
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.locking_ahead import lock_ahead
memory = Allocator.on_host(Config([ClassSetting(kind="pinned")] * 6))
lock_ahead(memory, 0, 1 << 46)
while not memory.stats(0)["locked_ahead_bytes"]: pass
print(memory.stats(0)["locked_ahead_bytes"] < 1 << 46)
"""


def test_a_process_that_ends_amid_it() -> None:
    assert run_python("-c", AMID_IT) == "True\n"
