"""Results of cheap modules that are made again in the backward pass: which, and that all bits are
stock's."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from faults import let_out
from measured_memory import MemoryMeter, train_within
from torch import nn

from umem.capture.live import find_blocks
from umem.offloading import ActivationStore
from umem.streaming.activations import CopiedActivations, remade_results
from umem.streaming.tune import TuningState, planning
from umem.streaming.tune.measuring import Measuring
from umem.streaming.tune.remaking import Remaking
from umem.streaming.tune.states import TuningEvent
from umem.streaming.tune.watching import Watching

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
        return x + self.body(self.first(self.act(self.norm(x))))


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
        return self.head(x)


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


def managed(model: nn.Module) -> CopiedActivations:
    store = ActivationStore("cpu", LazyMover(), min_bytes=1024)
    return CopiedActivations(model, find_blocks(model), store, let_out, may_recompute=True)


def measure(activations: CopiedActivations, model: nn.Module, **options: bool) -> int:
    """Bytes that a measured step saves."""
    activations.begin_step()
    activations.set_plan({}, 1, is_measuring=True)
    step(model, 9, **options)
    return sum(activations.saved_bytes.values())


class Remade:
    """A model whose results are made again; blocks are proved, and so are modules."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Block,
        large_bytes: int = sys.maxsize,
        **options: bool,
    ) -> None:
        self.model, self.options = Net(make), options
        self.activations = managed(self.model)
        measure(self.activations, self.model, **options)
        self.kept_bytes = measure(self.activations, self.model, **options)
        remade = self.activations.remade
        assert remade is not None
        assert remade.begin(large_bytes)
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
@pytest.mark.parametrize("large_bytes", [sys.maxsize, 1])
def test_all_bits_are_stocks_and_less_is_saved(large_bytes: int, autocast: bool) -> None:
    made = Remade(large_bytes=large_bytes, autocast=autocast)
    assert made.tried == [True, False]
    # Of each block two results of four, which are made of the two others.
    assert made.saved_bytes <= 0.62 * made.kept_bytes
    made.check(Net())


class OneChain(nn.Module):
    """A norm, and a function of it, before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.SiLU(), conv())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x)


@pytest.mark.parametrize("large_bytes", [sys.maxsize, 1])
def test_a_large_result_of_which_others_are_made_is_not_there_beside_what_uses_them(
    large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm's, while the backward pass computes with the activation function's."""
    made = Remade(OneChain, large_bytes)
    made.check(Net(OneChain))
    alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    beside, make = [], remade_results._Call.make

    def counted(self: Any) -> torch.UntypedStorage:
        found = make(self)
        beside.append(len(alive))
        alive.add(found)
        return found

    monkeypatch.setattr(remade_results._Call, "make", counted)
    step(made.model, 0)
    # Of each block first the norm's, for the function's; large ones once more, for its gradient.
    assert beside == ([0, 1] if large_bytes > 1 else [0, 0, 0]) * BLOCKS


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


@pytest.mark.parametrize("large_bytes", [sys.maxsize, 1])
def test_weights_that_change_without_a_count_before_the_backward_pass(large_bytes: int) -> None:
    """Stock's has results of the old ones."""

    def step_late(model: Any) -> list[bytes]:
        model.zero_grad()
        loss = model(images(0)).square().mean()
        for block in model.blocks:
            block.norm.weight.data.mul_(1.5)
            block.body[0].bias.data.add_(0.5)
        loss.backward()
        return [it.grad.numpy().tobytes() for it in model.parameters() if it.grad is not None]

    made, plain = Remade(large_bytes=large_bytes), Net()
    plain.load_state_dict(made.model.state_dict())
    assert step_late(made.model) == step_late(plain)
    made.check(Net())


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


