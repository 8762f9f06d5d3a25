"""Common training loops and models under a manager on the CPU: values equal a stock run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import managed_training
import pytest
import torch
from faults import Interrupt, Signal, mend_torch_modes
from managed_training import (
    BEFORE_PLANNED,
    MIB,
    TIGHT,
    Checkpointed,
    Net,
    Scale,
    Training,
    hook_count,
    program_of,
)
from torch import nn

from umem.core.classes import TensorClass
from umem.pages import Manager, ManagerState
from umem.pages.run.step_plan import MODEL
from umem.runtime.torch_hooks import saved_tensors

pytestmark = pytest.mark.slow

STEPS = BEFORE_PLANNED + 3


def both(train: Callable[[Training], None], planner: str = "planned", **more: Any) -> Manager:
    """Check that a managed run equals the stock run and follows a plan; returns its manager."""
    _, manager = managed_training.both(train, planner, **more)
    assert manager.status().state is ManagerState.RUNNING, manager.status()
    return manager


def step_on_batches(training: Training, batches: int) -> None:
    for _ in range(batches):
        (training.forward() / 3).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.losses.append(0.0)


def accumulate(training: Training) -> None:
    for _ in range(STEPS):
        step_on_batches(training, 3)


def accumulate_less_at_last(training: Training) -> None:
    for step in range(STEPS):
        step_on_batches(training, 1 if step == STEPS - 1 else 2)


def keep_gradients(training: Training) -> None:
    training.steps(STEPS, gradients_stay=True)


def drop_gradients_first(training: Training) -> None:
    for _ in range(STEPS):
        training.optimizer.zero_grad()
        loss = training.forward()
        loss.backward()
        training.optimizer.step()
        training.losses.append(loss.item())


def evaluate_between(training: Training) -> None:
    for step in range(STEPS):
        training.step()
        if step % 3 == 0:
            training.model.eval()
            with torch.no_grad():
                training.losses.append(training.forward().item())
            training.model.train()


def evaluate_with_gradients(training: Training) -> None:
    for step in range(STEPS):
        if step == STEPS - 1:
            training.forward()  # and its graph is dropped
        training.step()


def skip_steps(training: Training) -> None:
    for step in range(16):
        loss = training.forward()
        loss.backward()
        if step not in (3, 10):  # as where a gradient is infinite, by a scaler
            training.optimizer.step()
        training.optimizer.zero_grad()
        training.losses.append(loss.item())


def load_state(training: Training) -> None:
    training.steps(STEPS)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.steps(4)


@pytest.mark.parametrize(
    ("train", "planner", "expected"),
    [
        # The step in which the program starts diverges: its first call is over by then.
        (accumulate, "planned", {"steps": 3, "diverged_steps": 1, "plans": 1}),
        # And the last one.
        (accumulate_less_at_last, "planned", {"steps": 2, "diverged_steps": 2}),
        (keep_gradients, "lookahead", {"diverged_steps": 0}),
        (drop_gradients_first, "planned", {"diverged_steps": 0}),
        (evaluate_between, "planned", {"steps": 3, "diverged_steps": 0, "unplanned": 0}),
        (evaluate_with_gradients, "planned", {"steps": 2, "diverged_steps": 1}),
        # Both batches count as one step.
        (skip_steps, "planned", {"diverged_steps": 1}),
        (load_state, "planned", {"diverged_steps": 0}),
    ],
)
def test_a_loop(train: Callable[[Training], None], planner: str, expected: dict[str, int]) -> None:
    status = both(train, planner).status()
    assert {name: getattr(status, name) for name in expected} == expected


def test_a_wrapped_optimizer() -> None:
    class Wrapped:
        """As accelerate's: calls the step of the one inside."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    stock, training = Training(), Training()
    stock.steps(STEPS)
    plain, training.optimizer = training.optimizer, Wrapped(training.optimizer)  # type: ignore[assignment]
    manager = training.manage()
    training.optimizer = plain
    training.steps(STEPS)
    assert training.equals(stock)
    assert manager.status().steps == STEPS - BEFORE_PLANNED


def test_a_closure() -> None:
    def train(training: Training) -> None:
        def closure() -> torch.Tensor:
            training.optimizer.zero_grad()
            loss = training.forward()
            loss.backward()
            return loss

        for _ in range(STEPS):
            loss: Any = training.optimizer.step(closure)  # type: ignore[arg-type]
            training.losses.append(loss.item())

    stock, managed = Training(), Training()
    manager = managed.manage()
    train(stock)
    train(managed)
    assert managed.equals(stock)
    assert manager.status().state in (ManagerState.RUNNING, ManagerState.OFF)


