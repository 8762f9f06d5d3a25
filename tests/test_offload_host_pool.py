"""The pool of host buffers: its limit, the reserve of the host, and buffers used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_chain import KIB, TENSOR_BYTES, chain, gradient, make_input, saved
from other_process import run_forked

from umem.offloading import ActivationStore, CudaMover, Mover
from umem.offloading.movers import HostPool

MIB = 1 << 20


def test_host_limit() -> None:
    plain = make_input()
    expected = gradient(chain(plain), plain)
    store = ActivationStore("cpu", min_bytes=KIB, host_limit_bytes=4 * MIB)
    for step in range(2):
        x = make_input()
        y = saved(store, step, x)
        if step == 0:
            with pytest.warns(RuntimeWarning, match="host_limit_bytes is 4 MiB"):
                assert store.send(step) == 2 * TENSOR_BYTES
        else:
            store.send(step)  # said once
        store.send(step)
        assert store.release(step) == 2 * TENSOR_BYTES
        assert torch.equal(gradient(y, x), expected)
    counts = store.statistics
    assert counts.kept_for_lack_of_host_tensors == 2
    assert counts.kept_for_lack_of_host_bytes == 2 * TENSOR_BYTES
    assert counts.peak_pinned_bytes == 4 * MIB


def test_reserve_of_the_host() -> None:
    class Host(Mover):
        available_bytes = 10 << 30

        def host_memory_bytes(self) -> tuple[int, int]:
            return 64 << 30, self.available_bytes

    host = Host()
    pool = HostPool(host)
    buffer = pool.take(MIB)
    assert buffer is not None
    assert buffer.size_bytes == 2 * MIB
    host.available_bytes = (
        (4 << 30) + 2 * MIB - 1
    )  # a sixteenth and a little less than is asked for
    with pytest.warns(RuntimeWarning, match="4 GiB are available, of which 4 GiB stay"):
        assert pool.take(MIB) is None
    host.available_bytes += 1
    assert pool.take(MIB) is not None


def test_unused_buffers_make_room() -> None:
    pool = HostPool(Mover(), 8 * MIB)
    small = [pool.take(MIB) for _ in range(4)]
    assert pool.held_bytes == 8 * MIB
    for buffer in small:
        assert buffer is not None
        pool.give_back(buffer)
    del small, buffer
    large = pool.take(8 * MIB)
    assert large is not None
    assert (pool.held_bytes, pool.peak_bytes) == (8 * MIB, 8 * MIB)


def test_a_somewhat_larger_buffer_serves() -> None:
    pool = HostPool(Mover())
    first = pool.take(6 * MIB)
    assert first is not None
    pool.give_back(first)
    assert pool.take(MIB) is not first, "more than twice the size"
    assert pool.take(4 * MIB) is first


def test_memory_that_cannot_be_allocated() -> None:
    class UnknownHost(Mover):
        def host_memory_bytes(self) -> None:
            return None

    pool = HostPool(UnknownHost())
    with pytest.warns(RuntimeWarning, match="no host memory for"):
        assert pool.take(1 << 60) is None


class Counting(Mover):
    """Counts allocated and freed buffers."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        self.calls += 1
        return super().allocate_host(size_bytes)

    def free_host(self, memory: torch.Tensor) -> None:
        self.calls += 1


@pytest.mark.filterwarnings("ignore:activations stay on the device")
@pytest.mark.parametrize("limit_mib", [60, 140, 200])
def test_a_full_pool_stays_as_it_is(limit_mib: int) -> None:
    mover = Counting()
    pool = HostPool(mover, limit_mib * MIB)

    def step(*sizes: int) -> int:
        """Bytes that leave."""
        held = [pool.take(size * MIB) for _ in range(12) for size in sizes]
        found = [buffer for buffer in held if buffer is not None]
        for buffer in found:
            pool.give_back(buffer)
        return sum(buffer.size_bytes for buffer in found)

    first = step(4, 16, 6)
    calls = mover.calls
    assert [step(4, 16, 6) for _ in range(4)] == [first] * 4
    assert mover.calls == calls
    other = [step(2, 40) for _ in range(4)]  # other steps have the room
    assert other[-1] >= 40 * MIB
    calls = mover.calls
    assert step(2, 40) == other[-1]
    assert mover.calls == calls
    step(4, 16, 6)
    assert step(4, 16, 6) == first, "and these have it again"


@pytest.mark.slow
def test_a_forked_child_has_pages_of_its_own() -> None:
    """The child's memory must not lie in the range of the parent's pages, and go with them."""
    code = """
import os
import torch
from umem.offloading.movers import allocate_host_pages

memory = allocate_host_pages(64 << 20).fill_(7)
if os.fork() == 0:
    # malloc maps a tensor of this size, in a hole if there is one.
    mine = torch.ones(8 << 20)
    before = memory[0].item()
    del memory
    os._exit(0 if (before, mine.sum().item()) == (0, 8 << 20) else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert memory.eq(7).all()
"""
    run_forked(code)


def test_a_forked_child_makes_no_cuda_calls() -> None:
    mover: Any = object.__new__(CudaMover)
    mover._process = -1  # of no process, so this one is a child
    mover.finish(None)
    mover.free_host(None)
