"""A step in the backward pass gives the bits of the plain one, or an error before they differ."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory, LazyLanes
from pairs import pairs
from rank_processes import one_rank
from streamed_programs import (
    EAGERNESS,
    UNITS,
    WATCHED,
    Net,
    Program,
    begin,
    bits,
    compare,
    nothing,
)
from torch import nn

import umem
from umem.core.errors import PlanError
from umem.streaming import StreamedTraining
from umem.streaming.gradients import is_freed
from umem.streaming.stage import HostLanes

Change = Callable[[Program], None]


def run(change: Change = nothing, eagerness: float = 0.0, **program: Any) -> Any:
    """Run a program both ways, whose units are updated in the backward pass."""
    asked = {"clips": False, "plain": WATCHED, "in_backward": True, "seed": 7, **program}
    return compare(change, eagerness, **asked)


def name_of(value: Any) -> str | None:
    return getattr(value, "__name__", None)


def begun() -> Any:
    """A program whose units are updated in the backward pass."""
    made = begin(WATCHED, in_backward=True, clips=False)
    assert updates(made) > 0
    return made


def updates(program: Program) -> int:
    """Units that were updated in the backward pass."""
    return program.training.counts.ahead


# ------------------------------------------------------------------ what is exact


OPTIMIZERS: list[Any] = [
    pytest.param(lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True), id="fused"),
    pytest.param(lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True, amsgrad=True), id="each"),
    pytest.param(lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9), id="momentum"),
    pytest.param(lambda ps: torch.optim.NAdam(ps, lr=1e-2), id="nadam"),
    pytest.param(lambda ps: torch.optim.ASGD(ps, lr=1e-2), id="asgd"),
    pytest.param(lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), foreach=False), id="lr"),
]


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_optimizers(make_optimizer: Callable[[Any], Any], eagerness: float) -> None:
    assert updates(run(eagerness=eagerness, make_optimizer=make_optimizer)) > 0


def test_state_that_is_not_there_is_left_to_the_step() -> None:
    streamed = run(make_optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-2))
    assert updates(streamed) == 0
    assert not streamed.training.status().step_in_backward


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize("resident", [["head", "layers.1"], sorted(UNITS)])
def test_resident_state_is_updated_there_too(resident: list[str], eagerness: float) -> None:
    steps = WATCHED - 2 + 4
    updated = updates(run(eagerness=eagerness, resident=frozenset(resident)))
    assert updated == len(UNITS) * steps


def test_a_new_plan_moves_state_while_there_are_no_gradients() -> None:
    """Resident state has the room of gradients that the backward pass frees."""

    def plan(program: Program) -> None:
        if program.training is not None and updates(program):
            units = program.training.step.units
            changed = frozenset(sorted(UNITS)[len(program.seen) % 2 :: 2])
            units.set_plan(changed, 2)
            before = updates(program)
            passes(program)
            assert updates(program) == before + len(UNITS)
            program.optimizer.step()
        else:
            passes(program)
            program.optimizer.step()

    assert updates(run(plan)) > 0


def test_weights_that_a_graph_keeps_wait_for_the_step() -> None:
    class Late(Net):
        """The gradient of the stem comes from weights of the head, long after the head's own."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x) @ self.head.weight.detach().t() @ self.head.weight.detach()
            return self.head(self.norm(x + torch.tanh(self.layers[0](x))))

    assert updates(run(make_model=Late)) > 0


