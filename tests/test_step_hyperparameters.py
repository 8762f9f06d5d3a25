"""Hyperparameters that are tensors count as they are when ``step()`` is called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from streamed_programs import Program, bits

EAGERNESS = [0.0, 0.8]

Change = Callable[[Any], None]

OPTIMIZERS: list[Any] = [
    pytest.param(lambda ps, lr: torch.optim.AdamW(ps, lr=lr, fused=True), id="fused"),
    pytest.param(lambda ps, lr: torch.optim.AdamW(ps, lr=lr, foreach=False), id="plain"),
    pytest.param(
        lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9, fused=True), id="momentum"
    ),
]


def run(
    make_optimizer: Callable[[Any], Any],
    before: Change,
    after: Change,
    *,
    lanes: Callable[[Any], LazyLanes] | None,
    in_backward: bool = False,
) -> Any:
    """All weights and state after some steps, and how many steps were streamed."""
    program = Program(lanes, make_optimizer=make_optimizer, in_backward=in_backward)
    for step in range(7):
        if step == 1:
            program.stream()
        program.optimizer.zero_grad()
        program.backward()
        before(program)
        program.optimizer.step()
        after(program)
    streamed = 0 if program.training is None else program.training.counts.streamed
    weights = [it.detach().clone() for it in program.model.parameters()]
    return bits([*program.seen, weights, copy.deepcopy(program.optimizer.state_dict())]), streamed


def compare(make_optimizer: Any, before: Change, after: Change, eagerness: float) -> None:
    found, streamed = run(
        make_optimizer, before, after, lanes=lambda model: LazyLanes(model, eagerness)
    )
    assert streamed == 6
    assert found == run(make_optimizer, before, after, lanes=None)[0]


def nothing(_: Any) -> None:
    pass


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_a_learning_rate_that_is_changed_in_place(make_optimizer: Any, eagerness: float) -> None:
    def change(program: Any) -> None:
        program.optimizer.param_groups[0]["lr"].mul_(0.5)

    compare(lambda ps: make_optimizer(ps, torch.tensor(1e-2)), nothing, change, eagerness)


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize("make_optimizer", [it for it in OPTIMIZERS if it.id != "plain"])
def test_a_gradient_scaler_that_skips_a_step(make_optimizer: Any, eagerness: float) -> None:
    """As GradScaler calls a fused optimizer: it takes both tensors away behind the step."""

    def set_scale(program: Any) -> None:
        program.optimizer.grad_scale = torch.tensor(4.0)
        program.optimizer.found_inf = torch.tensor(float(program.steps % 3 == 0))

    def take_away(program: Any) -> None:
        program.optimizer.found_inf.fill_(5.0)
        del program.optimizer.grad_scale, program.optimizer.found_inf

    compare(lambda ps: make_optimizer(ps, 1e-2), set_scale, take_away, eagerness)


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize("make", [float, torch.tensor])
def test_a_list_that_is_changed_in_place(make: Callable[[float], Any], eagerness: float) -> None:
    def replace(program: Any) -> None:
        (group,) = program.optimizer.param_groups
        group["betas"] = list(map(make, group["betas"]))

    def change(program: Any) -> None:
        program.optimizer.param_groups[0]["betas"][0] *= 0.5

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)

    compare(make_optimizer, replace, change, eagerness)
