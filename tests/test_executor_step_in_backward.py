"""The optimizer's step in the backward pass: equal values, or a step that stays where it is."""

from __future__ import annotations

import copy
import gc
import logging
import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import managed_training
import pytest
import torch
from managed_training import (
    BEFORE_PLANNED,
    MIB,
    WIDTH,
    Checkpointed,
    Net,
    Scale,
    Training,
    fail_at_phase,
    hook_count,
)
from torch import nn

from umem.core.errors import PlanError
from umem.executor import ManagerState
from umem.executor.bit_checksum import bit_checksum
from umem.executor.optimizer.partial_step import PER_PARAMETER_OPTIMIZERS
from umem.torch_compat import version_counter

pytestmark = pytest.mark.usefixtures("one_thread")

both = partial(managed_training.both, step_in_backward=True)


def twelve(training: Training) -> None:
    training.steps(12)


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["planned", "lookahead", "fault"])
def test_values_equal_those_of_a_stock_run(planner: str) -> None:
    _, manager = both(twelve, planner)
    status = manager.status()
    assert status.state is ManagerState.RUNNING
    assert status.step_in_backward
    assert (status.steps, status.diverged_steps) == (12 - BEFORE_PLANNED, 0)
    trace = manager.trace
    assert trace is not None
    names = trace.phase_names
    for block in ("head", "layers.3", "layers.0"):
        assert names.index(f"optimizer {block}") == names.index(f"backward {block}") + 1


def test_gradients_are_freed_with_their_block() -> None:
    training = Training()
    training.manage(step_in_backward=True)
    alive: list[int] = []

    def count(_gradient: torch.Tensor) -> None:
        alive.append(sum(it.grad is not None for it in training.model.parameters()))

    for layer in training.model.modules():
        if isinstance(layer, Scale):
            layer.register_forward_hook(lambda *made: made[2].register_hook(count) and None)
    training.steps(BEFORE_PLANNED)
    assert max(alive) > 2
    alive.clear()
    training.forward().backward()
    assert max(alive) <= 1
    assert all(parameter.grad is None for parameter in training.model.parameters())


@pytest.mark.parametrize("kind", PER_PARAMETER_OPTIMIZERS)
@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_optimizers_change_no_gradient(kind: Any, foreach: bool) -> None:
    """A gradient that changed was changed by the program."""
    decay = {} if kind is torch.optim.Rprop else {"weight_decay": 0.1}
    parameters = [nn.Parameter(torch.randn(8)) for _ in range(3)]
    optimizer = kind(parameters, lr=1e-3, foreach=foreach, maximize=True, **decay)
    for parameter in parameters:
        parameter.grad = torch.randn(8)
    gradients = [it.grad for it in parameters if it.grad is not None]
    before = list(map(version_counter, gradients))
    checksums = torch.stack(list(map(bit_checksum, gradients)))
    for _ in range(2):
        optimizer.step()
    assert list(map(version_counter, gradients)) == before
    assert torch.equal(torch.stack(list(map(bit_checksum, gradients))), checksums)
    assert all(map(operator.is_, gradients, (it.grad for it in parameters)))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_other_optimizers(kind: Any) -> None:
    _, manager = both(lambda it: it.steps(9), make_optimizer=partial(kind, lr=1e-3, momentum=0.9))
    assert manager.status().step_in_backward


@pytest.mark.slow
def test_a_learning_rate_schedule() -> None:
    def train(training: Training) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.9)
        for _ in range(12):
            training.step()
            schedule.step()

    _, manager = both(train)
    assert manager.status().step_in_backward


def test_zero_grad_before_the_backward_pass() -> None:
    def train(training: Training) -> None:
        for _ in range(12):
            loss = training.forward()
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            training.losses.append(loss.item())

    _, manager = both(train)
    assert manager.status().step_in_backward


class Partly(Net):
    """One block has a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_parameter("idle", nn.Parameter(torch.zeros(4)))


class Tied(Net):
    """First and last block share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_parameter("weight", self.layers[0].get_parameter("weight"))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Tied, Checkpointed])
