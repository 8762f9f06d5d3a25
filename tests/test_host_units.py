"""Units that the host updates: no state on the link, and all bits are stock's whatever happens."""

from __future__ import annotations

import ctypes
import logging
import random
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from denied_pointers import can_deny_pointers
from faults import interrupt_forward_passes
from host_updates import numbered
from lazy_lanes import LazyLanes
from streamed_programs import (
    UNITS,
    WIDTH,
    Net,
    Program,
    begin,
    compare,
    interrupt_steps,
    values,
)

from umem.core.classes import TensorClass
from umem.runtime.unguarded import PastGuards, addresses_of
from umem.streaming.host_share import DeviceOptimizer, Elements, HostUpdate, Hyperparameters
from umem.streaming.stage import Lane

HOSTS: dict[str, Any] = {"hosts": UNITS - {"", "layers.0"}, "copied_gradients": UNITS}
STATE = TensorClass.OPTIMIZER_STATE


def both(eagerness: float = 0.0, **options: Any) -> tuple[Program, Program]:
    """A run whose units the host updates, and stock's, as long."""
    lanes = partial(LazyLanes, eagerness=eagerness)
    run, stock = begin(lanes=lanes, **HOSTS, **options), Program(None, **options)
    stock.step()
    return run, stock


def test_no_state_of_the_hosts_units_crosses_the_link() -> None:
    run, stock = both()
    for _ in range(3):
        run.step()
        stock.step()
    run.training.join()
    sizes = run.training.step.units.sizes()
    streamed = sum(sum(sizes[name]) for name in UNITS - HOSTS["hosts"])
    assert 0 < streamed < sum(map(sum, sizes.values()))
    assert run.lazy.copied[Lane.COPY_OUT, STATE] == 3 * streamed
    units = run.training.step.units
    trained = sum(it.nbytes for name in HOSTS["hosts"] for it in units.get(name).parameters)
    assert run.lazy.copied[Lane.WEIGHTS_OUT, TensorClass.WEIGHTS] == 3 * trained
    assert run.lazy.copied[Lane.WEIGHTS_IN, TensorClass.WEIGHTS] == 3 * trained
    assert values(run) == values(stock)


def half_net() -> Net:
    return Net().to(torch.bfloat16)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


class HalfProgram(Program):
    """The same in bfloat16, in which the norm's state is too small to move."""

    def batch(self) -> torch.Tensor:
        return super().batch().to(torch.bfloat16)


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_bfloat16(eagerness: float) -> None:
    options: Any = {"make_model": half_net, "make_optimizer": fused, "kind": HalfProgram}
    run = compare(lambda _: None, eagerness, **options, **HOSTS)
    assert run.training.counts.by_host == 4 * len(HOSTS["hosts"] - {"norm"})


