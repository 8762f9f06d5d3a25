"""Parameters that no module holds are streamed too, in units that are no larger than a block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from streamed_programs import WIDTH, Program, compare
from torch import nn

FLAT = WIDTH * WIDTH + WIDTH
"""Numbers in a layer's flat partition."""

LAYERS = 5

STATE = 2 * 4 * FLAT
"""Bytes of a partition's state."""


class Flat(nn.Module):
    """Layers whose weights are views of flat partitions, which it does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.flats = tuple(nn.Parameter(torch.randn(FLAT) / WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(FLAT // 2, 4, bias=False)  # of the size of two partitions

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """For the program: its optimizer has them."""
        return itertools.chain(self.flats, super().parameters(recurse))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for flat in self.flats:
            weight, bias = flat[:-WIDTH].view(WIDTH, WIDTH), flat[-WIDTH:]
            x = x + torch.tanh(nn.functional.linear(x, weight, bias))
        y: torch.Tensor = self.head(x.repeat(1, FLAT)[:, : FLAT // 2])
        return y


@pytest.mark.parametrize("eagerness", [0.0, 0.8])
def test_flat_partitions_are_streamed_in_units_until_the_next_call(eagerness: float) -> None:
    run = compare(make_model=Flat, eagerness=eagerness)
    assert run.training is not None
    counts = run.training.counts
    units = run.training.step.sizes()
    assert sorted(units.values()) == [STATE, 2 * STATE, 2 * STATE, 2 * STATE]
    # Nothing but the comparison of the last weights came before an update.
    assert (counts.streamed, counts.waited, counts.early) == (4, 0, len(units))


def master_weights(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of flat copies: it takes gradients before its step, and gives weights behind."""
    weights = list(parameters)
    flats = [
        nn.Parameter(torch.cat([it.detach().flatten() for it in pair])) for pair in _pairs(weights)
    ]
    optimizer = torch.optim.AdamW(flats, lr=1e-2)

    def take(*_: object) -> None:
        for flat, pair in zip(flats, _pairs(weights), strict=True):
            flat.grad = torch.cat([it.grad.flatten() for it in pair])

    @torch.no_grad()
    def give(*_: object) -> None:
        for flat, pair in zip(flats, _pairs(weights), strict=True):
            for it, part in zip(pair, flat.split([it.numel() for it in pair]), strict=True):
                it.copy_(part.view_as(it))
                it.grad = None

    optimizer.register_step_pre_hook(take)
    optimizer.register_step_post_hook(give)
    return optimizer


def _pairs(weights: list[Any]) -> list[list[Any]]:
    return [weights[begin : begin + 2] for begin in range(0, len(weights), 2)]


def test_master_weights_in_flat_partitions() -> None:
    run = compare(make_optimizer=master_weights, eagerness=0.5)
    assert run.training is not None
    assert run.training.counts.streamed == 4
    assert len(run.training.step.sizes()) > 4


class Grown(Flat):
    """Gets a parameter that has no gradient, and so no state."""

    more: tuple[nn.Parameter, ...] = ()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return itertools.chain(super().parameters(recurse), self.more)


def test_state_is_streamed_on_when_parameters_are_added() -> None:
    def add(program: Program) -> None:
        if program.is_first("group"):
            program.model.more = (nn.Parameter(torch.ones(FLAT)),)
            program.optimizer.add_param_group({"params": program.model.more, "lr": 1e-3})

    run = compare(add, make_model=Grown)
    assert run.training is not None
    assert run.training.counts.streamed == 4
    assert max(run.training.step.sizes().values()) == 2 * STATE
