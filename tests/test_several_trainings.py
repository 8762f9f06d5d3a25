"""Several optimizers of one model, and several models, in one process: no bit changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory, LazyLanes
from streamed_programs import STAGED_BYTES, WIDTH, Net, NoRoom, bits
from torch import nn

from umem.executor.streamed_training import StreamedTraining
from umem.executor.weights.model_weights import ModelWeights
from umem.offloading import ActivationStore

EAGERNESS = [0.0, 0.5, 0.9]


def adamw_and_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    every = list(model.parameters())
    return [
        torch.optim.AdamW([it for it in every if it.ndim > 1], lr=1e-2),
        torch.optim.SGD([it for it in every if it.ndim == 1], lr=1e-2, momentum=0.9),
    ]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("no Muon in this torch")
    blocks = [it for name, it in model.named_parameters() if "layers" in name]
    hidden = [it for it in blocks if it.ndim == 2]
    known = set(map(id, hidden))
    return [
        torch.optim.Muon(hidden, lr=1e-2),
        torch.optim.AdamW([it for it in model.parameters() if id(it) not in known], lr=1e-2),
    ]


def one_for_each_block(model: nn.Module) -> list[torch.optim.Optimizer]:
    made = [torch.optim.AdamW(it.parameters(), lr=1e-2) for it in model.children()]
    return [*made, torch.optim.SGD([model.get_parameter("scale")], lr=1e-2, momentum=0.9)]


MAKERS = [adamw_and_sgd, muon_and_adamw, one_for_each_block]


@dataclass
class Program:
    """A training of one model by several optimizers, streamed or stock."""

    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]
    eagerness: float | None = None
    """None for stock."""
    streams_weights: bool = False
    batches: int = 1
    seen: list[Any] = field(default_factory=list)
    trainings: list[StreamedTraining] = field(default_factory=list)
    weights: ModelWeights | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        self.optimizers = self.make_optimizers(self.model)

    def stream(self) -> None:
        if self.eagerness is None:
            return
        lanes = LazyLanes(self.model, self.eagerness, 1)
        memory = HostStateMemory(staged_bytes=STAGED_BYTES, parameters=self.model.parameters())
        if self.streams_weights:
            self.weights = ModelWeights(
                self.model,
                lanes,
                memory,
                NoRoom(),
                ActivationStore("cpu"),
                min_bytes=WIDTH * WIDTH,
            )
            self.weights.begin_call()
        for optimizer in self.optimizers:
            training = StreamedTraining(self.model, optimizer, lanes, memory, weights=self.weights)
            self.trainings.append(training)

    def step(self, optimizers: list[torch.optim.Optimizer] | None = None) -> None:
        self.model.zero_grad()
        for _ in range(self.batches):
            self.steps += 1
            loss = self.model(batch(self.steps)).square().mean()
            loss.backward()
            self.seen.append(loss.detach().clone())
        self.seen.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        for optimizer in self.optimizers if optimizers is None else optimizers:
            optimizer.step()

    def run(self, steps: int = 6) -> list[Any]:
        self.step()
        self.stream()
        for number in range(steps):
            # The second one steps in every second iteration only.
            self.step(self.optimizers[: 1 + number % 2] + self.optimizers[2:])
        return self.end()

    def end(self) -> list[Any]:
        weights = [it.detach().clone() for it in self.model.parameters()]
        return [*self.seen, *weights, *(copy.deepcopy(it.state_dict()) for it in self.optimizers)]


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("streams_weights", [False, True])
@pytest.mark.parametrize("make_optimizers", MAKERS)
def test_optimizers_of_one_model(
    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
    streams_weights: bool,
    batches: int,
    eagerness: float,
) -> None:
    streamed = Program(make_optimizers, eagerness, streams_weights, batches)
    assert bits(streamed.run()) == bits(Program(make_optimizers, batches=batches).run())
    assert streamed.trainings[0].counts.streamed > 0