def fused_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True)


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
@pytest.mark.parametrize("make_optimizer", [fused, fused_momentum])
@pytest.mark.parametrize("is_unscaled", [False, True])
def test_a_gradient_scaler_that_skips_steps(
    is_unscaled: bool, make_optimizer: Any, eagerness: float
) -> None:
    def scale(program: Program) -> None:
        program.backward_with_scaler()
        if is_unscaled:
            program.kept.unscale_(program.optimizer)
            torch.nn.utils.clip_grad_norm_(program.model.parameters(), 0.1)
        program.kept.step(program.optimizer)
        program.kept.update()
        program.seen += [it.grad.clone() for it in program.model.parameters()]

    run = compare(scale, eagerness, make_optimizer=make_optimizer, steps=5, **HOSTS)
    # Between them, steps without a scaler.
    assert run.training.counts.by_host == 11 * len(HOSTS["hosts"])


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_a_rate_in_a_tensor(eagerness: float) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True)

    def decay(program: Program) -> None:
        program.optimizer.param_groups[0]["lr"].mul_(0.7)

    run = compare(decay, eagerness, make_optimizer=make, **HOSTS)
    assert run.training.counts.by_host == 4 * len(HOSTS["hosts"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_of_another_type_are_the_devices(dtype: torch.dtype) -> None:
    """torch rounds them to the gradient's first, or not, by where they are."""

    def scale(program: Program) -> None:
        program.optimizer.zero_grad()
        program.backward()
        gradients = [it.grad for it in program.model.parameters()]
        torch._foreach_mul_(gradients, torch.tensor(0.3, dtype=dtype))
        program.optimizer.step()

    options: Any = {"make_model": half_net, "make_optimizer": fused, "kind": HalfProgram}
    run = compare(scale, **options, **HOSTS)
    # The stem's gradients come last, and are multiplied before they leave.
    assert run.training.counts.by_host == 4 * len(HOSTS["hosts"] - {"norm"}) + 3


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_writes_of_which_no_version_tells(eagerness: float) -> None:
    def clamp(program: Program) -> None:
        for parameter in program.model.parameters():
            data, version = parameter.data, parameter._version
            data.clamp_(-0.1, 0.1)
            assert parameter._version == version

    compare(clamp, eagerness, **HOSTS)


def test_a_graph_of_before_the_step_notices() -> None:
    run, _ = both()
    run.optimizer.zero_grad()
    loss = run.model.head.weight.square().sum()
    run.backward()
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class CountedBehind(LazyLanes):
    """Keeps what events behind a step carry."""

    behind: Any = None

    def count_behind(self, marked: Any, moment: Any) -> None:
        self.behind = moment


def test_an_event_behind_a_step_carries_the_hosts_updates() -> None:
    run, stock = begin(lanes=CountedBehind, **HOSTS), Program(None)
    for it in (stock, stock, run):  # a backward pass of any model waits for all updates
        it.step()

    def weights(program: Program) -> list[bytes]:
        every = list(program.model.parameters())
        pairs = zip(addresses_of(every), every, strict=True)  # past guards
        return [ctypes.string_at(address, it.nbytes) for address, it in pairs]

    assert callable(run.lazy.behind)
    assert weights(run) != weights(stock)
    run.lazy.wait(run.lazy.behind())
    assert weights(run) == weights(stock)


def test_code_that_takes_memory_and_asks_nobody_gets_an_error() -> None:
    run, _ = both()
    run.step()
    if can_deny_pointers():
        refused = pytest.raises(RuntimeError, match="past torch's operators")
        with PastGuards(), torch.no_grad(), refused:
            run.model.head.weight.sum()
    assert run.model.head.weight.sum().isfinite()  # a guard waits


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_the_device_makes_updates_that_the_host_cannot(eagerness: float) -> None:
    def refuse(program: Program) -> None:
        chance = random.Random(program.steps)
        if program.training is not None:
            program.training.step.hosts.updater.refuses = lambda: chance.random() < 0.5

    run = compare(refuse, eagerness, steps=6, **HOSTS)
    sizes = run.training.step.units.sizes()
    streamed = sum(sum(sizes[name]) for name in UNITS - HOSTS["hosts"])
    assert 0 < run.training.counts.by_host < 7 * len(HOSTS["hosts"])
    assert run.lazy.copied[Lane.COPY_OUT, STATE] > 7 * streamed  # by slots, as all others


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
@pytest.mark.parametrize("more_batches", [0, 1])
def test_gradients_that_are_added_up_at_home(more_batches: int, eagerness: float) -> None:
    """The plan may know of fewer batches."""

    def accumulate(program: Program) -> None:
        program.batches = 3 + more_batches

    run = compare(accumulate, eagerness, batches=3, adds_at_home=True, **HOSTS)
    assert run.training.counts.by_host == 4 * len(HOSTS["hosts"])


def test_tensors_for_which_the_host_has_no_room() -> None:
    run, stock = both()
    run.memory.refuses = lambda: True
    for _ in range(3):
        run.step()
        stock.step()
    assert values(run) == values(stock)


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_a_hosts_error_loses_nothing(eagerness: float, caplog: pytest.LogCaptureFixture) -> None:
    run, stock = both(eagerness)
    host, numbers = run.training.step.hosts.updater, iter(range(100))
    run.step()
    host.fails = lambda: next(numbers) % 3 == 1
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            run.step()
    for _ in range(4):
        stock.step()
    assert run.training.is_closed
    assert [it.getMessage() for it in caplog.records if "the host has failed" in it.getMessage()]
    assert values(run) == values(stock)


def test_an_error_of_the_host_with_a_scaler() -> None:
    """The device makes the update that has failed, and divides the gradient at home."""
    numbers = iter(range(100))

    def scale(program: Program) -> None:
        if program.training is not None and not program.training.is_closed:
            program.training.step.hosts.updater.fails = lambda: next(numbers) % 3 == 1
        program.optimizer.zero_grad()
        program.backward()
        program.optimizer.grad_scale = torch.tensor(4.0)
        program.optimizer.found_inf = torch.tensor(0.0)
        program.optimizer.step()
        del program.optimizer.grad_scale, program.optimizer.found_inf
        program.seen += [it.grad.clone() for it in program.model.parameters()]

    assert compare(scale, make_optimizer=fused, **HOSTS).training.is_closed


@pytest.mark.slow
def test_an_interrupt_of_a_forward_pass_changes_nothing() -> None:
    make_model = partial(Net, 1)
    run, _ = both(1.0, make_model=make_model)  # work runs when it is queued, as on a GPU
    number = interrupt_forward_passes(run, torch.ones(1, WIDTH), 3)
    stock = Program(None, make_model=make_model)
    while stock.steps < run.steps:
        stock.step()
    assert values(run) == values(stock)
    assert number > 100


@pytest.mark.slow
def test_an_interrupt_leaves_no_half_of_a_step() -> None:
    interrupt_steps(lambda: both(1.0, make_model=partial(Net, 1)), 13)


# ---------------------------------------------------------------------- the native library


class CpuDevice(DeviceOptimizer):
    """torch's kernels of the CPU, but that what is no number has the bits of a GPU."""

    def step(self, *arguments: Any) -> Elements:
        after = super().step(*arguments)
        return after._replace(weight=numbered(after.weight), first=numbered(after.first))


class LateQueue:
    """Runs an update when somebody waits for it."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.shutdown = self.thread.shutdown

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        queue = self

        class Late(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                if not self.done():
                    self.set_result(queue.thread.submit(function, *arguments).result())
                return super().result(timeout)

        return Late()


@pytest.mark.parametrize("is_late", [False, True])
def test_updates_by_the_native_library(is_late: bool) -> None:
    """With SGD, for whose kernels of the CPU there is a form, but for the bits of no number."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    run, stock = both(0.0 if is_late else 1.0, make_optimizer=make)
    update = HostUpdate.for_optimizer(run.optimizer, CpuDevice(run.optimizer, "cpu"), threads=2)
    if update is None:
        pytest.skip("this processor's kernels have no form")
    assert update.covers(Hyperparameters(run.optimizer.param_groups[0], 1), torch.float32)
    if is_late:
        update._queue = LateQueue()  # type: ignore[assignment]
    run.training.step.hosts.updater = update
    for _ in range(4):
        run.step()
        stock.step()
    assert run.training.counts.by_host == 4 * len(HOSTS["hosts"])
    assert values(run) == values(stock)