def test_weights_that_are_used_twice(model: type[Net]) -> None:
    _, manager = both(twelve, make_model=model)
    status = manager.status()
    assert status.step_in_backward
    assert status.diverged_steps == 0


def test_the_programs_step_updates_a_block_with_a_missing_gradient() -> None:
    stock, managed = Training(Partly), Training(Partly)
    manager = managed.manage(step_in_backward=True)
    for training in (stock, managed):
        training.steps(12)
    assert managed.losses == stock.losses
    assert all(map(torch.equal, managed.model.parameters(), stock.model.parameters()))
    status = manager.status()
    assert status.step_in_backward
    assert (status.steps, status.diverged_steps) == (12 - BEFORE_PLANNED, 0)
    assert manager.trace is not None
    assert manager.trace.phase_names[-1] == "optimizer layers.1"


@pytest.mark.slow
def test_batches_of_another_shape() -> None:
    def train(training: Training) -> None:
        for rows in (2, 4, 4):
            training.steps(10, rows)

    _, manager = both(train, budget_bytes=64 * MIB)
    assert manager.status().plans == 2
    assert manager.status().step_in_backward


def test_a_step_that_breaks_before_its_backward_pass() -> None:
    def train(training: Training) -> None:
        training.steps(9)
        with pytest.raises(RuntimeError):
            training.model(torch.ones(2, 3))
        training.steps(3)

    _, manager = both(train)
    assert manager.status().diverged_steps >= 1


def test_an_error_of_the_executor_leaves_the_step_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, managed = Training(), Training()
    manager = managed.manage(step_in_backward=True)
    for training in (stock, managed):
        training.steps(9)
    fail_at_phase(manager, monkeypatch)
    for training in (stock, managed):
        training.steps(3)
    assert managed.equals(stock)
    assert manager.status().state is ManagerState.OFF
    assert not manager.status().step_in_backward


def test_close_gives_the_step_back() -> None:
    stock, managed = Training(), Training()
    manager = managed.manage(step_in_backward=True)
    for training in (stock, managed):
        training.steps(9)
    manager.close()
    assert hook_count(managed) == 0
    managed.forward().backward()
    assert all(it.grad is not None for it in managed.model.parameters())
    managed.optimizer.zero_grad()
    for training in (stock, managed):
        training.steps(2)
    assert managed.equals(stock)


def test_a_dropped_model_is_freed() -> None:
    training = Training()
    manager = training.manage(step_in_backward=True)
    training.steps(9)
    training.forward().backward()  # in the middle of a step
    model = weakref.ref(training.model)
    del training, manager
    gc.collect()
    assert model() is None


def clipped(training: Training) -> None:
    for _ in range(12):
        loss = training.forward()
        loss.backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.losses.append(loss.item())


def accumulated(training: Training) -> None:
    for _ in range(12):
        for _ in range(2):
            training.forward().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.losses.append(0.0)


def kept(training: Training) -> None:
    training.steps(12, gradients_stay=True)


def steps_with(training: Training, change: Callable[[nn.Parameter, torch.Tensor], object]) -> None:
    """Steps before each of which every parameter's gradient is changed."""
    for _ in range(12):
        loss = training.forward()
        loss.backward()
        for parameter in training.model.parameters():
            assert parameter.grad is not None
            change(parameter, parameter.grad)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.losses.append(loss.item())


def replaced(training: Training) -> None:
    steps_with(training, lambda it, gradient: setattr(it, "grad", gradient * 0.5))


def hooked(training: Training) -> None:
    """A hook of the optimizer, registered after the manager's, changes gradients."""

    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    training.optimizer.register_step_pre_hook(halve)
    training.steps(12)


def clamped_unseen(training: Training) -> None:
    """torch does not count changes through `.data`."""
    steps_with(training, lambda _, gradient: gradient.data.clamp_(-1e-9, 1e-9))


