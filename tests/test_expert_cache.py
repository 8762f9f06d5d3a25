"""The experts that were used last stay on the device: rows are those of the table in any case."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from torch import nn

from umem.streaming.weights import CachedExperts, CachedTable, make_cached_table


def table_of(experts: int = 8) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(experts, 4, 4), requires_grad=False)


def buffer(size_bytes: int) -> torch.Tensor:
    return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)


def cache_of(table: nn.Parameter, slots: int) -> CachedTable:
    cached = make_cached_table(table, slots, buffer)
    assert cached is not None
    return cached


@pytest.mark.parametrize("slots", [1, 3, 7])
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (0,)])
def test_rows_are_those_of_the_table(slots: int, shape: tuple[int, ...]) -> None:
    table = table_of()
    cached = cache_of(table, slots)
    chance = random.Random(slots)
    generator = torch.Generator().manual_seed(slots)
    for _ in range(60):
        chosen = torch.randint(-8, 8, shape, generator=generator)
        assert torch.equal(cached.select(table, chosen), table[chosen])
        if chance.random() < 0.1:
            table.mul_(1.5)
        if chance.random() < 0.1:
            table.data.mul_(0.5)
            cached.forget()


def test_the_rows_that_were_used_longest_ago_leave() -> None:
    table = table_of()
    cached = cache_of(table, 2)
    for chosen, counts in (
        ([0, 1], (0, 2)),
        ([1, 1], (2, 2)),
        ([2], (2, 3)),  # in place of 0
        ([1, 2], (4, 3)),
        ([0, 3, 3], (5, 5)),  # in place of both; the second 3 comes with the first
        ([3, 0, 1, 2], (7, 7)),  # no slot is free for 1 and 2
        ([0], (8, 7)),
    ):
        assert torch.equal(cached.select(table, torch.tensor(chosen)), table[torch.tensor(chosen)])
        assert cached.counts == counts


def test_hits_do_not_read_the_table() -> None:
    table = table_of()
    cached = cache_of(table, 4)
    chosen = torch.tensor([5, 2])
    before = cached.select(table, chosen)
    table.data.zero_()  # unseen: no guard watches this one
    assert torch.equal(cached.select(table, chosen), before)
    cached.forget()
    assert not cached.select(table, chosen).any()


def test_an_interrupt_within_a_selection_empties_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have come between the choice and the copy."""
    table = table_of()
    cached = cache_of(table, 4)
    copy = cached._gather

    def interrupt(table: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        copy(table, chosen, out)
        cached._cache.fill_(float("nan"))
        raise KeyboardInterrupt

    chosen = torch.tensor([5, 2])
    cached.select(table, torch.tensor([1]))
    monkeypatch.setattr(cached, "_gather", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cached.select(table, chosen)
    monkeypatch.undo()
    for _ in range(2):
        assert torch.equal(cached.select(table, chosen), table[chosen])
    assert cached.counts == (2, 5)


@pytest.mark.parametrize(
    ("table", "slots"),
    [
        (table_of(), 0),
        (table_of(), 8),  # all
        (nn.Parameter(torch.randn(8, 3), requires_grad=False), 2),  # rows of 12 bytes
        (nn.Parameter(torch.randn(8, 4, 4).transpose(1, 2), requires_grad=False), 2),
        (torch.randn(8, 4), 2),  # of another class
    ],
)
def test_what_cannot_be_cached(table: torch.Tensor, slots: int) -> None:
    assert make_cached_table(table, slots, buffer) is None


def test_without_room_there_is_no_cache() -> None:
    assert make_cached_table(table_of(), 2, lambda _: None) is None


@pytest.fixture
def served() -> tuple[nn.Parameter, CachedExperts, list[int]]:
    """A table whose rows a guard serves, and a list that grows with each other use."""
    table, settled = table_of(), list[int]()
    lanes = LazyLanes(nn.Linear(1, 1))
    experts = CachedExperts([(table, cache_of(table, 4))], lanes, lambda: settled.append(0))
    experts.serve()
    return table, experts, settled


@pytest.mark.parametrize("chosen", [torch.tensor([3, 1], dtype=torch.int32), [3, 1]])
@torch.no_grad()
def test_selected_rows_are_served_and_are_memory_of_their_own(
    chosen: Any, served: tuple[nn.Parameter, CachedExperts, list[int]]
) -> None:
    """torch makes a tensor of a list."""
    table, experts, settled = served
    for _ in range(2):
        rows = table[chosen]
        assert type(rows) is torch.Tensor
        rows.zero_()
    assert experts.counts == (2, 2)
    assert not settled
    experts.release()
    assert torch.equal(table[chosen], table_of()[chosen])


@pytest.mark.parametrize("index", [0, slice(2), torch.tensor(1), None])
@torch.no_grad()
def test_another_index_is_a_use(
    index: Any, served: tuple[nn.Parameter, CachedExperts, list[int]]
) -> None:
    """It may be a view, by which the table changes later."""
    table, experts, settled = served
    table[torch.tensor([0, 1])]
    assert torch.equal(table[index], table_of()[index])
    assert settled
    assert not experts.is_on


def test_rows_with_gradients_are_uses(
    served: tuple[nn.Parameter, CachedExperts, list[int]],
) -> None:
    table, experts, settled = served
    table.requires_grad_()
    assert table[torch.tensor([0, 1])].requires_grad
    assert settled
    assert experts.counts == (0, 0)


@torch.no_grad()
def test_with_an_alias_rows_come_from_the_table() -> None:
    table = table_of()
    view = table.detach()[2]
    experts = CachedExperts([(table, cache_of(table, 4))], LazyLanes(nn.Linear(1, 1)), lambda: None)
    experts.serve()
    chosen = torch.tensor([2, 2])
    for _ in range(2):
        view.add_(1)
        assert torch.equal(table[chosen][0], view)
    assert experts.counts == (0, 0)


@torch.no_grad()
def test_behind_an_error_rows_come_from_the_table(
    served: tuple[nn.Parameter, CachedExperts, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(CachedTable, "select", fail)
    table, experts, settled = served
    chosen = torch.tensor([3, 1])
    for _ in range(2):
        experts.serve()
        assert torch.equal(table[chosen], table_of()[chosen])
    assert settled
    assert not experts.is_on
    assert len(caplog.records) == 1
