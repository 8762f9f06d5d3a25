"""Results of cheap modules that are made again in the backward pass: which, and that all bits are
stock's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from measured_memory import MeasuredRoom, MemoryMeter, train_within
from torch import nn

from umem.capture.live import find_blocks
from umem.offloading import ActivationStore
from umem.streaming.activations import CopiedActivations
from umem.streaming.tune import TuningState, planning
from umem.streaming.tune.measuring import Measuring
from umem.streaming.tune.remaking import Remaking
from umem.streaming.tune.states import TuningEvent

CHANNELS, PIXELS, BLOCKS = 8, 16, 4
TENSOR_BYTES = 2 * CHANNELS * PIXELS * PIXELS * 4
"""What a plan leaves free at the least."""


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter of memory is a mode, which sees every call, and counts none."""
    monkeypatch.setattr("umem.streaming.activations.repeatable.every_call_is_seen", lambda: False)


def conv() -> nn.Module:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)


class Block(nn.Module):
    """A norm and a function of it before a convolution, and both within a sequence."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.norm, self.act, self.first = nn.GroupNorm(2, CHANNELS), nn.SiLU(), conv()
        self.body = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True), *between, conv())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.body(self.first(self.act(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(make() for _ in range(BLOCKS))
        self.head = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


def images(number: int) -> torch.Tensor:
    return torch.randn(2, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(number))


def step(model: nn.Module, number: int, *, autocast: bool = False) -> list[bytes]:
    torch.manual_seed(number)
    model.zero_grad()
    kind = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()
    with kind:
        loss = model(images(number)).square().mean()
    loss.backward()
    found = [*(it.grad for it in model.parameters()), *model.buffers()]
    return [it.numpy().tobytes() for it in found if it is not None]


def _raise(error: Exception) -> None:
    raise error


def managed(model: nn.Module) -> CopiedActivations:
    store = ActivationStore("cpu", LazyMover(), min_bytes=1024)
    return CopiedActivations(model, find_blocks(model), store, _raise, may_recompute=True)


def measure(activations: CopiedActivations, model: nn.Module, **options: bool) -> int:
    """Bytes that a measured step saves."""
    activations.begin_step()
    activations.set_plan({}, 1, is_measuring=True)
    step(model, 9, **options)
    return sum(activations.saved_bytes.values())


class Remade:
    """A model whose results are made again; blocks are proved, and so are modules."""

    def __init__(self, make: Callable[[], nn.Module] = Block, **options: bool) -> None:
        self.model, self.options = Net(make), options
        self.activations = managed(self.model)
        measure(self.activations, self.model, **options)
        self.kept_bytes = measure(self.activations, self.model, **options)
        remade = self.activations.remade
        assert remade is not None
        assert remade.begin()
        self.tried = [self.trial() for _ in range(2)]
        self.saved_bytes = measure(self.activations, self.model, **options)
        self.activations.set_plan({}, 1, is_measuring=False)

    def trial(self) -> bool:
        measure(self.activations, self.model, **self.options)
        return self.activations.is_unusual

    def check(self, plain: nn.Module) -> None:
        plain.load_state_dict(self.model.state_dict())
        for number in range(2):
            found = step(self.model, number, **self.options)
            assert found == step(plain, number, **self.options)


@pytest.mark.parametrize("autocast", [False, True])
def test_all_bits_are_stocks_and_less_is_saved(autocast: bool) -> None:
    made = Remade(autocast=autocast)
    assert made.tried == [True, False]
    # Of each block two results of four, which are made of the two others.
    assert made.saved_bytes <= 0.62 * made.kept_bytes
    made.check(Net())


@pytest.mark.parametrize("recomputed", [[], ["blocks.1", "blocks.2"]], ids=["copied", "twice"])
def test_what_results_are_made_of_leaves_and_comes_back(recomputed: list[str]) -> None:
    made = Remade()
    names = [name for name in made.activations.saved_bytes if name not in recomputed][:-1]
    again: dict[str, str | None] = dict.fromkeys(recomputed)
    made.activations.set_plan(dict.fromkeys(names), 1, is_measuring=False, recomputed=again)
    made.check(Net())
    assert made.activations.statistics.tensors_out > 0


def test_a_graph_that_is_kept_runs_backward_twice() -> None:
    def twice(model: nn.Module) -> list[bytes]:
        model.zero_grad()
        loss = model(images(0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [it.grad.numpy().tobytes() for it in model.parameters() if it.grad is not None]

    made, plain = Remade(), Net()
    plain.load_state_dict(made.model.state_dict())
    assert twice(made.model) == twice(plain)


def test_averages_change_once() -> None:
    made = Remade()
    own: Any = made.model.blocks[0]
    before = int(own.body[0].num_batches_tracked)
    step(made.model, 0)
    assert int(own.body[0].num_batches_tracked) == before + 1


class Scaled(nn.Module):
    """Another scale each time."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale += 0.5
        return torch.tanh(x) * self.scale


