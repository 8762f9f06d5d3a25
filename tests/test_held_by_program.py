"""What a program holds of what a pass has saved: copies free no memory of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from activation_chain import LazyMover
from faults import let_out
from measured_memory import SCALAR_BYTES, train_within
from torch import nn
from torch.nn.functional import interpolate

from umem.capture.live import find_blocks
from umem.hardware import load_hardware
from umem.offloading import ActivationStore
from umem.streaming.activations import CopiedActivations
from umem.streaming.plan import StreamProblem, StreamUnit, plan_stream
from umem.streaming.tune import TuningState, planning

CHANNELS, PIXELS = 4, 48
MIB = 2**20


class Block(nn.Module):
    """Uses what it was given at its end once more."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, it) for it in (inputs, channels))
        self.first = nn.Conv2d(inputs, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip, self.act = nn.Conv2d(inputs, channels, 1), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.act(self.norms[1](self.first(self.act(self.norms[0](x))))))
        return y + self.skip(x)


class UNet(nn.Module):
    """Keeps what it makes on its way down for its way up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.down = nn.ModuleList(Block(CHANNELS, CHANNELS) for _ in range(3))
        self.smaller = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1) for _ in range(3))
        self.up = nn.ModuleList(Block(2 * CHANNELS, CHANNELS) for _ in range(3))
        self.head = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(x), []
        for block, smaller in zip(self.down, self.smaller, strict=True):
            skips.append(block(x))
            x = smaller(skips[-1])
        for block in self.up:
            x = block(torch.cat([interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


def images(number: int) -> torch.Tensor:
    return torch.randn(2, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(number))


class Rectified(nn.Module):
    """A block whose result it saves itself, as the next one does."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for kernel in (1, 3, 1):
            conv = nn.Conv2d(CHANNELS, CHANNELS, kernel, padding=kernel // 2)
            layers += [conv, nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.body(x) + x).relu_()
        return found


def residual_net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Rectified() for _ in range(6))
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), *blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "percent"),
    [
        *((UNet, percent) for percent in (45, 50, 55, 60, 70)),
        *((residual_net, percent) for percent in (50, 60, 80, 93)),
    ],
)
def test_a_net_takes_as_much_memory_and_copies_as_much_as_planned(
    make: Callable[[], nn.Module],
    percent: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))
    caplog.set_level(logging.INFO, "umem")
    stock_bytes, expected, _ = train_within(make(), None, images, 24)
    limit_bytes = percent * stock_bytes // 100
    most_bytes, weights, status = train_within(make(), limit_bytes, images, 24, min_bytes=1024)
    assert weights == expected
    assert status is not None
    assert status.plan is not None
    assert status.state == TuningState.PLANNED, caplog.messages
    assert status.copied_bytes > 0
    assert most_bytes <= status.plan.peak_bytes <= limit_bytes
    assert status.plan.peak_bytes - most_bytes < SCALAR_BYTES


@pytest.mark.parametrize("make", [UNet, residual_net])
@pytest.mark.parametrize("seed", range(3))
def test_as_much_is_copied_as_the_units_save_whatever_runs_twice(
    make: Callable[[], nn.Module], seed: int
) -> None:
    choice, model = random.Random(seed), make()
    store = ActivationStore("cpu", LazyMover(), min_bytes=1024)
    activations = CopiedActivations(model, find_blocks(model), store, let_out, may_recompute=True)
    activations.set_plan({}, 1, is_measuring=True)

    def train() -> None:
        model.zero_grad()
        activations.begin_step()
        model(images(0)).square().mean().backward()

    for _ in range(4):  # the first ones prove that blocks may run twice, and find cuts
        train()
    saved_bytes, proofs = dict(activations.saved_bytes), dict(activations.proofs)
    again = dict.fromkeys(name for name in proofs if choice.random() < 0.4)
    copied = dict.fromkeys(name for name in saved_bytes if choice.random() < 0.4)
    assert again
    assert copied
    planned_bytes = sum(
        max(0, saved_bytes[name] - (proofs[name].freed_bytes if name in again else 0))
        for name in copied
    )
    activations.set_plan(copied, 1, is_measuring=False, recomputed=again)
    before_bytes = store.statistics.bytes_out
    train()
    # A proof counts tensors that are too small to be copied, such as the norms' averages.
    assert abs(store.statistics.bytes_out - before_bytes - planned_bytes) < planned_bytes / 100
    assert store.statistics.late_fetches == 0


def test_memory_is_needed_until_the_program_lets_go() -> None:
    """Of six units that save 40 MiB each, the program holds what the first has saved for long."""
    units = [
        StreamUnit(
            f"{number}",
            *(0, 0.0, 1e-3, 2e-3, 40 * MIB),
            forward_peak_bytes=40 * (number + 1) * MIB,
            backward_peak_bytes=40 * (number + 1) * MIB,
        )
        for number in range(6)
    ]
    hardware = load_hardware("h200")
    problem = StreamProblem(units, budget_bytes=170 * MIB, hardware=hardware)
    free = plan_stream(problem)
    assert free.peak_bytes <= 170 * MIB
    held = [replace(units[0], held=((30 * MIB, 5),)), *units[1:]]
    plan = plan_stream(replace(problem, units=held))
    assert len(plan.copied) > len(free.copied)
    assert plan.peak_bytes <= 170 * MIB
    # The plan without would have taken more, in the forward pass of the last unit.
    planned = replace(problem, units=held).memory.planned(free.left_before, free.fetch_ahead, {})
    assert planned.most_bytes > 170 * MIB
    # Held in one part as in two; no more than all of it is held, and not in the backward pass.
    parts = replace(units[0], held=((10 * MIB, 5), (20 * MIB, 5)))
    assert plan_stream(replace(problem, units=[parts, *units[1:]])) == plan
    large = [replace(units[0], held=((400 * MIB, 99),)), *units[1:]]
    memory = replace(problem, units=large).memory
    assert memory.by_moment(5, 1)[:6].tolist() == [40 * it * MIB for it in (1, 2, 3, 3, 3, 3)]
    assert memory.by_moment(5, 1)[6:].tolist() == problem.memory.by_moment(5, 1)[6:].tolist()


def test_what_is_saved_again_after_its_copy_has_left_is_not_copied_again() -> None:
    """As the argument of a block, which its last layer uses, too."""
    store = ActivationStore("cpu", LazyMover(), min_bytes=1)
    x = torch.randn(64, 64)
    weight = torch.ones(64, 64, requires_grad=True)

    def use(key: str, other: torch.Tensor) -> torch.Tensor:
        store.open_group(key)
        found = weight * other  # saves the other factor
        store.close_group()
        return found

    first = use("first", x)
    assert store.send("first") == x.nbytes
    assert store.release("first") == x.nbytes
    second = use("second", x)
    assert store.send("second") == 0
    assert store.release("second") == x.nbytes
    assert store.statistics.bytes_out == x.nbytes
    third = use("third", x.mul_(2.0))  # its contents are other ones
    assert store.send("third") == x.nbytes
    third.sum().backward()
    gradient = weight.grad
    assert gradient is not None
    assert torch.equal(gradient, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).sum().backward()

    y = torch.randn(64, 64)
    first = use("first", y)
    store.send("first")
    store.release("first")
    second = use("second", y)
    kept = y.clone()
    del y
    store.release("second")
    gradient.zero_()
    (first + second).sum().backward()
    assert torch.equal(gradient, 2 * kept)