class Reentrant(Checkpointed):
    use_reentrant = True


@pytest.mark.parametrize(
    ("model", "planner"), [(Checkpointed, "planned"), (Reentrant, "lookahead")]
)
def test_activation_checkpointing(model: type[nn.Module], planner: str) -> None:
    def train(training: Training) -> None:
        for _ in range(STEPS):
            # A reentrant checkpoint needs an input that requires gradients.
            x = training.batch().requires_grad_()
            loss = training.model(x).square().mean()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.losses.append(loss.item())

    status = both(train, planner, make_model=model).status()
    assert (status.steps, status.diverged_steps) == (STEPS - BEFORE_PLANNED, 0)


class Deep(Checkpointed):
    """So many layers that their inputs exceed the budget."""

    def __init__(self) -> None:
        super().__init__(8)


class DeepReentrant(Deep):
    """DeepReentrant checkpoints keep the inputs in their own autograd node."""

    use_reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.requires_grad_())


@pytest.mark.parametrize(
    ("model", "planners"),
    [(Deep, ("planned", "lookahead", "fault")), (DeepReentrant, ("planned",))],
)
def test_inputs_of_checkpointed_blocks_are_copied_out_and_back(
    model: type[Net], planners: tuple[str, ...]
) -> None:
    plain = Training(model)
    plain.steps(BEFORE_PLANNED + 2, rows=4)
    for planner in planners:
        managed = Training(model)
        manager = managed.manage(planner, 56 * MIB)
        managed.steps(BEFORE_PLANNED + 2, rows=4)
        assert managed.losses == plain.losses
        assert all(map(torch.equal, managed.model.parameters(), plain.model.parameters()))
        status = manager.status()
        assert (status.diverged_steps, status.wait_timeouts) == (0, 0)
        assert status.steps > 0
        assert program_of(manager).plan.copied[MODEL, 0]
        moved = manager.store.statistics
        assert moved.bytes_out == moved.bytes_in > 0
        assert moved.late_fetches == 0


