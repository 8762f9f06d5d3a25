"""Two GPUs in one process: each has its own statistics, advice and streams; the cap is shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import umem
from umem.cuda import Location, preferred_location

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("settled"),
]

MIB = 1 << 20


def empty(size_bytes: int, device: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{device}")


def test_each_device_has_its_statistics() -> None:
    before = [torch.cuda.memory_allocated(device) for device in (0, 1)]
    kept = [empty(4 * MIB, 0), empty(8 * MIB, 1)]
    after = [torch.cuda.memory_allocated(device) for device in (0, 1)]
    assert [late - early for early, late in zip(before, after, strict=True)] == [4 * MIB, 8 * MIB]
    blocks = {block.address: block for block in umem.tensors()}
    assert [blocks[tensor.data_ptr()].device for tensor in kept] == [0, 1]


def test_memory_prefers_its_device() -> None:
    assert preferred_location(empty(4 * MIB, 0)) == Location.device(0)
    assert preferred_location(empty(4 * MIB, 1)) == Location.device(1)


def test_copies_between_devices() -> None:
    numbers = torch.arange(MIB, device="cuda:0")
    assert torch.equal(numbers.to("cuda:1").to("cuda:0"), numbers)


def test_record_stream_on_the_second_device() -> None:
    with torch.cuda.device(1):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.ones(MIB, device="cuda")  # the side stream's first segment
        tensor = torch.ones(MIB, device="cuda")
        address = tensor.data_ptr()
        done = torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000_000)
            done.record(side)
        tensor.record_stream(side)
        del tensor
        other = torch.empty(MIB, device="cuda")
        assert not done.query(), "the side stream was done too early for this test to tell"
        assert other.data_ptr() != address
        torch.cuda.synchronize()
        del other
        again = [torch.empty(MIB, device="cuda") for _ in range(2)]
        assert address in {tensor.data_ptr() for tensor in again}


def test_a_model_trains_on_the_second_device() -> None:
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024).to("cuda:1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    inputs = torch.randn(64, 1024, device="cuda:1")
    losses = []
    for _ in range(5):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    by_class = umem.memory_by_class(1)
    state_bytes = by_class[umem.TensorClass.OPTIMIZER_STATE].requested_bytes
    weight_bytes = by_class[umem.TensorClass.WEIGHTS].requested_bytes
    assert weight_bytes >= 4 * 1025 * 1024
    assert state_bytes >= 2 * 4 * 1025 * 1024
