"""The kernels that keep experts on the device, against the same choice on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from umem.streaming.weights import make_cached_table

EXPERTS = 40


@pytest.mark.parametrize("slots", [1, 7, 33, 39])
@pytest.mark.parametrize("row", [(8,), (3, 1000), (512, 2048)])
def test_rows_and_choices_are_those_of_the_cpu(slots: int, row: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(slots)
    home = torch.randn(EXPERTS, *row, generator=generator).bfloat16()
    ours = nn.Parameter(home.clone(), requires_grad=False)
    theirs = nn.Parameter(home.cuda(), requires_grad=False)
    on_host = make_cached_table(ours, slots, lambda size: torch.zeros(size, dtype=torch.uint8))
    on_device = make_cached_table(
        theirs, slots, lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda")
    )
    assert on_host is not None
    assert on_device is not None
    for call in range(60):
        count = int(torch.randint(0, EXPERTS, (), generator=generator))
        # Some experts are chosen much more often than others, and some twice in a call.
        spread = torch.rand(count, generator=generator) ** 3
        chosen = (spread * EXPERTS).long() - (EXPERTS if call % 3 == 0 else 0)
        rows = on_host.select(ours, chosen)
        assert torch.equal(rows, ours[chosen])
        assert torch.equal(on_device.select(theirs, chosen.cuda()).cpu(), rows)
        assert on_device.counts == on_host.counts
        if call % 20 == 19:
            with torch.no_grad():
                ours.mul_(0.5)
                theirs.mul_(0.5)


def test_rows_come_from_page_locked_memory() -> None:
    """As those of a table at home under a budget."""
    home = torch.randn(EXPERTS, 64, 64).pin_memory()
    table = nn.Parameter(torch.empty(EXPERTS, 64, 64, device="cuda"), requires_grad=False)
    cached = make_cached_table(
        table, 8, lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda")
    )
    assert cached is not None
    chosen = torch.tensor([3, 3, 9], device="cuda")
    view = torch.as_tensor(PageLocked(home), device="cuda")
    assert view.data_ptr() == home.data_ptr()
    for _ in range(2):
        assert torch.equal(cached.select(view, chosen).cpu(), home[chosen.cpu()])
    assert cached.counts == (4, 2)


def test_a_thread_that_has_used_no_cuda_selects_rows() -> None:
    table = nn.Parameter(torch.randn(EXPERTS, 64, device="cuda"), requires_grad=False)
    cached = make_cached_table(
        table, 8, lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda")
    )
    assert cached is not None
    chosen = torch.tensor([5, 1], device="cuda")
    rows = []
    thread = threading.Thread(target=lambda: rows.append(cached.select(table, chosen)))
    thread.start()
    thread.join()
    assert torch.equal(rows[0], table[chosen])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_may_be_another() -> None:
    table = nn.Parameter(torch.randn(EXPERTS, 64, device="cuda:1"), requires_grad=False)
    cached = make_cached_table(
        table, 8, lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda:1")
    )
    assert cached is not None
    chosen = torch.tensor([5, 1], device="cuda:1")
    for _ in range(2):
        assert torch.equal(cached.select(table, chosen), table[chosen])
    assert torch.cuda.current_device() == 0


class PageLocked:
    """Host memory under the GPU's name for it, which is the same."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
