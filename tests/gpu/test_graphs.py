"""CUDA graphs: capture and replay with private pools, and the memory of the pools."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from poisoned import NOT_POISONED
from torch import nn
from torch.testing import assert_close

from umem.core.classes import TensorClass
from umem.runtime.state import runtime

pytestmark = pytest.mark.usefixtures("settled")

MIB = 1 << 20


def stat(name: str) -> int:
    return torch.cuda.memory_stats()[name]


def pools() -> list[dict[str, Any]]:
    return runtime().allocator.pool_stats(torch.cuda.current_device())


def pool_ranges() -> list[range]:
    """The addresses of private pools."""
    return [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    ]


def in_a_pool(tensor: torch.Tensor) -> bool:
    return any(tensor.data_ptr() in addresses for addresses in pool_ranges())


def captured(
    work: Callable[..., torch.Tensor], *inputs: torch.Tensor, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Warm `work` up on a side stream, as torch asks, and capture it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = work(*inputs)
    return graph, output


def assert_all_given_back() -> None:
    """No block waits for a stream forever."""
    torch.cuda.synchronize()
    torch.empty(512, device="cuda")  # events are looked at when memory is asked for
    assert stat("active.all.current") == stat("allocation.all.current")


def test_replays_use_new_inputs() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256, device="cuda")
    inputs = torch.randn(64, 256, device="cuda")

    def work(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight) + x.sum(dim=1, keepdim=True)

    graph, output = captured(work, inputs)
    assert in_a_pool(output)
    for _ in range(3):
        inputs.normal_()
        graph.replay()
        assert_close(output, work(inputs))


def test_a_segment_needed_during_capture() -> None:
    inputs = torch.zeros(1, device="cuda")
    segments = stat("num_device_alloc")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        large = torch.ones(16 * MIB, device="cuda")  # 64 MiB, and the cache is empty
        output = (large + inputs).mean()
    assert stat("num_device_alloc") > segments
    assert sum(pool["reserved_bytes"] for pool in pools()) >= 64 * MIB
    for value in (1.0, 5.0):
        inputs.fill_(value)
        graph.replay()
        assert output.item() == value + 1


def test_graphs_that_share_a_pool() -> None:
    inputs = torch.zeros(4 * MIB, device="cuda")
    first, doubled = captured(lambda x: x * 2, inputs)
    second, shifted = captured(lambda x: x + 3, doubled, pool=first.pool())
    assert len(pools()) == 1
    for value in (1.0, 7.0):
        inputs.fill_(value)
        first.replay()
        second.replay()
        assert shifted.unique().tolist() == [value * 2 + 3]
    # The pool lives as long as its last graph.
    del first
    torch.cuda.empty_cache()
    assert [pool["in_use"] for pool in pools()] == [True]
    doubled.fill_(1)
    second.replay()
    assert shifted.unique().tolist() == [4]
    del second, doubled, shifted
    torch.cuda.empty_cache()
    assert pools() == []


def test_pool_memory_belongs_to_the_graph_only() -> None:
    """Memory that a graph writes between its tensors never belongs to an eager tensor."""
    inputs = torch.zeros(4 * MIB, device="cuda")
    graph, output = captured(lambda x: ((x + 1) * 2 - 3).exp(), inputs)
    owned = pool_ranges()
    assert owned
    junk = [torch.full((4 * MIB,), float("nan"), device="cuda") for _ in range(8)]
    for tensor in junk:
        assert not any(tensor.data_ptr() in addresses for addresses in owned)
    inputs.fill_(0.5)
    graph.replay()
    assert output.unique().tolist() == [1.0]
    assert all(bool(tensor.isnan().all()) for tensor in junk)


def test_a_pool_is_released_with_its_graph() -> None:
    reserved = torch.cuda.memory_reserved()
    inputs = torch.zeros(16 * MIB, device="cuda")
    graph, output = captured(lambda x: x + 1, inputs)
    assert [pool["in_use"] for pool in pools()] == [True]
    torch.cuda.empty_cache()
    graph.replay()
    assert output.unique().tolist() == [1.0]
    del graph, output, inputs
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert pools() == []
    assert torch.cuda.memory_reserved() <= reserved + 2 * MIB


@NOT_POISONED
def test_streams_recorded_inside_a_capture() -> None:
    side = torch.cuda.Stream()
    inputs = torch.zeros(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        doubled = inputs * 2
        side.wait_stream(here)
        with torch.cuda.stream(side):
            shifted = doubled + 1
        doubled.record_stream(side)
        del doubled
        here.wait_stream(side)
        output = shifted * 3
        shifted.record_stream(here)
        del shifted
        tail = output - 1
    for value in (1.0, 2.0):
        inputs.fill_(value)
        graph.replay()
        assert output.unique().tolist() == [(value * 2 + 1) * 3]
        assert tail.unique().tolist() == [(value * 2 + 1) * 3 - 1]
    assert_all_given_back()


@NOT_POISONED
def test_eager_blocks_freed_during_a_capture() -> None:
    """Older blocks, one used by the captured stream and one by an idle stream."""
    idle = torch.cuda.Stream()
    used, apart = torch.ones(MIB, device="cuda"), torch.ones(MIB, device="cuda")
    with torch.cuda.stream(idle):
        apart.add_(1)
    inputs = torch.zeros(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = inputs + 1
        used.record_stream(torch.cuda.current_stream())
        apart.record_stream(idle)
        del used, apart
        output = output * 2
    graph.replay()
    assert output.unique().tolist() == [2.0]
    assert_all_given_back()


def test_make_graphed_callables() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
    inputs = torch.randn(32, 64, device="cuda")
    target = torch.randn(32, 8, device="cuda")
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(eager), (inputs.clone(),))

    def losses(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model(inputs) - target).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses(eager)
    assert expected[-1] < expected[0]
    assert_close(losses(graphed), expected)


def test_a_whole_training_step(class_of: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).cuda()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, capturable=True)
    inputs, target = torch.randn(32, 64, device="cuda"), torch.randn(32, 8, device="cuda")

    def step(module: nn.Module, its_optimizer: torch.optim.Optimizer) -> torch.Tensor:
        its_optimizer.zero_grad(set_to_none=True)
        loss = (module(inputs) - target).square().mean()
        loss.backward()
        its_optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        step(twin, twin_optimizer)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimizer)
    for _ in range(5):
        inputs.normal_()
        graph.replay()
        assert_close(loss, step(twin, twin_optimizer), rtol=1e-3, atol=1e-5)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert in_a_pool(parameter.grad)
        assert class_of(parameter.grad) is TensorClass.GRADIENTS
        assert class_of(optimizer.state[parameter]["exp_avg"]) is TensorClass.OPTIMIZER_STATE
