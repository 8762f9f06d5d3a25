"""Host memory for activations: limits, what stays in reserve, and buffers that serve again."""

from __future__ import annotations

import pytest
import torch
from activation_chain import KIB, TENSOR_BYTES, chain, gradient, make_input, saved

from umem.activations import ActivationStore, HostMover
from umem.activations._host_pool import HostPool

MIB = 1 << 20


def test_limit() -> None:
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
    told = store.statistics
    assert told.kept_for_lack_of_host_tensors == 2
    assert told.kept_for_lack_of_host_bytes == 2 * TENSOR_BYTES
    assert told.peak_pinned_bytes == 4 * MIB


def test_reserve() -> None:
    available = [10 << 30]
    pool = HostPool(HostMover(), None, lambda: (64 << 30, available[0]))
    buffer = pool.take(MIB)
    assert buffer is not None
    assert buffer.size_bytes == 2 * MIB
    available[0] = (4 << 30) + 2 * MIB - 1  # a sixteenth and a little less than is asked for
    with pytest.warns(RuntimeWarning, match="4 GiB are available, of which 4 GiB stay"):
        assert pool.take(MIB) is None
    available[0] += 1
    assert pool.take(MIB) is not None


def test_unused_buffers_make_room() -> None:
    pool = HostPool(HostMover(), 8 * MIB)
    small = [pool.take(MIB) for _ in range(4)]
    assert pool.held_bytes == 8 * MIB
    for buffer in small:
        assert buffer is not None
        pool.give_back(buffer)
    del small, buffer
    large = pool.take(8 * MIB)
    assert large is not None
    assert (pool.held_bytes, pool.peak_bytes) == (8 * MIB, 8 * MIB)


def test_somewhat_larger_buffers_serve() -> None:
    pool = HostPool(HostMover())
    first = pool.take(6 * MIB)
    assert first is not None
    pool.give_back(first)
    assert pool.take(MIB) is not first, "more than twice the size"
    assert pool.take(4 * MIB) is first


def test_no_memory() -> None:
    pool = HostPool(HostMover(), None, lambda: None)
    with pytest.warns(RuntimeWarning, match="no host memory for"):
        assert pool.take(1 << 60) is None
