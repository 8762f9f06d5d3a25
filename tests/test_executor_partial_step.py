"""The optimizer's step in parts, one for each block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from umem.capture.live import find_blocks
from umem.executor.optimizer.partial_step import (
    PER_PARAMETER_OPTIMIZERS,
    PartialOptimizerStep,
    can_slice,
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))


def backward(net: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    net(torch.randn(4, 8)).square().sum().backward()


@pytest.mark.parametrize("kind", PER_PARAMETER_OPTIMIZERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_parts_equal_the_whole_step(kind: Any, groups: int) -> None:
    results = []
    for sliced in (False, True):
        net = model()
        parameters = list(net.parameters())
        parts = [parameters[:3], parameters[3:]] if groups == 2 else [parameters]
        optimizer = kind([{"params": part, "lr": 0.01 * (n + 1)} for n, part in enumerate(parts)])
        slices = PartialOptimizerStep(optimizer, find_blocks(net, None))
        for step in range(5):
            backward(net, step)
            if sliced:
                names: list[str] = []
                slices.run(names.append)
                assert names == ["0", "1", "2"]
                optimizer.step()  # finds nothing to do
                slices.restore()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len(part) for part in parts
        ]
        results.append([parameter.detach().clone() for parameter in parameters])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_step_hooks_run_once() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    backward(net, 0)
    slices = PartialOptimizerStep(optimizer, find_blocks(net, None))
    slices.run(lambda _: None)
    optimizer.step()
    assert seen == ["before", "after"]


def test_parameters_without_gradient_or_block() -> None:
    net = model()
    loose = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*net.parameters(), loose], lr=0.5)
    backward(net, 0)
    net[1].weight.grad = net[1].bias.grad = None
    loose.grad = torch.ones(3)
    slices = PartialOptimizerStep(optimizer, find_blocks(net, None))
    names: list[str] = []
    slices.run(names.append)
    assert names == ["0", "2", ""]
    assert torch.equal(loose.detach(), torch.full((3,), 0.5))


def test_an_error_in_a_part_is_raised_and_leaves_the_optimizer_intact() -> None:
    net, expected = model(), model()
    optimizer = torch.optim.AdamW(net.parameters())
    reference = torch.optim.AdamW(expected.parameters())
    slices = PartialOptimizerStep(optimizer, find_blocks(net, None))

    def step_in_parts() -> None:
        slices.run(lambda _: None)

    for trained, its, step in (
        (net, optimizer, step_in_parts),
        (expected, reference, reference.step),
    ):
        backward(trained, 0)
        its.step()
        its.state[trained.get_parameter("1.weight")]["exp_avg"] = torch.zeros(3)
        with pytest.raises(RuntimeError, match="size"):
            step()
    assert all(map(torch.equal, net.parameters(), expected.parameters()))
    assert optimizer.param_groups[0]["params"] == list(net.parameters())
    assert len(optimizer.state_dict()["state"]) == 6


def test_optimizers_that_couple_parameters_run_whole() -> None:
    class Clipping(torch.optim.AdamW):
        """A subclass, which may use all gradients at once."""

    parameters = list(model().parameters())
    assert can_slice(torch.optim.AdamW(parameters))
    assert not can_slice(Clipping(parameters))
    assert not can_slice(torch.optim.LBFGS(parameters))