def scaled(training: Training, scale: float = 4.0) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=11)
    for _ in range(12):
        loss = training.forward()
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        training.losses.append(loss.item())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (clipped, "changed between the backward pass"),
        (clamped_unseen, "changed between the backward pass"),
        (scaled, "a gradient scaler divides gradients"),
        (partial(scaled, scale=1.0), "a gradient scaler divides gradients"),
        (replaced, "changed between the backward pass"),
        (hooked, "changed between the backward pass"),
        (accumulated, "accumulated over several"),
        (kept, "kept from one step to the next"),
    ],
)
def test_trainings_that_use_gradients_keep_their_step(
    train: Callable[[Training], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "umem"):
        _, manager = both(train)
    status = manager.status()
    assert status.state is ManagerState.RUNNING
    assert not status.step_in_backward
    assert status.steps > 0
    (record,) = caplog.records
    assert "the optimizer's step stays behind the backward pass" in record.getMessage()
    assert reason in record.getMessage()


def test_a_gradient_scaler_with_an_optimizer_that_unscales() -> None:
    _, manager = both(scaled, make_optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True))
    assert manager.status().steps > 0
    assert not manager.status().step_in_backward


def test_a_disabled_gradient_scaler_is_no_obstacle() -> None:
    def train(training: Training) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for _ in range(10):
            loss = training.forward()
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
            training.losses.append(loss.item())

    _, manager = both(train)
    assert manager.status().step_in_backward


class Embedded(nn.Module):
    """A model with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH, sparse=True)
        self.layers = nn.ModuleList(Scale() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.embedding(torch.arange(len(x)))
        for layer in self.layers:
            x = layer(x)
        return x


def test_sparse_gradients_keep_their_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "umem"):
        _, manager = both(
            lambda it: it.steps(9),
            budget_bytes=90 * MIB,
            make_model=Embedded,
            make_optimizer=partial(torch.optim.SGD, lr=1e-3),
        )
    assert not manager.status().step_in_backward
    (record,) = caplog.records
    assert "sparse" in record.getMessage()


def test_parameters_on_several_devices_are_refused() -> None:
    training = Training()
    elsewhere = nn.Parameter(torch.empty(4, device="meta"))
    training.optimizer.add_param_group({"params": [elsewhere]})
    with pytest.raises(PlanError, match="cpu and meta"):
        training.manage(step_in_backward=True)
    training.manage()


def test_a_loop_may_skip_a_batch_whose_backward_pass_fails() -> None:
    training = Training()
    manager = training.manage(step_in_backward=True)
    training.steps(9)

    def stop(_gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    handle = training.model.get_parameter("layers.1.weight").register_hook(stop)
    with pytest.raises(RuntimeError, match="out of memory"):
        training.forward().backward()
    handle.remove()
    updated = [int(it["step"]) for it in training.optimizer.state.values()]
    assert sorted(updated) == [9, 9, 10, 10, 10]
    training.optimizer.zero_grad()
    training.steps(3)
    assert [int(it["step"]) for it in training.optimizer.state.values()] == [
        count + 3 for count in updated
    ]
    assert manager.status().step_in_backward
    assert manager.status().diverged_steps == 1
    training.forward().backward()
    with pytest.raises(PlanError, match="a second backward pass"):
        training.forward().backward()


@pytest.mark.slow
def test_loading_state_in_the_middle_of_a_step() -> None:
    stock, managed = Training(), Training()
    manager = managed.manage(step_in_backward=True)
    for training in (stock, managed):
        training.steps(9)
        loss = training.forward()
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.losses.append(loss.item())
        training.steps(3)
    assert managed.equals(stock)
    assert manager.status().step_in_backward


def test_a_second_backward_pass_is_refused_once_the_first_has_stepped() -> None:
    training = Training()
    training.manage(step_in_backward=True)
    training.steps(9)
    training.forward().backward()
    with pytest.raises(PlanError, match=r"head .*optimizer\.step\(\)"):
        training.forward().backward()


def test_an_impossible_step_in_backward_is_an_error_at_once() -> None:
    training = Training(make_optimizer=partial(torch.optim.LBFGS, lr=1e-3))
    with pytest.raises(PlanError, match="LBFGS"):
        training.manage(step_in_backward=True)
    assert hook_count(training) == 0

    training = Training()
    manager = training.manage()
    with pytest.raises(PlanError, match="step_in_backward"):
        training.manage(step_in_backward=True)
    manager.close()
    again = training.manage(step_in_backward=True)
    assert training.manage() is again
