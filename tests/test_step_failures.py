"""Memory that is refused, and errors, in the middle of a streamed step: never another value.

Lanes run on the CPU, late. A refusal is what the memory of a GPU answers where the card or the host
has no more. Errors come from the lanes, where a driver's calls would raise them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from faults import Interrupt, interrupt_forward_passes
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_lanes import LazyLanes
from streamed_programs import (
    UNITS,
    WIDTH,
    Net,
    NetWithFlat,
    Program,
    bits,
    compare,
    interrupt_steps,
    values,
)
from streamed_programs import begin as begin_program
from torch import nn

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.streaming.stage import Copy, CudaStateMemory, Lane
from umem.streaming.step import StreamedStep

TOO_MUCH = 1 << 60


class TestMemoryOfAGpu:
    """`CudaStateMemory` over torch's allocator of the CPU, which refuses what no machine has."""

    @pytest.fixture
    def allocator(self) -> Allocator:
        allocator = Allocator.on_host(Config([ClassSetting()] * len(TensorClass)))
        allocator.set_phase(TensorClass.OPTIMIZER_STATE.number)
        return allocator

    @pytest.fixture
    def memory(self, allocator: Allocator) -> CudaStateMemory:
        return CudaStateMemory(torch.device("cpu"), allocator, 1, 1)

    def test_a_refused_buffer_is_none(self, memory: CudaStateMemory) -> None:
        assert memory.buffer(TOO_MUCH) is None

    def test_a_refused_home_is_none_with_one_notice(
        self, memory: CudaStateMemory, caplog: pytest.LogCaptureFixture
    ) -> None:
        large = torch.empty(1).expand(TOO_MUCH)
        for _ in range(2):
            assert memory.new_home(large, TensorClass.GRADIENTS) is None
            assert memory.new_on_device(large, TensorClass.GRADIENTS) is None
        assert len(caplog.records) == 1

    def test_a_refusal_leaves_the_class_of_what_comes(
        self, memory: CudaStateMemory, allocator: Allocator
    ) -> None:
        memory.buffer(TOO_MUCH)
        assert allocator.phase() == TensorClass.OPTIMIZER_STATE.number

    def test_any_other_error_is_raised(self, memory: CudaStateMemory) -> None:
        with pytest.raises(RuntimeError):
            memory.buffer(-1)


# ------------------------------------------------------------------ memory is refused


def refuse(program: Program, numbers: Callable[[int], bool], asked: list[bool]) -> None:
    """Refuse the requests of these numbers, from now on. `asked` has what became of each."""

    def refuses() -> bool:
        asked.append(numbers(len(asked)))
        return asked[-1]

    if program.memory is not None:
        program.memory.refuses = refuses


def change_plan(program: Program) -> None:
    """State comes to the device, and leaves it."""
    if program.training is not None:
        resident = {"layers.0", "head", ""} if program.steps % 2 else {"stem", "layers.1"}
        program.training.step.units.set_plan(frozenset(resident), 1 + program.steps % 3)
        program.training.gradients.set_plan(UNITS, {"head": "layers.0"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_model", "every"), [(partial(Net, 1), 1), (partial(NetWithFlat, 1), 3)]
)
def test_each_request_may_be_refused(make_model: Callable[[], nn.Module], every: int) -> None:
    def run(program: Program, number: int, asked: list[bool]) -> None:
        refuse(program, lambda it: it == number, asked)
        for _ in range(3):
            change_plan(program)
            program.step()

    expected = Program(None, make_model=make_model).run(lambda it: run(it, -1, []), steps=1)
    number, most = 0, 1
    while number < most:
        asked: list[bool] = []
        program = Program(LazyLanes, make_model=make_model, copied_gradients=UNITS)
        found = program.run(partial(run, number=number, asked=asked), steps=1)
        assert bits(found) == bits(expected), number
        most = len(asked)
        assert sum(asked) == (number < most)
        number += every
    assert number > 50


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
    eagerness=st.sampled_from([0.0, 0.8]),
    streams_weights=st.booleans(),
    make_model=st.sampled_from([Net, NetWithFlat]),
)
def test_any_requests_may_be_refused(
    share: float,
    seed: int,
    eagerness: float,
    streams_weights: bool,
    make_model: Callable[[], nn.Module],
) -> None:
    chance = random.Random(seed)

    def change(program: Program) -> None:
        refuse(program, lambda _: chance.random() < share, [])
        change_plan(program)

    compare(
        change,
        eagerness,
        seed,
        make_model=make_model,
        streams_weights=streams_weights,
        copied_gradients=UNITS,
    )


def test_gradients_stay_if_the_host_has_no_more() -> None:
    program = begin_program(copied_gradients=UNITS)
    program.memory.refuses = lambda: True
    program.optimizer.zero_grad()
    program.backward()
    training = program.training
    assert training is not None
    training.join()
    assert training.gradients.copied == frozenset()
    gradients = [it.grad for it in program.model.parameters()]
    assert not any(map(program.memory.was_sent_home, gradients))


# ------------------------------------------------------------------ a step raises


class DriverError(RuntimeError):
    """As of a call of CUDA."""


class FailingLanes(LazyLanes):
    """The call of `run` or `copy` with this number raises, once."""

    fails_at = -1
    calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise DriverError("unspecified launch failure")

    def run(self, lane: Lane, *arguments: Any) -> Any:
        self._call()
        return super().run(lane, *arguments)

    def copy(self, lane: Lane, copies: Sequence[Copy], tensor_class: TensorClass) -> None:
        self._call()
        super().copy(lane, copies, tensor_class)