def test_a_weight_that_the_backward_pass_reads_later_is_seen_in_the_watched_steps() -> None:
    class Custom(Net):
        """Its first operator reads the head's weights in the backward pass, frozen for it."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.head.weight.requires_grad_(False)
            x = (self.stem(x)[:, None] * weight).sum(1)
            weight.requires_grad_(True)
            return super().forward(x)

    with pytest.raises(PlanError, match="weights are used between"):
        run(
            make_model=Custom,
            make_optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
        )


def twice_through_one_graph(program: Program) -> None:
    program.optimizer.zero_grad()
    loss = program.model(program.batch()).square().mean()
    program.seen.append(torch.autograd.grad(loss, program.model.stem.weight, retain_graph=True))
    loss.backward(retain_graph=True)
    program.optimizer.step()


def a_pass_for_inputs_only(program: Program) -> None:
    program.optimizer.zero_grad()
    batch = program.batch().requires_grad_()
    program.model(batch).sum().backward(inputs=[batch])
    program.seen.append(batch.grad)


def dropped_behind_the_forward_pass(program: Program) -> None:
    loss = program.model(program.batch()).square().mean()
    program.optimizer.zero_grad()
    loss.backward()
    program.optimizer.step()


def several_passes_forward(program: Program) -> None:
    program.optimizer.zero_grad()
    loss = program.model(program.batch()).mean() + program.model(program.batch()).square().mean()
    loss.backward()
    program.optimizer.step()


def a_failed_forward_and_a_failed_backward(program: Program) -> None:
    """Before any unit is updated nothing happens."""

    def fail(_gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    program.optimizer.zero_grad()
    y = program.model(program.batch())
    y.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        y.sum().backward()


def one_parameter_is_unused(program: Program) -> None:
    program.optimizer.zero_grad()
    y = nn.functional.linear(program.model.stem(program.batch()), program.model.head.weight)
    (y.square().mean() + program.model(program.batch()).mean() * 0).backward()
    program.optimizer.step()


def parts_of_a_unit(program: Program) -> None:
    """One gradient arrives several times before the other one of its unit."""
    program.optimizer.zero_grad()
    program.model(program.batch())
    layer = program.model.layers[0]
    for _ in range(2):
        layer.weight.square().sum().backward()
    layer.bias.square().sum().backward()
    program.optimizer.step()


def gradient_of_a_frozen_weight(program: Program) -> None:
    """A unit is updated partly in the backward pass, and partly by the step."""
    layer = program.model.layers[0]
    layer.bias.requires_grad_(False)
    program.optimizer.zero_grad()
    program.model(program.batch()).square().mean().backward()
    if program.steps > 4:  # behind the steps that are watched
        layer.bias.grad = torch.ones(16)
    program.optimizer.step()
    umem.join()
    assert {type(it) for it in program.model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("eagerness", EAGERNESS)
def test_a_unit_in_two_parts(eagerness: float) -> None:
    assert updates(run(gradient_of_a_frozen_weight, eagerness, plain=0)) >= 8


def change_a_gradient_that_was_kept(program: Program) -> None:
    """A hook before umem's keeps a reference, which the program uses before the step."""
    program.optimizer.zero_grad()
    program.model(program.batch()).square().mean().backward()
    program.kept[-1].mul_(0.5)
    program.optimizer.step()


def keep_gradients(program: Program) -> None:
    """Keep each gradient of one weight, from before umem streams."""
    program.kept = []
    program.model.head.weight.register_post_accumulate_grad_hook(
        lambda parameter: program.kept.append(parameter.grad)
    )


@pytest.mark.parametrize("eagerness", EAGERNESS)
def test_a_gradient_that_the_program_holds_waits_for_the_step(eagerness: float) -> None:
    streamed = run(change_a_gradient_that_was_kept, eagerness, prepare=keep_gradients)
    assert updates(streamed) >= 8


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize(
    "use",
    [
        *(twice_through_one_graph, a_pass_for_inputs_only, several_passes_forward),
        *(a_failed_forward_and_a_failed_backward, one_parameter_is_unused),
        *(dropped_behind_the_forward_pass, parts_of_a_unit),
    ],
    ids=name_of,
)
def test_other_backward_passes(use: Change, eagerness: float) -> None:
    assert updates(run(use, eagerness)) >= 8


@pytest.mark.parametrize("eagerness", EAGERNESS)
def test_hooks_and_schedulers_see_the_optimizer(eagerness: float) -> None:
    def watch(program: Program) -> None:
        if program.is_first(watch):
            program.kept = torch.optim.lr_scheduler.ExponentialLR(program.optimizer, 0.7)

            def see(optimizer: torch.optim.Optimizer, *_: object) -> None:
                every = [it for group in optimizer.param_groups for it in group["params"]]
                program.seen.append([it.detach().clone() for it in every])
                program.seen.append(copy.deepcopy(optimizer.state_dict()))

            program.optimizer.register_step_pre_hook(
                lambda optimizer, *_: program.seen.append(len(optimizer.param_groups[0]["params"]))
            )
            program.optimizer.register_step_post_hook(see)
        program.kept.step()

    assert updates(run(watch, eagerness)) >= 8


def test_gradients_are_freed_within_the_backward_pass() -> None:
    program = begun()
    seen: list[int] = []

    def count(_gradient: torch.Tensor) -> None:
        gc.collect()
        found = [it.grad for it in program.model.parameters()]
        seen.append(sum(map(is_freed, found)))

    program.model.scale.register_hook(count)  # among the last
    program.step()
    assert seen[-1] > len(list(program.model.parameters())) // 2
    freed = program.model.head.weight.grad
    assert (freed.shape, freed.dtype) == ((4, 16), torch.float32)
    assert set(freed.stride()) == {0}  # it has one element of memory
    program.optimizer.zero_grad()
    assert program.model.head.weight.grad is None


# ------------------------------------------------------------------ what is refused


def passes(program: Program) -> torch.Tensor:
    """Forward and backward pass."""
    program.optimizer.zero_grad()
    loss: torch.Tensor = program.model(program.batch()).square().mean()
    loss.backward()
    return loss


