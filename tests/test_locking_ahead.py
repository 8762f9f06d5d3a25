"""Page-locked memory is locked beside the first passes, and homes are served from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from found_trainings import Room, Streams, streaming
from other_process import run_python
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from umem.core.classes import TensorClass
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.streaming.stage import CudaRoom, StateRoom

GIB = 1 << 30
PINNED = {TensorClass.OPTIMIZER_STATE: "pinned"}


def expected(budget_gib: int, kind: str, **options: Any) -> tuple[Allocator, Callable[[], int]]:
    """Expect the state of a GiB of weights on a GPU that is not there; tell what is locked."""
    settings = [ClassSetting(kind=PINNED.get(it, "device")) for it in TensorClass]
    memory = Allocator.on_host(Config(settings, device_budget_bytes=budget_gib * GIB))
    memory.malloc(GIB)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.ParameterList([nn.Parameter(torch.empty(GIB // 4, device="cuda"))])
    _kept = getattr(torch.optim, kind)(model.parameters(), **options)
    StateRoom(memory, [budget_gib * GIB or None]).expect(model)
    return memory, lambda: int(memory.stats(0)["locked_ahead_bytes"])


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("budget_gib", "kind", "options", "copies"),
    [
        (1, "AdamW", {"fused": True}, 2),
        (1, "Adam", {"amsgrad": True}, 3),
        (1, "SGD", {"momentum": 0.9}, 1),
        (1, "SGD", {}, 0),
        (1, "Rprop", {}, 0),
        (8, "AdamW", {}, 0),  # all of it fits
        (0, "AdamW", {}, 0),  # there is no budget
    ],
)
def test_what_has_no_room_is_locked(budget_gib: int, kind: str, options: Any, copies: int) -> None:
    _, locked_bytes = expected(budget_gib, kind, **options)
    wait_for(lambda: locked_bytes() == copies * GIB)
    time.sleep(0.0 if copies else 0.02)  # a thread would have locked some
    assert locked_bytes() == copies * GIB


def test_homes_of_a_plan_are_served() -> None:
    memory, locked_bytes = expected(8, "SGD")
    room = CudaRoom(memory, 0, 8 * GIB, PINNED)
    for gib in (2, 4):  # the second time there are two
        room.lock_ahead(gib * GIB)
        wait_for(lambda gib=gib: locked_bytes() == gib * GIB)  # type: ignore[misc]
    segments = memory.stats(0)["served"]["segment"]
    with memory.class_override(TensorClass.OPTIMIZER_STATE.number):
        memory.malloc(GIB // 2)
    assert memory.stats(0)["served"]["segment"] == segments
    room.trim()  # as the next plan does
    assert memory.kind_stats(0)["pinned"]["reserved_bytes"] == GIB


@pytest.mark.slow
def test_a_plan_asks_for_its_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Room, "lock_ahead", lambda _, home_bytes: asked.append(home_bytes))
    model, streams = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), Streams()
    optimizer = torch.optim.AdamW(model.parameters())
    with streaming(streams, monkeypatch):
        for _ in range(6):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
    assert asked[0] == streams.status[0].state_bytes > 0  # all of it is streamed


AMID_IT = """
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.streaming.stage.state_room import lock_ahead
memory = Allocator.on_host(Config([ClassSetting(kind="pinned")] * 6))
lock_ahead(memory, 0, 1 << 46)
while not memory.stats(0)["locked_ahead_bytes"]: pass
print(memory.stats(0)["locked_ahead_bytes"] < 1 << 46)
"""


@pytest.mark.slow
def test_a_process_that_ends_amid_it() -> None:
    assert run_python("-c", AMID_IT) == "True\n"