# Work runs when it is queued, as on a GPU.
begin = partial(begin_program, 4, lambda model: FailingLanes(model, 1.0), clips=False)


def load(program: Program, checkpoint: tuple[Any, Any]) -> None:
    program.model.load_state_dict(checkpoint[0])
    program.optimizer.load_state_dict(checkpoint[1])


def stock(steps: int, **options: Any) -> Program:
    """A program behind so many steps, of which nothing is streamed."""
    program = Program(None, clips=False, **options)
    for _ in range(steps):
        program.step()
    return program


@pytest.mark.slow
@pytest.mark.parametrize(("make_model", "every"), [(partial(Net, 1), 1), (NetWithFlat, 13)])
def test_no_error_of_the_lanes_reaches_the_program(
    make_model: Callable[[], nn.Module], every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What was not queued is updated in place, once, and the training goes on as without umem."""
    expected = stock(7, make_model=make_model)
    number, has_failed = 0, True
    while has_failed:
        program = begin(make_model=make_model)
        lanes = program.lazy
        caplog.clear()
        lanes.calls, lanes.fails_at = 0, number
        for _ in range(2):
            program.step()
        has_failed, lanes.fails_at = lanes.calls > number, -1
        assert values(program) == values(expected), number
        assert [it.levelname for it in caplog.records] == ["WARNING"] * has_failed, number
        assert program.training.is_closed == has_failed
        number += every
    assert number > 100


@pytest.mark.slow
def test_no_unit_is_updated_twice_behind_an_error_in_a_backward_pass() -> None:
    make_model = partial(Net, 1)
    expected = stock(5, make_model=make_model)
    # Of the other program: a use of the state would leave its updates to the next step().
    checkpoint = copy.deepcopy((expected.model.state_dict(), expected.optimizer.state_dict()))
    expected.step()
    number = refused = 0
    has_failed = True
    while has_failed:
        program = begin(make_model=make_model, in_backward=True)
        lanes = program.lazy
        lanes.calls, lanes.fails_at = 0, number
        try:
            program.optimizer.zero_grad()
            program.backward()
            program.optimizer.step()
        except DriverError:
            before = len(program.seen)
            try:
                program.optimizer.step()
            except PlanError:
                refused += 1
                load(program, copy.deepcopy(checkpoint))  # the optimizer takes its tensors
                program.steps -= 1
                program.step()
            del program.seen[before:]
        has_failed, lanes.fails_at = lanes.calls > number, -1
        assert values(program) == values(expected), number
        number += 1
    assert refused > 10


# ------------------------------------------------------------------ Ctrl-C


@pytest.mark.slow
def test_an_interrupt_of_a_forward_pass_changes_nothing() -> None:
    """Wherever it comes while updates are waited for, the program may go on."""
    make_model = partial(Net, 1)
    program = begin(make_model=make_model)
    number = interrupt_forward_passes(program, torch.ones(1, WIDTH))
    program.seen.clear()
    program.step()
    expected = stock(program.steps, make_model=make_model)
    assert values(program) == values(expected)
    assert number > 100


@pytest.mark.slow
def test_an_interrupt_while_slots_are_taken_changes_nothing() -> None:
    """A piece of state whose slot is another one now must not be updated in the old one."""
    program = begin()
    number, is_interrupted = 0, True
    while is_interrupted:
        program.training.step.units.set_plan(frozenset(), 1 + program.steps % 3)
        try:
            with Interrupt(number):
                program.training.step.lay_out(program.optimizer)
        except KeyboardInterrupt:
            number += 3  # all of them take minutes
        else:
            is_interrupted = False
        program.step()
    expected = stock(program.steps)
    assert values(program) == values(expected)
    assert number > 100


@pytest.mark.slow
def test_an_interrupt_leaves_no_half_of_a_step() -> None:
    """All parameters are updated behind it, or none is."""

    def begin_both() -> tuple[Program, Program]:
        make_model = partial(Net, 1)
        return begin(make_model=make_model), stock(5, make_model=make_model)

    interrupt_steps(begin_both, 19)


def test_an_interrupt_behind_umems_part_of_a_step_leaves_no_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters whose state is too small to be streamed are updated too."""
    program = begin()
    expected = stock(6)
    step = StreamedStep.step

    def interrupted(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        raise KeyboardInterrupt

    program.optimizer.zero_grad()
    program.backward()
    monkeypatch.setattr(StreamedStep, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        program.optimizer.step()
    assert values(program) == values(expected)


@pytest.mark.slow
def test_behind_an_interrupt_of_a_step_a_checkpoint_can_be_loaded() -> None:
    make_model = partial(Net, 1)
    program = begin(make_model=make_model)
    number, is_interrupted = 0, True
    while is_interrupted:
        checkpoint = copy.deepcopy((program.model.state_dict(), program.optimizer.state_dict()))
        steps = program.steps
        change_plan(program)
        program.backward()
        try:
            with Interrupt(number):
                program.optimizer.step()
        except KeyboardInterrupt:
            number += 29  # all of them take minutes
        else:
            is_interrupted = False
        program.optimizer.step()
        load(program, checkpoint)
        program.steps = steps
        program.step()
    expected = stock(program.steps, make_model=make_model)
    assert values(program) == values(expected)
    assert number > 500
