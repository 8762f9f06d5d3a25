"""Updates that use what other updates change: of the same step, or of another optimizer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from streamed_programs import EAGERNESS, UNITS, WIDTH, Net, Program, compare
from torch import nn

from umem.runtime.aliases import overlap
from umem.streaming import StreamedTraining

HOSTS = UNITS - {"", "layers.0"}

PLANS = [
    pytest.param({}, id="state"),
    pytest.param({"resident": frozenset(["layers.0"])}, id="some"),
    pytest.param({"copied_gradients": UNITS}, id="gradients"),
    pytest.param({"copied_gradients": UNITS, "hosts": HOSTS}, id="host"),
]


def weights(program: Program) -> tuple[Any, Any]:
    return program.model.layers[0].weight, program.model.layers[2].weight


def of_each_other(program: Program) -> None:
    """Each one's gradient is the other one's value."""
    one, other = weights(program)
    one.grad, other.grad = other.detach(), one.detach()


def a_parameter(program: Program) -> None:
    """A gradient is a parameter itself."""
    one, other = weights(program)
    other.grad = one


def own_state(program: Program) -> None:
    for parameter in program.model.parameters():
        parameter.grad = program.optimizer.state[parameter]["exp_avg_sq"]


def others_state(program: Program) -> None:
    one, other = weights(program)
    state = program.optimizer.state
    one.grad, other.grad = state[other]["exp_avg"], state[one]["exp_avg"]


def one_for_both(program: Program) -> None:
    """Two parameters have one gradient."""
    one, other = weights(program)
    one.grad = other.grad


class Between(Program):
    """Changes gradients between clipping and the step, and one behind a block of the next pass."""

    between: Callable[[Program], None]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if self.steps > 1:
            type(self).between(self)
        self.optimizer.step()
        with torch.no_grad():
            self.model.layers[0](torch.ones(1, WIDTH))
            self.model.layers[2].weight.grad.mul_(3)


def backwards(parameters: Any) -> torch.optim.Optimizer:
    """Another order than that of the passes."""
    return torch.optim.AdamW(list(parameters)[::-1], lr=1e-2)


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "between", [of_each_other, a_parameter, own_state, others_state, one_for_both]
)
def test_gradients_that_are_something_else(
    between: Callable[[Program], None], plan: dict[str, Any], eagerness: float
) -> None:
    kind = type("Kind", (Between,), {"between": staticmethod(between)})
    compare(eagerness=eagerness, kind=kind, make_optimizer=backwards, **plan)


class OnOneMemory(Net):
    """Two weights that are tied by their memory, and have gradients of their own."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = self.layers
        layers[3].weight = nn.Parameter(layers[0].weight.data)


def twice(parameters: Any) -> torch.optim.Optimizer:
    """As a program lists tied weights, and torch warns."""
    every = list(parameters)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        return torch.optim.AdamW([*every, every[3]], lr=1e-2)


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param({"make_model": OnOneMemory, "make_optimizer": backwards}, id="memory"),
        pytest.param({"make_optimizer": twice}, id="twice"),
    ],
)
def test_parameters_that_are_updated_twice(program: dict[str, Any], eagerness: float) -> None:
    run = compare(eagerness=eagerness, **program)
    assert (run.training.counts.streamed, run.training.counts.in_line) == (0, 4)


def test_parts_of_one_memory_are_streamed() -> None:
    flat = torch.arange(12.0)
    assert not overlap([flat[:4], flat[8:], flat[4:8]])
    assert overlap([flat[:4], flat[3:8]])
    assert overlap([flat, flat[4:8]])

    class OfOneBucket(Program):
        """As DDP has them."""

        def step(self) -> None:
            self.optimizer.zero_grad()
            self.backward()
            every = list(self.model.parameters())
            bucket = torch.cat([it.grad.reshape(-1) for it in every])
            parts = bucket.split([it.numel() for it in every])
            for it, part in zip(every, parts, strict=True):
                it.grad = part.view_as(it)
            self.optimizer.step()

    run = compare(kind=OfOneBucket)
    assert (run.training.counts.streamed, run.training.counts.in_line) == (4, 0)


class TwoOptimizers(Program):
    """Both update all parameters, in turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.second = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)

    def stream(self) -> None:
        super().stream()
        if self.lanes is not None:
            self.kept = StreamedTraining(self.model, self.second, self.lazy, self.memory)
            self.kept.step.units.set_plan(self.resident, self.slots)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.in_turn():
            optimizer.step()

    def in_turn(self) -> tuple[Any, ...]:
        return self.optimizer, self.second


class TheSecondFirst(TwoOptimizers):
    """In the other order."""

    def in_turn(self) -> tuple[Any, ...]:
        return self.second, self.optimizer


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [TwoOptimizers, TheSecondFirst])
def test_two_optimizers_of_the_same_parameters(
    kind: type[Program], plan: dict[str, Any], eagerness: float
) -> None:
    compare(eagerness=eagerness, kind=kind, **plan)
