"""Graphs whose modules change before the backward pass: their weights, or their modes.

A fused optimizer leaves the version counters of weights alone, so that autograd goes backward
through such a graph: with activations of the old weights, and with the new weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from repeated_blocks import NAMES, ROWS, WIDTH, Dropping, Layer, Net, managed
from torch import nn

from umem.streaming.activations import CopiedActivations

STEPS, MEASURED = 4, 1


class Step:
    """Trains by two losses whose backward passes come after one another, each with an update."""

    def __init__(self, model: nn.Module, activations: CopiedActivations | None = None) -> None:
        self.model, self.activations = model, activations
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
        self.found: list[bool] = []

    def _update(self) -> None:
        if self.activations is not None:
            self.found.append(self.activations.update_begins())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, number: int, *, between: bool) -> list[bytes]:
        """Bits of both losses and of the weights; `between`: the second graph is older."""
        batches = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        # The first one saves what its blocks' norms return, which no block keeps then.
        losses = [self.model(batches[0]).square().mean()]
        if between:
            losses.append((self.model(batches[1]) - 1).square().mean())
        for loss in losses:
            loss.backward()
            self._update()
        tensors = [*losses, *self.model.parameters()]
        return [it.detach().double().numpy().tobytes() for it in tensors]


def plan(activations: CopiedActivations, number: int) -> None:
    """Watch the first steps; then run all again that may."""
    again = activations.proofs if number >= MEASURED else {}
    activations.set_plan({}, 1, is_measuring=number < MEASURED, recomputed=dict.fromkeys(again))
    activations.begin_step()


def trained(kind: type[Layer], activations: CopiedActivations | None, model: Any, late: int) -> Any:
    torch.manual_seed(3)
    steps = Step(model, activations)
    bits = []
    for number in range(STEPS):
        if activations is not None:
            plan(activations, number)
        bits.append(steps.run(number, between=number >= late))
    return bits, steps.found


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("kind", [Layer, Dropping])
def test_all_bits_are_stocks(kind: type[Layer], late: int) -> None:
    """From the first step on, and from one in which blocks are run again."""
    stock, _ = trained(kind, None, Net(kind), late)
    model = Net(kind)
    activations = managed(model)
    own, found = trained(kind, activations, model, late)
    assert own == stock
    # Behind the first backward pass through such a graph nothing is proved any more.
    assert sum(found) == 1
    assert not activations.proofs


def test_results_are_made_before_the_update() -> None:
    class Normed(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(self.norm(x)))

    stock, _ = trained(Normed, None, Net(Normed), 2)
    model = Net(Normed)
    activations = managed(model)
    remade = activations.remade
    assert remade is not None
    assert remade.begin()
    torch.manual_seed(3)
    steps = Step(model, activations)
    bits, asked = [], []
    for number in range(STEPS):
        activations.set_plan({}, 1, is_measuring=False)
        activations.begin_step()
        bits.append(steps.run(number, between=number >= 2))
        asked.append(remade.is_on)
    assert bits == stock
    assert asked == [True, True, False, False]
    assert not remade.begin()


def test_a_graph_that_no_backward_pass_comes_to_ends_nothing() -> None:
    """Such as that of a validation whose result the program keeps."""
    model = Net(Layer)
    activations = managed(model)
    kept = []
    for number in range(3):
        plan(activations, number)
        kept.append(model(torch.ones(ROWS, WIDTH)))
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        assert not activations.update_begins()
    assert activations.proofs.keys() >= set(NAMES)


class DroppingNormed(Layer):
    """What BatchNorm and dropout make depends on their modes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(self.batch_norm(x)), 0.3, self.training)


@pytest.mark.parametrize("is_remade", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_modes_are_those_of_the_forward_pass(trains: bool, is_remade: bool) -> None:
    def gradients(activations: CopiedActivations | None, model: nn.Module) -> list[bytes]:
        torch.manual_seed(3)
        found = []
        for number in range(3):
            if activations is not None and is_remade:
                activations.set_plan({}, 1, is_measuring=False)
                activations.begin_step()
            elif activations is not None:
                plan(activations, number)
            model.train(trains)
            loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            model.train(not trains)
            model.requires_grad_(number != 2)
            loss.backward()
            assert all(it.training != trains for it in model.modules())
            assert all(it.requires_grad == (number != 2) for it in model.parameters())
            model.requires_grad_(True)
            found += [it.grad.numpy().tobytes() for it in model.parameters() if it.grad is not None]
            found += [it.numpy().tobytes() for it in model.buffers()]
            model.zero_grad()
        return found

    torch.manual_seed(1)
    stock = gradients(None, Net(DroppingNormed))
    torch.manual_seed(1)
    model = Net(DroppingNormed)
    activations = managed(model)
    if is_remade:
        assert activations.remade is not None
        assert activations.remade.begin()
    assert gradients(activations, model) == stock
    assert is_remade or activations.proofs
