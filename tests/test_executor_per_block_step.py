"""Managed trainings whose optimizer's step runs in parts, or cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import managed_training
import pytest
import torch
from managed_training import BEFORE_PLANNED, MIB, Training, fail_at_phase

from umem.executor import Manager, ManagerState

pytestmark = pytest.mark.usefixtures("one_thread")


class StopError(Exception):
    """An error of the program."""


MIGRATING = {
    "name": "migrating",
    "extends": "sft",
    "classes": {"optimizer_state": {"mechanism": "migrate"}},
}


def both(train: Callable[[Training], None], budget_bytes: int, policy: Any = "sft") -> Manager:
    """Check that a managed run equals the stock run and follows a plan; returns its manager."""
    _, manager = managed_training.both(train, budget_bytes=budget_bytes, policy=policy)
    assert manager.status().state is ManagerState.RUNNING, manager.status()
    return manager


def has_parts(manager: Manager) -> bool:
    """Whether the optimizer's step is planned block by block."""
    assert manager.trace is not None
    return "optimizer head" in manager.trace.phase_names


@pytest.mark.slow
def test_later_hooks_see_the_whole_step_and_may_change_it() -> None:
    def train(training: Training) -> None:
        def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            seen.append(len(optimizer.param_groups[0]["params"]))

        training.steps(3)
        training.optimizer.register_step_pre_hook(halve)
        training.steps(9)

    seen: list[int] = []
    manager = both(train, budget_bytes=34 * MIB)
    assert seen == [5] * 18  # the stock run's, too
    assert has_parts(manager)
    assert (manager.status().steps, manager.status().diverged_steps) == (12 - BEFORE_PLANNED, 0)


def steps_with_a_closure(training: Training, count: int) -> None:
    for _ in range(count):
        loss = training.forward()
        loss.backward()
        training.optimizer.step(lambda loss=loss: loss.item())  # type: ignore[misc]
        training.optimizer.zero_grad()
        training.losses.append(loss.item())


def test_steps_with_a_closure_are_planned_as_a_whole() -> None:
    manager = both(lambda training: steps_with_a_closure(training, 12), budget_bytes=56 * MIB)
    assert not has_parts(manager)
    assert (manager.status().steps, manager.status().diverged_steps) == (12 - BEFORE_PLANNED, 0)


@pytest.mark.slow
def test_steps_that_stop_running_in_parts_are_planned_again() -> None:
    def train(training: Training) -> None:
        training.steps(BEFORE_PLANNED + 2)
        steps_with_a_closure(training, 14)

    # With state in place there may be no work between the parts, and no divergence.
    manager = both(train, budget_bytes=56 * MIB, policy=MIGRATING)
    assert not has_parts(manager)
    assert manager.status().diverged_steps == 3
    assert manager.status().steps >= 2 + 5


@pytest.mark.slow
@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
def test_an_error_in_the_optimizers_step_reaches_the_program(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(training: Training) -> None:
        training.steps(BEFORE_PLANNED + 2)
        training.forward().backward()
        calls: list[None] = []
        whole = torch.Tensor.lerp_

        def stops(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            whole(self, *args, **kwargs)
            calls.append(None)
            if len(calls) == 3:
                raise error
            return self

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "lerp_", stops)
            with pytest.raises(error):
                training.optimizer.step()
        parameters = list(training.model.parameters())
        assert training.optimizer.param_groups[0]["params"] == parameters
        assert len(training.optimizer.state_dict()["state"]) == 5
        steps = [int(training.optimizer.state[it]["step"]) for it in parameters]
        assert steps == [10, 10, 10, 9, 9]
        training.optimizer.zero_grad()
        training.steps(3)

    manager = both(train, budget_bytes=34 * MIB)
    assert has_parts(manager)
    assert (manager.status().steps, manager.status().diverged_steps) == (2 + 2, 1)


def test_an_error_of_the_executor_between_parts_leaves_the_step_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, training = Training(), Training()
    manager = training.manage(budget_bytes=34 * MIB)
    training.steps(BEFORE_PLANNED + 1)
    fail_at_phase(manager, monkeypatch, "optimizer layers.2")
    training.steps(3)
    assert manager.status().state is ManagerState.OFF
    assert "RuntimeError: no more" in manager.status().reason
    stock.steps(BEFORE_PLANNED + 4)
    assert training.equals(stock)