@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
def test_a_training_makes_results_again_in_small_budgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))
    stock_bytes, expected, _ = train_within(Net(), None, images, 24)
    most_bytes, weights, status = train_within(
        Net(), int(0.45 * stock_bytes), images, 24, min_bytes=1024, may_recompute=True
    )
    assert weights == expected
    assert status is not None
    assert status.remakes_results
    assert status.state == TuningState.PLANNED
    assert most_bytes <= 0.45 * stock_bytes


@pytest.mark.parametrize(
    ("measured_s", "predicted_s", "begins"),
    [
        *[(None, 1.0, False), (0.99, 1.0, False), (1.02, 1.0, False), (1.04, 1.0, True)],
        # Shorter than predicted: so is the time of a step with all on the device.
        *[(0.96, 1.0, True), (0.7, 0.7, False), (0.7, 0.75, True)],
    ],
)
def test_a_trial_where_steps_lose_time_or_nobody_knows(
    measured_s: float | None, predicted_s: float, begins: bool
) -> None:
    class Begun:
        is_on = False

        def begin(self, _bytes: int) -> bool:
            return True

    predicted: Any = SimpleNamespace(
        overflow_bytes=0,
        recomputed=frozenset(),
        stream=SimpleNamespace(copied=frozenset({1})),
        step_s=predicted_s,
    )
    remade: Any = Begun()
    assert Remaking(remade, 1).begins([], 1.0, predicted, measured_s) == begins
    predicted.stream.copied = frozenset()  # nothing moves
    assert not Remaking(remade, 1).begins([], 1.0, predicted, measured_s)
    predicted.overflow_bytes = 1  # there is no room
    assert Remaking(remade, 1).begins([], 1.0, predicted, measured_s)


@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("remade_s", [1.0, 1.9, 1.98, 3.0])
def test_results_are_made_again_where_steps_are_measured_to_be_shorter(
    remade_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that keeps them takes 2 s, whatever its plan is."""
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))
    stock_bytes, expected, _ = train_within(Net(), None, images, 40)
    found: list[Remaking] = []
    begins, take, begin = Remaking.begins, Watching.take_measured_s, Measuring.begin

    def seen(self: Any, *arguments: Any) -> bool:
        found[:] = [self]
        return begins(self, *arguments)

    def measured_s(self: Any) -> float | None:
        if take(self) is None:
            return None
        return remade_s if found and found[0].is_on else 2.0

    rounds: list[TuningEvent] = []

    def begin_round(self: Any) -> None:
        rounds.append(self.round.occasion)
        begin(self)

    monkeypatch.setattr(Remaking, "begins", seen)
    monkeypatch.setattr(Watching, "take_measured_s", measured_s)
    monkeypatch.setattr(Measuring, "begin", begin_round)
    with caplog.at_level("INFO", "umem"):
        most_bytes, weights, status = train_within(
            Net(), int(0.75 * stock_bytes), images, 40, min_bytes=1024, may_recompute=True
        )
    said = [it.getMessage() for it in caplog.records]
    assert weights == expected
    assert status is not None
    assert status.state == TuningState.PLANNED
    assert status.remakes_results == (remade_s < 1.94)
    assert most_bytes <= 0.75 * stock_bytes
    assert rounds.count(TuningEvent.CHANGED) == 1
    if remade_s > 1.94:  # by the very plan that was measured, and without another measurement
        plans = [it.split(": ", 2)[2] for it in said if ": state of" in it]
        assert [it.split(":")[1].strip() for it in said[-4:]] == [
            "results are kept again",
            "a step took 2.000 s under an earlier plan, which follows",
            "plan 2",
            "plan 2",
        ]
        assert plans[-1] == plans[-3]


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
    return model(images(0)).square().mean()


def another_number_afterwards(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(images(0)).square().mean()
    for block in model.blocks:
        block.body[2].slope = 2.0
    return loss


def other_parameters(model: Any) -> torch.Tensor:
    others = {name: 1.5 * it for name, it in model.named_parameters()}
    return torch.func.functional_call(model, others, (images(0),)).square().mean()


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
