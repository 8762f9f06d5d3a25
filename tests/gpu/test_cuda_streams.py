"""umem's own streams, on a GPU: what they cost the card."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
from faults import Signal
from poisoned import NOT_POISONED

torch = pytest.importorskip("torch")

from umem.cuda import bindings  # noqa: E402
from umem.runtime.cuda_streams import own_stream, run_on  # noqa: E402
from umem.streaming.stage import CudaLanes, Lane, cuda_lanes  # noqa: E402


def _used_bytes() -> int:
    torch.cuda.synchronize()
    memory = bindings.nvml_memory_bytes(bindings.device_pci_address(0))
    if memory is None:
        pytest.skip("NVML is not installed")
    total_bytes, free_bytes = memory
    return total_bytes - free_bytes


@NOT_POISONED
def test_own_streams_take_none_of_the_budget() -> None:
    """torch's pool of streams took 70 MiB."""
    device = torch.device("cuda", 0)
    memory = torch.ones(1 << 20, device=device)
    assert (memory + 1).eq(2).all()  # loads the kernels, which take memory too
    before_bytes = _used_bytes()
    streams = [own_stream(device, f"test {i}", priority=-(i % 2)) for i in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            memory = memory + 1
        torch.cuda.current_stream().wait_stream(stream)
    assert memory.eq(4).all()
    assert _used_bytes() - before_bytes <= 16 << 20


def test_a_purpose_has_one_stream() -> None:
    device = torch.device("cuda", 0)
    assert own_stream(device, "test") is own_stream(device, "test")
    assert own_stream(device, "test") != own_stream(device, "test of another")


def _launch(lanes: CudaLanes) -> tuple[Any, Any, Any]:
    """Work that comes late and uses a tensor which nobody else has: its result, and its moment."""
    used = torch.full((1000,), 3.0, device="cuda")
    result = torch.empty_like(used)

    def work() -> None:
        torch.cuda._sleep(50_000_000)  # cycles
        result.copy_(used)

    return lanes.run(Lane.UPDATE, work, [lanes.mark()], [used]), result, weakref.ref(used)


def test_a_lane_holds_what_its_work_uses_until_it_has_passed_it() -> None:
    lanes = cuda_lanes(torch.device("cuda", 0))
    moment, result, used = _launch(lanes)
    taken = [torch.full((1000,), 7.0, device="cuda") for _ in range(64)]
    assert used() is not None
    lanes.wait(moment)
    assert result.eq(3).all()
    assert all(it.eq(7).all() for it in taken)
    lanes.finish(moment)
    _launch(lanes)
    assert used() is None


@pytest.mark.parametrize("device", range(max(torch.cuda.device_count(), 1)))
def test_an_interrupt_leaves_the_program_its_stream_and_device(device: int) -> None:
    stream = own_stream(torch.device("cuda", device), "test")
    before = torch.cuda.current_stream(), torch.cuda.current_stream(device)
    chance, met = random.Random(0), 0
    while met < 500:
        try:
            with Signal(chance.randint(1, 100)):
                assert run_on(stream, torch.cuda.current_stream) == stream
        except KeyboardInterrupt:
            met += 1
        assert torch.cuda.current_device() == 0
        assert (torch.cuda.current_stream(), torch.cuda.current_stream(device)) == before


def test_a_captured_stream_is_told_from_others() -> None:
    captured, forked, other = (torch.cuda.Stream() for _ in range(3))
    streams = [captured.cuda_stream, forked.cuda_stream, other.cuda_stream, 0]
    assert list(map(bindings.is_capturing, streams)) == [False] * 4
    values = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=captured):
        values.add_(1)
        assert list(map(bindings.is_capturing, streams)) == [True, False, False, False]
        forked.wait_stream(captured)
        assert list(map(bindings.is_capturing, streams)) == [True, True, False, False]
        captured.wait_stream(forked)
    assert list(map(bindings.is_capturing, streams)) == [False] * 4
    graph.replay()
    assert values.eq(1).all()
