"""Host memory that a plan may use: what is available, and what the process holds for it already."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from managed_training import BEFORE_PLANNED, MIB, TIGHT, Training, host_machine

from umem.core.classes import TensorClass
from umem.managing import manage_on
from umem.offloading import Mover
from umem.pages import ManagerState
from umem.pages.run.machine import Machine, held_host_bytes, within_host
from umem.runtime.native_library import native

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

GIB = 1 << 30
STATE_BYTES = 5 * 2 * 2 * MIB
"""Two tensors of 2 MiB for each weight of the training."""

PINNED_STATE = {"classes": {"optimizer_state": {"kind": "pinned"}}}


class Host(Mover):
    """A host of 16 GiB, and a mover that takes its memory."""

    available_bytes = 4 * GIB

    def host_memory_bytes(self) -> tuple[int, int]:
        return 16 * GIB, self.available_bytes

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        self.available_bytes -= size_bytes
        return super().allocate_host(size_bytes)

    def free_host(self, memory: torch.Tensor) -> None:
        self.available_bytes += memory.nbytes


def pinned_allocator() -> Allocator:
    """The native allocator over the CPU's memory, as if all of it were pinned."""
    settings = [native().ClassSetting("pinned", "host", True)] * len(TensorClass)
    return native().Allocator.on_host(native().Config(settings), devices=2)


def pinned_copy(tensor: torch.Tensor, allocator: Allocator, device: int = 0) -> torch.Tensor:
    buffer = (ctypes.c_char * tensor.nbytes).from_address(allocator.malloc(tensor.nbytes, device))
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def with_pinned_state(allocator: Allocator) -> Training:
    """A training after its first step, with the optimizer's state in memory of the allocator."""
    training = Training()
    training.step()
    for state in training.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = pinned_copy(state[name], allocator)
    return training


def machine_of(training: Training, allocator: Allocator, host: Host, policy: object) -> Machine:
    """The machine that a new manager of the training gets."""
    machine = host_machine(TIGHT, policy)
    held_bytes = held_host_bytes(allocator, 0, training.model, training.optimizer)
    hardware = within_host(machine.hardware, held_bytes, lambda: host.available_bytes)
    return replace(machine, hardware=hardware, mover=host)


@pytest.mark.slow
def test_pinned_state_is_memory_that_the_plan_has() -> None:
    """The plan's need of 40 MiB has this state, so a host with 30 MiB more is enough."""
    stock = Training()
    stock.steps(BEFORE_PLANNED + 3)
    allocator, host = pinned_allocator(), Host()
    training = with_pinned_state(allocator)
    host.available_bytes = 30 * MIB
    machine = machine_of(training, allocator, host, PINNED_STATE)
    assert machine.hardware.host_bytes == host.available_bytes + STATE_BYTES
    machine = replace(machine, mover=None)  # as its reserve is for hosts of GiBs
    manager = manage_on(training.model, training.optimizer, lambda: machine, "planned")
    training.steps(BEFORE_PLANNED + 2)
    assert manager.status().state is ManagerState.RUNNING, manager.status().reason
    assert training.equals(stock)


@pytest.mark.slow
def test_no_byte_is_added_that_the_plan_does_not_need() -> None:
    allocator, host = pinned_allocator(), Host()
    training = with_pinned_state(allocator)

    def added_bytes() -> int:
        found = machine_of(training, allocator, host, PINNED_STATE).hardware.host_bytes
        return found - host.available_bytes

    def cached_bytes() -> int:
        """What segments of page-locked memory have left: they grow ahead of their use."""
        live = sum(it[2] for it in allocator.live_blocks() if it[4] == 0)
        reserved: int = allocator.kind_stats(0)["pinned"]["reserved_bytes"]
        return reserved - live

    assert added_bytes() == STATE_BYTES + cached_bytes()
    other = with_pinned_state(allocator)  # no plan of the first training knows its state
    average = pinned_copy(torch.zeros(4 * MIB), allocator)
    elsewhere = pinned_copy(torch.zeros(4 * MIB), allocator, device=1)
    before = cached_bytes()
    assert added_bytes() == STATE_BYTES + before
    # Memory in the cache is for whichever pinned tensor comes next.
    allocator.free(average.data_ptr())
    assert added_bytes() == STATE_BYTES + before + average.nbytes
    weight = next(iter(training.model.parameters()))
    weight.grad = pinned_copy(torch.zeros_like(weight), allocator)
    assert added_bytes() == STATE_BYTES + before + average.nbytes, "a gradient takes cached memory"
    allocator.free(elsewhere.data_ptr(), 1)
    assert added_bytes() == STATE_BYTES + before + average.nbytes, "another device's cache"
    assert other.state()


def test_a_host_has_no_more_than_all_its_memory() -> None:
    hardware = host_machine(TIGHT).hardware
    assert within_host(hardware, 1 << 50, lambda: 1 << 39) == hardware


@pytest.mark.slow
def test_a_second_manager_has_the_host_memory_of_the_first() -> None:
    """Also while a graph holds activations that the first one has copied to the host."""
    stock = Training()
    stock.steps(BEFORE_PLANNED + 3)
    allocator, host, training = pinned_allocator(), Host(), Training()
    first = machine_of(training, allocator, host, "managed")
    manager = manage_on(training.model, training.optimizer, lambda: first, "planned")
    training.steps(BEFORE_PLANNED + 2)
    assert manager.store.statistics.bytes_out > 0
    loss = training.forward()
    manager.close()
    copied_bytes = first.hardware.host_bytes - host.available_bytes
    assert copied_bytes > 0
    assert machine_of(training, allocator, host, "managed").hardware == first.hardware
    loss.backward()
    training.optimizer.step()
    training.losses.append(loss.item())
    assert host.available_bytes == first.hardware.host_bytes
    assert machine_of(training, allocator, host, "managed").hardware == first.hardware
    assert training.equals(stock)