class WithBuffer(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        return torch.tanh(x) * (1.0 + 0.01 * self.calls)


class Unseen(nn.Module):
    """A result that is changed later, past autograd's count of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.act(x)
        y.data.mul_(3.0)
        return y


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "random numbers": lambda: nn.Dropout(0.3),
    "a state in Python": Scaled,
    "a buffer": WithBuffer,
    "changed past autograd": Unseen,
    "a view": lambda: nn.Unflatten(1, (2, 4)),
}


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_other_results_are_kept(kind: Callable[[], nn.Module]) -> None:
    def make() -> nn.Module:
        more = [nn.Flatten(1, 2)] if isinstance(kind(), nn.Unflatten) else []
        return Block(nn.GroupNorm(2, CHANNELS), kind(), *more)

    def scales(model: nn.Module) -> list[Any]:
        return [it for it in model.modules() if isinstance(it, Scaled)]

    made, plain = Remade(make), Net(make)
    for one, other in zip(scales(plain), scales(made.model), strict=True):
        one.scale = other.scale
    made.check(plain)


def test_a_weight_that_changes_before_the_backward_pass_is_an_error_of_autograd() -> None:
    made = Remade()
    loss = made.model(images(0)).square().mean()
    own: Any = made.model.blocks[-1]
    with torch.no_grad():
        own.body[0].bias.add_(1.0)  # which stock's backward pass does not read
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


@pytest.mark.usefixtures("unseen")
def test_nothing_lives_longer_than_the_graph() -> None:
    made, x = Remade(), images(0)
    with MemoryMeter() as meter:
        for tensor in (x, *made.model.buffers()):
            meter.leave_out(tensor)
        gc.collect()
        before_bytes = meter.live_bytes
        loss = made.model(x).square().mean()
        gc.collect()
        held_bytes = meter.live_bytes - before_bytes
        assert 0 < held_bytes < made.kept_bytes * 0.7
        del loss
        gc.collect()
        assert meter.live_bytes == before_bytes


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("share", [0.45, 0.75])
def test_a_training_makes_results_again_where_its_budget_is_small(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))
    stock_bytes, expected, _ = train_within(Net(), None, images, 24)
    most_bytes, weights, status = train_within(
        Net(), int(share * stock_bytes), images, 24, min_bytes=1024, may_recompute=True
    )
    assert weights == expected
    assert status is not None
    assert status.remakes_results
    assert status.state == TuningState.PLANNED
    assert most_bytes <= share * stock_bytes


@pytest.mark.usefixtures("unseen")
def test_results_that_are_kept_again_need_no_other_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another training waits for the plan of this one meanwhile."""
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))
    stock_bytes, expected, _ = train_within(Net(), None, images, 24)
    rounds, changes = [], Remaking.changes_steps

    def changes_steps(self: Any, *arguments: Any) -> bool:
        if self.is_on:  # by prediction, no step is as short as that without
            self._without = (0, 0.0)
        rounds.append((self.is_on, changes(self, *arguments), self.is_on))
        return rounds[-1][1]

    monkeypatch.setattr(Remaking, "changes_steps", changes_steps)
    begun: list[TuningEvent] = []
    begin_round = Measuring.begin

    def begin(self: Any, its: Any) -> None:
        begun.append(its.occasion)
        begin_round(self, its)

    monkeypatch.setattr(Measuring, "begin", begin)
    most_bytes, weights, status = train_within(
        Net(), int(0.75 * stock_bytes), images, 24, min_bytes=1024, may_recompute=True
    )
    assert weights == expected
    assert status is not None
    assert status.state == TuningState.PLANNED
    assert not status.remakes_results
    assert most_bytes <= 0.75 * stock_bytes
    assert rounds[:2] == [(False, True, True), (True, True, False)]
    assert begun.count(TuningEvent.CHANGED) == 1


