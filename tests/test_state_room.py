"""Optimizer state is born on the device as far as it fits beside what passes have needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from umem.core.classes import TensorClass
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.streaming.plan import FIRST_SLOTS, largest_slot_bytes, least_slack_bytes
from umem.streaming.stage import StateRoom

MIB = 1 << 20
BUDGET_BYTES = 2048 * MIB
FREE_BYTES = (
    BUDGET_BYTES - least_slack_bytes(BUDGET_BYTES) - FIRST_SLOTS * largest_slot_bytes(BUDGET_BYTES)
)
"""Less slack and slots."""
PARAMETER_BYTES = 64 * MIB
STATE = TensorClass.OPTIMIZER_STATE.number


def allocator() -> Allocator:
    """State is at home in page-locked memory, all else on the device."""
    settings = [ClassSetting(kind="device") for _ in TensorClass]
    settings[STATE] = ClassSetting(kind="pinned")
    return Allocator.on_host(Config(settings, device_budget_bytes=BUDGET_BYTES), 0, 1)


def optimizer(**arguments: Any) -> torch.optim.Optimizer:
    """Of one parameter on a GPU that is not there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameter = nn.Parameter(torch.empty(PARAMETER_BYTES // 4, device="cuda"))
        return torch.optim.AdamW([parameter], **arguments)


def born(memory: Allocator, megabytes: int) -> str:
    """The kind of memory that state gets."""
    with memory.class_override(STATE):
        address = memory.malloc(megabytes * MIB)
    return {block[0]: block[-1] for block in memory.live_blocks()}[address]


@pytest.mark.parametrize("foreach", [False, None])
def test_state_gets_what_passes_have_left(foreach: bool | None) -> None:
    memory = allocator()
    memory.free(memory.malloc(512 * MIB))  # the next pass needs it again
    room, opt = StateRoom(memory, [BUDGET_BYTES]), optimizer(foreach=foreach)
    assert born(memory, 16) == "pinned"
    temporary = 0 if foreach is False else PARAMETER_BYTES
    room_bytes = FREE_BYTES - 512 * MIB - temporary
    room.open(opt)
    assert born(memory, room_bytes // MIB - 8) == "device"
    assert born(memory, 16) == "pinned"
    room.close(opt)
    assert born(memory, 4) == "pinned"
    # A second optimizer gets no room that the first one's state has taken.
    room.open(opt)
    assert born(memory, 16) == "pinned"


def test_without_a_budget_state_is_born_at_home() -> None:
    memory = allocator()
    room = StateRoom(memory, [None])
    room.open(optimizer())
    assert born(memory, 1) == "pinned"