class Adapter(nn.Module):
    """A frozen block with a small trained factor."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Scale().requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapter() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("planner", ["planned", "lookahead"])
def test_frozen_weights_are_never_written_back(planner: str) -> None:
    manager = both(
        lambda training: training.steps(STEPS),
        planner,
        budget_bytes=44 * MIB,
        policy="managed",
        make_model=Adapted,
    )
    predicted = manager.status().predicted
    assert predicted is not None
    frozen = [one for one in predicted.traffic if one.tensor_class is TensorClass.FROZEN_WEIGHTS]
    assert all(one.direction == "to_device" for one in frozen)
    hinted = {name for name, of in manager.engine.statistics().counts}
    assert hinted  # something moves all the same


def test_tied_weights() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.layers[0].get_parameter("weight")

    assert (
        both(lambda training: training.steps(STEPS), make_model=Tied).status().diverged_steps == 0
    )


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
def test_compiled_blocks(in_place: bool) -> None:
    def compiled() -> nn.Module:
        model = Net()
        for number, layer in enumerate(model.layers):
            if in_place:
                layer.compile(backend="aot_eager")
            else:
                model.layers[number] = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
        return model

    manager = both(lambda training: training.steps(STEPS), make_model=compiled)
    assert manager.trace is not None
    assert "backward layers.2" in manager.trace.phase_names
    assert manager.status().diverged_steps == 0
    assert manager.store.statistics.bytes_out > 0


def test_a_model_compiled_as_a_whole_is_not_managed(caplog: pytest.LogCaptureFixture) -> None:
    stock, training = Training(), Training()
    manager = training.manage()
    training.model.compile(backend="aot_eager")
    training.steps(STEPS)
    status = manager.status()
    assert status.state is ManagerState.OFF
    assert "layers one by one" in status.reason
    said = [record.getMessage() for record in caplog.records if record.name == "umem"]
    assert len(said) == 1
    assert said[0].endswith(f"new memory is mapped on the host: {status.reason}")
    stock.model.compile(backend="aot_eager")
    stock.steps(STEPS)
    assert training.equals(stock)


def test_two_models_with_nested_steps() -> None:
    """A generator and its discriminator."""

    def train(made: Training, judge: Training) -> None:
        for _ in range(STEPS):
            fake = made.model(made.batch())
            loss = judge.model(fake.detach()).square().mean()
            loss.backward()
            judge.optimizer.step()
            judge.optimizer.zero_grad()
            judge.losses.append(loss.item())
            loss = judge.model(fake).mean()
            loss.backward()
            made.optimizer.step()
            made.optimizer.zero_grad()
            judge.optimizer.zero_grad()
            made.losses.append(loss.item())

    stock, managed = (Training(), Training()), (Training(), Training())
    managers = [training.manage(budget_bytes=60 * MIB) for training in managed]
    train(*stock)
    train(*managed)
    for training, plain in zip(managed, stock, strict=True):
        assert training.equals(plain)
    for manager in managers:
        assert manager.status().state is ManagerState.RUNNING, manager.status()
        assert manager.status().steps > 0


class StopError(Exception):
    """An error of the program."""


@contextmanager
def raising(error: type[BaseException], register: Callable[[Any], Any]) -> Iterator[None]:
    """A hook of the program raises."""

    def stop(*_: object) -> None:
        raise error

    handle = register(stop)
    with pytest.raises(error):
        yield
    handle.remove()


def in_forward(training: Training, error: type[BaseException]) -> None:
    layer = training.model.get_submodule("layers.2")
    with raising(error, layer.register_forward_pre_hook):
        training.forward()


def inside_a_block(training: Training, error: type[BaseException]) -> None:
    layer = training.model.get_submodule("layers.2")
    whole = layer.forward

    def stops(x: torch.Tensor) -> torch.Tensor:
        whole(x)
        raise error

    layer.forward = stops
    with pytest.raises(error):
        training.forward()
    layer.forward = whole


def in_backward(training: Training, error: type[BaseException]) -> None:
    weight = training.model.get_parameter("layers.1.weight")
    with raising(error, weight.register_hook):
        training.forward().backward()


def in_the_optimizer(training: Training, error: type[BaseException]) -> None:
    training.forward().backward()
    with raising(error, training.optimizer.register_step_pre_hook):
        training.optimizer.step()


BROKEN = [
    (breaks, error)
    for breaks in (in_forward, inside_a_block, in_backward, in_the_optimizer)
    for error in (StopError, KeyboardInterrupt)
]
"""Steps that fail."""


@pytest.mark.parametrize("planner", ["planned", "fault"])
def test_steps_that_fail(planner: str) -> None:
    def train(training: Training) -> None:
        training.steps(BEFORE_PLANNED + 1)
        for breaks, error in BROKEN:
            breaks(training, error)
            training.optimizer.zero_grad()
            training.steps(2)

    status = both(train, planner).status()
    # A broken step never ends: it counts as one with the step after it.
    assert status.diverged_steps == len(BROKEN)
    assert status.steps == 1 + len(BROKEN)


def test_an_error_of_the_executor_does_not_end_the_training() -> None:
    stock, training = Training(), Training()
    manager = training.manage()
    training.steps(BEFORE_PLANNED + 1)

    def fails(_key: object) -> int:
        raise RuntimeError("no more")

    manager.store.send = fails  # type: ignore[method-assign, assignment]
    training.steps(3)
    assert manager.status().state is ManagerState.OFF
    assert "RuntimeError: no more" in manager.status().reason
    assert hook_count(training) == 3
    stock.steps(BEFORE_PLANNED + 4)
    assert training.equals(stock)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where one is freed
@pytest.mark.parametrize("kind", [Interrupt, Signal])
def test_an_interrupt_at_any_moment_costs_one_planned_step(
    kind: type[Interrupt | Signal],
) -> None:
    plain, managed = Training(), Training()
    manager = managed.manage("planned", TIGHT)
    for training in (plain, managed):
        training.steps(BEFORE_PLANNED + 2)
    assert program_of(manager).plan.copied
    chance, met, moments = random.Random(0), 0, 0
    while met < 10:
        fault = kind(chance.randrange(1, moments) if moments else sys.maxsize)
        try:
            with fault:
                managed.forward().backward()
        except KeyboardInterrupt:
            met += 1
            mend_torch_modes()
        else:
            moments = fault.moments  # of the last one: the longest leaves most signals too late
        managed.optimizer.zero_grad()
        before = manager.status()
        for training in (plain, managed):
            training.steps(2)
        after = manager.status()
        assert after.state is ManagerState.RUNNING, after.reason
        assert after.steps > before.steps
        assert saved_tensors.innermost() is None
    assert managed.equals(plain)