@pytest.mark.usefixtures("unseen")
def test_results_are_made_again_for_good_where_steps_without_take_longer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))
    stock_bytes, expected, _ = train_within(Net(), None, images, 40)
    changes, mark, found = Remaking.changes_steps, MeasuredRoom.mark, list[Remaking]()

    def changes_steps(self: Any, units: Any, computed_s: float, whole: Any, known_s: Any) -> bool:
        found[:] = [self]
        if self.is_on and known_s is not None and self._without is not None:
            self._without = (0, 0.0)  # by prediction, no step is as short as that without
        return changes(self, units, computed_s, whole, known_s)

    def slower_mark(self: Any) -> int:
        if found and not found[0].is_on:
            self._now += 4000
        return mark(self)

    monkeypatch.setattr(Remaking, "changes_steps", changes_steps)
    monkeypatch.setattr(MeasuredRoom, "mark", slower_mark)
    with caplog.at_level("INFO", "umem"):
        most_bytes, weights, status = train_within(
            Net(), int(0.45 * stock_bytes), images, 40, min_bytes=1024, may_recompute=True
        )
    said = [it.getMessage() for it in caplog.records]
    kept = next(n for n, it in enumerate(said) if it.startswith("umem: results are kept again"))
    # No plan for steps with less to keep is in force then.
    assert said[kept + 1].startswith("umem: plan 2: state of")
    assert said[-1].startswith("umem: plan 1 stays")
    assert weights == expected
    assert status is not None
    assert status.remakes_results
    assert most_bytes <= 0.45 * stock_bytes


class Set(nn.Module):
    """What a program sets."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.slope = 0.0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.softplus(x, self.slope)
        return nn.functional.dropout(y, self.rate, self.training) if self.rate else y


class WithSet(Block):
    def __init__(self) -> None:
        super().__init__(Set())


def a_rate_of_dropout(model: Any) -> torch.Tensor:
    for block in model.blocks:
        block.body[2].rate = 0.4
    loss: torch.Tensor = model(images(0)).square().mean()
    return loss


def another_number_afterwards(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(images(0)).square().mean()
    for block in model.blocks:
        block.body[2].slope = 2.0
    return loss


def other_parameters(model: Any) -> torch.Tensor:
    others = {name: 1.5 * it for name, it in model.named_parameters()}
    loss: torch.Tensor = torch.func.functional_call(model, others, (images(0),)).square().mean()
    return loss


@pytest.mark.parametrize(
    "program", [a_rate_of_dropout, another_number_afterwards, other_parameters]
)
def test_what_a_program_sets(program: Callable[[nn.Module], torch.Tensor]) -> None:
    made, plain = Remade(WithSet), Net(WithSet)
    plain.load_state_dict(made.model.state_dict())
    found = []
    for model in (made.model, plain):
        torch.manual_seed(0)
        model.zero_grad()
        program(model).backward()
        gradients = [it.grad for it in model.parameters() if it.grad is not None]
        found.append([it.numpy().tobytes() for it in (*gradients, torch.rand(1))])
    assert found[0] == found[1]


def test_results_that_are_conjugates() -> None:
    class Conjugate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.complex(x, 2.0 * x).conj()

    class Complex(Block):
        def __init__(self) -> None:
            super().__init__()
            self.conjugate = Conjugate()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.conjugate(x)
            return super().forward(x) + (z * z).real

    Remade(Complex).check(Net(Complex))
