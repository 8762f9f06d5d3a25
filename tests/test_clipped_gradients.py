"""Gradients on the host are clipped without reading them there, and no bit changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from pairs import pairs
from streamed_programs import UNITS, Net, Program, Tied, begin, compare
from torch import nn

from umem.runtime.guard import Guard, guard_of
from umem.runtime.unguarded import Unguarded
from umem.streaming.gradients import ClippedGradients
from umem.streaming.stage import Lane

SOME = frozenset(["layers.2", "layers.3", "norm", "head"])
BACK = {"head": "layers.1", "layers.3": "layers.0"}


def clip(program: Program, order: float = 2.0, most: float = 0.5) -> None:
    norm = nn.utils.clip_grad_norm_(program.model.parameters(), most, norm_type=order)
    program.seen.append(norm.clone())


def look(program: Program) -> None:
    """At each second gradient."""
    for parameter in list(program.model.parameters())[::2]:
        program.seen.append(None if parameter.grad is None else parameter.grad.clone())


def in_a_step(act: Callable[[Program], None]) -> Callable[[Program], None]:
    """A step whose program acts between the backward pass and the optimizer's step."""

    @wraps(act)
    def step(program: Program) -> None:
        program.optimizer.zero_grad()
        program.backward()
        act(program)
        program.optimizer.step()

    return step


@in_a_step
def use_between(program: Program) -> None:
    """Between clipping and the step."""
    clip(program)
    look(program)


def use_behind(program: Program) -> None:
    """Behind the step, whose updates may be under way."""
    look(program)
    clip(program, most=0.1)
    look(program)


@in_a_step
def clip_twice(program: Program) -> None:
    clip(program)
    clip(program, most=0.1)


def clip_by_other_norms(program: Program) -> None:
    for order in (float("inf"), 1.0, 2.0):
        program.optimizer.zero_grad()
        program.backward()
        clip(program, order)
        program.optimizer.step()


def clip_each_batch(program: Program) -> None:
    """Autograd adds to gradients that are still to be multiplied."""
    program.optimizer.zero_grad()
    for _ in range(2):
        program.backward()
        clip(program)
    program.optimizer.step()


def keep_adding(program: Program) -> None:
    """Steps without zero_grad()."""
    for _ in range(2):
        program.backward()
        clip(program)
        program.optimizer.step()


def zero_in_place(program: Program) -> None:
    program.optimizer.zero_grad(set_to_none=False)
    program.backward()
    clip(program)
    program.optimizer.step()
    program.optimizer.zero_grad(set_to_none=False)


@in_a_step
def scale_by_lists(program: Program) -> None:
    """As a loop of its own, by numbers and by a tensor that it changes behind."""
    gradients = [it.grad for it in program.model.parameters() if it.grad is not None]
    half = torch.tensor(0.5)
    torch._foreach_mul_(gradients, half)
    half.zero_()
    torch._foreach_mul_(gradients, 3)
    torch._foreach_mul_(gradients, [0.7] * len(gradients))
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64)
    program.seen.append([it.clone() for it in norms])


@in_a_step
def write_to_a_norm(program: Program) -> None:
    gradients = [it.grad for it in program.model.parameters() if it.grad is not None]
    for norm in torch._foreach_norm(gradients, 2.0):
        norm.zero_()
    clip(program)


@in_a_step
def swap_gradients(program: Program) -> None:
    """Two parameters exchange their gradients behind clipping."""
    clip(program)
    a, b = program.model.layers[2].weight, program.model.layers[3].weight
    a.grad, b.grad = b.grad, a.grad


@in_a_step
def drop_gradients(program: Program) -> None:
    clip(program)
    program.model.layers[3].weight.grad = None


def ask_for_another_norm_meanwhile(program: Program) -> None:
    """Of a gradient that has left, while others are on their way with norms of the usual order."""
    orders = (float("inf"), 2.0)

    def ask(_: nn.Parameter) -> None:
        gradient = program.model.head.weight.grad
        if gradient is not None:
            program.seen += [it.clone() for it in torch._foreach_norm([gradient], orders[0])]

    if program.is_first("hook"):
        program.model.layers[0].weight.register_post_accumulate_grad_hook(ask)
    for order in orders:
        program.optimizer.zero_grad()
        program.backward()
        clip(program, orders[0])
        program.optimizer.zero_grad()
        program.backward()
        clip(program, order)
        program.optimizer.step()


@in_a_step
def differentiate_norms(program: Program) -> None:
    """A list of gradients and of what has a graph."""
    gradient = program.model.layers[3].weight.grad
    weight = program.model.layers[2].weight
    norms = torch._foreach_norm([gradient, weight], 2.0)
    program.seen.append(torch.autograd.grad(norms[1], weight)[0])


@in_a_step
def copy_gradients(program: Program) -> None:
    """What a deep copy, a view or another name has is the clipped gradient."""
    clip(program)
    gradient: Any = program.model.layers[3].weight.grad
    program.seen += [copy.deepcopy(gradient), gradient.detach().clone(), gradient[0].clone()]