def between(act: Change) -> Change:
    """A step whose program acts between the backward pass and the optimizer's step."""

    @wraps(act)
    def step(program: Program) -> None:
        passes(program)
        act(program)
        program.optimizer.step()

    return step


@between
def clip(program: Program) -> None:
    nn.utils.clip_grad_norm_(program.model.parameters(), 0.5)


@between
def clip_values(program: Program) -> None:
    nn.utils.clip_grad_value_(program.model.parameters(), 1e-3)


@between
def log_norms(program: Program) -> None:
    program.seen.append([it.grad.norm() for it in program.model.parameters()])


@between
def read_weights(program: Program) -> None:
    program.seen.append(program.model.head.weight.sum().item())


@between
def read_state(program: Program) -> None:
    program.seen.append(copy.deepcopy(program.optimizer.state_dict()))


@between
def evaluate_between(program: Program) -> None:
    with torch.no_grad():
        program.seen.append(program.model(torch.ones(2, 16)))


@between
def change_the_rate_between(program: Program) -> None:
    program.optimizer.param_groups[0]["lr"] *= 0.5


@between
def change_the_decay_between(program: Program) -> None:
    program.optimizer.param_groups[0]["weight_decay"] = 0.3


def schedule_between(program: Program) -> None:
    if program.kept is None:
        program.kept = torch.optim.lr_scheduler.ExponentialLR(program.optimizer, 0.7)
    passes(program)
    program.kept.step()
    program.optimizer.step()


@between
def accumulate(program: Program) -> None:
    program.model(program.batch()).square().mean().backward()


def skip_for_a_loss(program: Program) -> None:
    loss = passes(program) * float("nan")
    if not loss.isnan():
        program.optimizer.step()


@between
def drop_gradients(program: Program) -> None:
    program.optimizer.zero_grad()


@between
def exchange_gradients(program: Program) -> None:
    one, other = program.model.layers[0].weight, program.model.layers[1].weight
    one.grad, other.grad = other.grad, one.grad


@between
def replace_gradients(program: Program) -> None:
    for parameter in program.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def scale(program: Program) -> None:
    if program.kept is None:
        program.kept = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    program.optimizer.zero_grad()
    program.kept.scale(program.model(program.batch()).square().mean()).backward()
    program.kept.step(program.optimizer)
    program.kept.update()
    program.seen.append(program.kept.get_scale())


def use_a_closure(program: Program) -> None:
    def closure() -> torch.Tensor:
        return passes(program)

    program.seen.append(program.optimizer.step(closure).detach())


@between
def clear_state_between(program: Program) -> None:
    program.optimizer.state.clear()


@between
def replace_state_between(program: Program) -> None:
    values = program.optimizer.state[program.model.head.weight]
    values["exp_avg"] = torch.ones(4, 16)


def fail_late(program: Program) -> None:
    """The backward pass ends when some units are updated already."""

    def fail(_gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    handle = program.model.stem.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        passes(program)
    handle.remove()


def fail_and_go_on(program: Program) -> None:
    fail_late(program)
    program.step()


def read_later_in_the_pass(program: Program) -> None:
    """A hook reads weights whose update the same backward pass has queued."""
    if program.is_first(read_later_in_the_pass):
        program.model.stem.weight.register_hook(
            lambda _: program.seen.append(program.model.head.weight.detach().clone())
        )


@between
def keep_gradients_of_a_pass(program: Program) -> None:
    """A hook behind umem's uses the gradient that has just been used."""
    for parameter in program.model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)


def halve(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


BETWEEN = [
    *(clip, clip_values, log_norms, read_weights, read_state, evaluate_between, accumulate),
    *(change_the_rate_between, change_the_decay_between, schedule_between, skip_for_a_loss),
    *(drop_gradients, replace_gradients, exchange_gradients, scale, use_a_closure),
    clear_state_between,
    *(replace_state_between, fail_and_go_on, read_later_in_the_pass, keep_gradients_of_a_pass),
]


@pytest.mark.parametrize(
    ("use", "plain", "eagerness"), pairs(BETWEEN, [0, WATCHED], EAGERNESS), ids=name_of
)
def test_what_stands_between_backward_and_step(use: Change, plain: int, eagerness: float) -> None:
    """In the watched steps, and when units are updated in the backward pass."""
    with pytest.raises(PlanError, match="without step_in_backward"):
        run(use, eagerness, plain=plain)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (clip, r"used between backward\(\) and step\(\) at .*test_backward_updates.py:\d+"),
        (scale, "gradient scaler"),
        (accumulate, "forward pass begins behind backward"),
        (change_the_rate_between, "hyperparameters"),
        (drop_gradients, "dropped"),
        (use_a_closure, "closure"),
    ],
    ids=name_of,
)
def test_the_watched_steps_say_why_and_change_nothing(use: Change, reason: str) -> None:
    streamed = begin(in_backward=True, clips=False)
    before = copy.deepcopy(streamed.model.state_dict())
    with pytest.raises(PlanError, match=reason):
        use(streamed)
    assert updates(streamed) == 0
    assert bits(streamed.model.state_dict()) == bits(before)


