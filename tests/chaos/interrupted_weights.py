"""Models with streamed weights and activations that Ctrl-C meets, and whose program goes on.

Right behind an interrupt all weights read as without umem. So do later calls, gradients and steps,
and nothing that the interrupt has cut short stays in use.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from faults import Interrupt, Signal, mend_torch_modes
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from random_training import MODELS
from streamed_programs import WIDTH, bits
from torch import nn

from umem.offloading import ActivationStore
from umem.runtime.torch_hooks import saved_tensors
from umem.streaming.stage import HostLanes
from umem.streaming.weights import ModelWeights


class _Program:
    """Trains a model, and asks it."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def infer(self, seed: int) -> Any:
        """Call the model without gradients."""
        with torch.no_grad():
            return bits(self.model(_inputs(seed)))

    def compute_gradients(self, seed: int) -> Any:
        """Forward and backward pass."""
        self.optimizer.zero_grad()
        self.model(_inputs(seed)).square().mean().backward()
        return bits([it.grad for it in self.model.parameters()])

    def values(self) -> Any:
        """Weights and optimizer state."""
        return bits([self.model.state_dict(), self.optimizer.state_dict()])


def _inputs(seed: int) -> torch.Tensor:
    return torch.randn(1 + seed % 8, WIDTH, generator=torch.Generator().manual_seed(seed))


def interrupt_streamed_weights(seed: int, interrupts: int) -> None:
    """Interrupt the calls and backward passes of a program, and compare all bits.

    Parameters
    ----------
    seed
        Chooses model, schedule and moments.
    interrupts
        How many.
    """
    chance = random.Random(seed)
    make_model = chance.choice(MODELS)
    stock, streamed = _Program(make_model), _Program(make_model)
    by_signal = seed % 2 == 1
    # A driver's calls are not interrupted, but the code of these lanes is.
    lanes = HostLanes() if by_signal else LazyLanes(streamed.model, 1.0)
    memory = HostStateMemory(parameters=streamed.model.parameters(), lanes=lanes)
    weights = ModelWeights(
        *(streamed.model, lanes, memory, NoRoom(), ActivationStore("cpu")), min_bytes=WIDTH * WIDTH
    )
    for it in (stock, streamed):  # the first calls place the weights, and learn their order
        for _ in range(2):
            it.infer(0)
            it.compute_gradients(0)
            it.optimizer.step()
    streamed_bytes = weights.streamed.streamed_bytes
    assert streamed_bytes
    met = moments = 0
    while met < interrupts:
        number, asks = chance.randrange(1 << 20), chance.random() < 0.4
        act = _Program.infer if asks else _Program.compute_gradients
        at = chance.randrange(moments) if moments else sys.maxsize
        fault = Signal(at) if by_signal else Interrupt(at)
        try:
            with fault:
                act(streamed, number)
        except KeyboardInterrupt:
            met += 1
            mend_torch_modes()
            assert streamed.values() == stock.values()
        else:
            moments = max(moments, fault.moments)
        following = _Program.infer if chance.random() < 0.4 else _Program.compute_gradients
        assert following(streamed, number) == following(stock, number)
        if following is _Program.compute_gradients:
            for it in (stock, streamed):
                it.optimizer.step()
        assert streamed.values() == stock.values()
        assert not weights.streamed.is_in_use
        assert weights.streamed.streamed_bytes == streamed_bytes
        assert saved_tensors.innermost() is None
    weights.close()