CHANGES = [
    *(use_between, use_behind, clip_twice, clip_by_other_norms, clip_each_batch, keep_adding),
    *(zero_in_place, scale_by_lists, write_to_a_norm, swap_gradients, drop_gradients),
    *(copy_gradients, ask_for_another_norm_meanwhile, differentiate_norms),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "copies", "eagerness"),
    pairs(CHANGES, [(UNITS, {}), (UNITS, BACK), (SOME, {})], [0.0, 0.8]),
)
def test_no_bit_changes(
    change: Callable[[Program], None],
    copies: tuple[frozenset[str], dict[str, str]],
    eagerness: float,
) -> None:
    copied, returning = copies
    compare(change, eagerness, copied_gradients=copied, returning=returning)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options", "resident"),
    pairs(
        [keep_adding, clip_each_batch],
        [{"batches": 2}, {"most_buffers": 2}, {"make_model": Tied}],
        [frozenset(), frozenset(["head", "layers.0"])],
    ),
)
def test_no_bit_changes_in_other_programs(
    change: Callable[[Program], None], options: dict[str, Any], resident: frozenset[str]
) -> None:
    compare(change, 0.5, copied_gradients=UNITS, resident=resident, **options)


class TwoStreams(LazyLanes):
    """Lanes of a program that says which of its streams is the current one."""

    current = 0

    def stream_key(self) -> int:
        return self.current


def test_a_norm_is_for_the_stream_that_owns_its_memory() -> None:
    """Another stream may still read it when the program has freed it."""
    lanes = TwoStreams(Net())
    clipped = ClippedGradients(lanes)
    first, second = torch.ones(4), torch.ones(4)
    clipped.keep(first, None, lanes.mark(), lanes.mark(), lanes.current)
    torch._foreach_norm([first], 2.0)  # so it is known which norm the program asks for
    (norm,) = clipped.norms([second])
    assert norm is not None
    clipped.keep(second, norm, lanes.mark(), lanes.mark(), lanes.current)
    lanes.current = 1
    assert torch._foreach_norm([second], 2.0)[0] is not norm.value


def void(_: object) -> None:
    """Have no result."""


USES: list[Callable[[torch.Tensor], Any]] = [
    lambda it: it.clone(),
    lambda it: torch._foreach_norm([it], 2.0)[0],
    lambda it: (torch._foreach_mul_([it], 3.0), it)[1],
]


@pytest.mark.parametrize("use", USES)
def test_another_stream_waits_for_the_copy(use: Callable[[torch.Tensor], Any]) -> None:
    """It may be behind the backward pass alone, and so may a third one, which no guard tells of."""
    lanes = TwoStreams(Net())
    clipped = ClippedGradients(lanes)
    gradient, home = torch.ones(4), torch.zeros(4)
    data = home.detach()  # which no guard has
    arrival = lanes.run(Lane.COPY_OUT, lambda: void(data.fill_(2.0)))
    clipped.keep(home, None, lanes.mark(), arrival, lanes.current)
    lanes.current = 1
    expected = use(gradient.fill_(2.0))
    found = use(home)
    assert lanes.open_tasks == 0
    assert guard_of(home) is None
    assert torch.equal(home, gradient)
    assert torch.equal(found, expected)


class Halves(Net):
    """A block in another precision, whose gradients are in lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for layer in self.layers:
            weight: Any = layer.weight
            x = x + torch.tanh(layer(x.to(weight.dtype))).float()
        return self.head(self.norm(x))


def test_two_precisions() -> None:
    compare(use_between, make_model=Halves, copied_gradients=UNITS)


def test_a_plan_changes_between_the_step_and_the_next_batch() -> None:
    def change(program: Program) -> None:
        if program.training is not None:
            program.training.gradients.set_plan(SOME if program.is_first(change) else UNITS)
        keep_adding(program)

    compare(change, 0.5, copied_gradients=UNITS)


def at_home(gradient: torch.Tensor) -> torch.Tensor:
    """What is in its memory, past the guard."""
    with Unguarded():
        return gradient.detach().clone()


def test_clipping_and_the_step_leave_gradients_as_they_are() -> None:
    program = begin(1, copied_gradients=UNITS)  # a step in which the program asks for norms
    program.optimizer.zero_grad()
    program.backward()
    program.training.gradients.settle()
    gradients = [it.grad for it in program.model.parameters()]
    norms = []
    with Unguarded():
        large = [it for it in gradients if program.memory.was_sent_home(it)]
        assert len(large) > 8
        for gradient in large:  # nothing may read them: their norms are known
            norms.append(gradient.norm())
            gradient.data.zero_()
    found = nn.utils.clip_grad_norm_(program.model.parameters(), 1e-3)
    assert found > torch.stack(norms).max()
    assert all(at_home(it).eq(0).all() for it in large)


def test_a_gradient_on_the_host_has_its_clipped_value_when_something_looks() -> None:
    program = begin(2, copied_gradients=UNITS)
    gradient: Any = program.model.layers[3].weight.grad
    before = at_home(gradient)
    assert not torch.equal(before, gradient)
    # Now it has it in memory too.
    assert torch.equal(at_home(gradient), gradient)
    assert guard_of(gradient) is None


def test_a_factor_that_is_guarded_is_waited_for() -> None:
    def settle() -> None:
        factor.fill_(3.0)
        guard.release()

    gradient, factor, guard = torch.ones(4), torch.tensor(2.0), Guard(settle)
    lanes = LazyLanes(Net())
    clipped = ClippedGradients(lanes)
    clipped.keep(gradient, None, lanes.mark(), lanes.mark(), lanes.stream_key())
    guard.hold([factor])
    torch._foreach_mul_([gradient], factor)
    assert clipped.is_held(gradient)
    assert gradient.tolist() == [3.0] * 4


@pytest.mark.parametrize("eagerness", [0.0, 0.8])
def test_a_norm_is_not_of_gradients_before_they_are_unscaled(eagerness: float) -> None:
    """A gradient scaler's operator counts no version."""

    @in_a_step
    def unscale_and_clip(program: Program) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(program.optimizer)
        clip(program, most=0.01)

    compare(unscale_and_clip, eagerness, copied_gradients=UNITS)