def test_an_optimizer_that_was_refused_once_stays_refused() -> None:
    program = begin(in_backward=True)
    for _ in range(2):
        with pytest.raises(PlanError, match="used between"):
            program.step()
    program.training.close()
    program.step()


@pytest.mark.parametrize("eagerness", EAGERNESS)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_loading_state_is_the_way_out(eagerness: float, optimizer_first: bool) -> None:
    def recover(program: Program) -> None:
        saved = copy.deepcopy((program.model.state_dict(), program.optimizer.state_dict()))
        fail_late(program)
        load(program, saved, optimizer_first)
        program.seen.append(copy.deepcopy(program.model.state_dict()))
        program.step()

    assert updates(run(recover, eagerness)) >= 8


def load(program: Program, state: tuple[Any, Any], optimizer_first: bool) -> None:
    parts = [(program.model, state[0]), (program.optimizer, state[1])]
    for part, values in reversed(parts) if optimizer_first else parts:
        part.load_state_dict(values)


def load_behind_an_error(program: Program, *, optimizer_first: bool, is_refused: bool) -> None:
    """Load the state from before a backward pass that has failed."""
    saved = copy.deepcopy((program.model.state_dict(), program.optimizer.state_dict()))
    fail_late(program)
    if is_refused and not program.is_stock:
        with pytest.raises(PlanError, match="without step_in_backward"):
            program.step()
    load(program, saved, optimizer_first)
    program.seen.clear()


@pytest.mark.parametrize(
    ("watched", "is_refused", "optimizer_first", "eagerness"),
    pairs([0, 1], [False, True], [False, True], EAGERNESS),
)
def test_loading_state_is_the_way_out_of_the_watched_steps(
    watched: int, is_refused: bool, optimizer_first: bool, eagerness: float
) -> None:
    """The training goes on as stock's from there, and its steps are watched again."""
    stock = Program(None, clips=False)
    streamed = Program(lambda it: LazyLanes(it, eagerness), in_backward=True, clips=False)
    for it in (stock, streamed):
        it.step()
        it.stream()
        for _ in range(watched):
            it.step()
        load_behind_an_error(it, optimizer_first=optimizer_first, is_refused=is_refused)
        it.steps = 0
        for _ in range(2):
            it.step()
        assert it.is_stock or updates(it) == 0
        for _ in range(2):
            it.step()
    assert updates(streamed) > 0
    found, expected = (
        bits([it.seen, it.model.state_dict(), it.optimizer.state_dict()])
        for it in (streamed, stock)
    )
    assert found == expected


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_loading_a_part_is_no_way_out_of_the_watched_steps(part: str) -> None:
    program = begin(in_backward=True, clips=False)
    saved = copy.deepcopy(getattr(program, part).state_dict())
    fail_late(program)
    getattr(program, part).load_state_dict(saved)
    with pytest.raises(PlanError, match="without step_in_backward"):
        program.step()


def test_loading_a_part_is_no_way_out() -> None:
    program = begun()
    saved = copy.deepcopy(program.model.state_dict())
    fail_late(program)
    with pytest.raises(PlanError, match="lacks weights"):
        program.model.load_state_dict({"scale": saved["scale"]}, strict=False)
    program.model.load_state_dict(saved)
    with pytest.raises(PlanError, match="behind backward"):
        program.model(program.batch())
    with pytest.raises(PlanError, match="only the state of the model"):
        program.optimizer.step()


def test_close_waits_for_the_step() -> None:
    program = begun()
    passes(program)
    with pytest.raises(PlanError, match="close"):
        program.training.close()
    program.optimizer.step()
    program.training.close()
    assert all(type(it) is nn.Parameter for it in program.model.parameters())
    program.step()


def test_a_training_that_streams_already_may_move_its_step() -> None:
    def move(program: Program) -> None:
        if program.training is not None:
            program.training.move_into_backward()

    assert updates(compare(move, clips=False, steps=6)) > 0


def test_distributed_trainings_are_refused() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with one_rank(), pytest.raises(PlanError, match="distributed"):
        StreamedTraining(model, optimizer, HostLanes(), HostStateMemory(), step_in_backward=True)


def test_hosts_without_lanes() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = StreamedTraining(
        model, optimizer, HostLanes(), HostStateMemory(), step_in_backward=True
    )
    for number in range(6):
        optimizer.zero_grad()
        model(torch.full((2, 16), float(number))).sum().backward()
        optimizer.step()
    assert training.status().step_in_backward
    assert training.counts.ahead > 0
    assert (training.model, training.optimizer) == (model, optimizer)
    training.close()
