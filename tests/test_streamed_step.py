"""A streamed, deferred step gives the bits of the plain one, whatever the program does."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from collectors import StandInCollector
from lazy_lanes import CountedMemory, HostStateMemory, LazyLanes
from streamed_programs import EAGERNESS, Net, NetWithFlat, Program, begin, bits, compare
from streamed_uses import norms_of_state
from torch import nn
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._foreach_utils import _has_foreach_support

import umem
from umem.core.classes import TensorClass
from umem.runtime.guard import guard_of
from umem.runtime.torch_hooks.hidden import hidden_in
from umem.streaming import StreamedTraining
from umem.streaming.stage import HostLanes
from umem.telemetry import Profile, load_run


@pytest.mark.parametrize("make_model", [Net, NetWithFlat])
@pytest.mark.parametrize("most_buffers", [0, 1])
def test_state_is_updated_in_place_where_no_buffer_fits(
    make_model: Callable[[], nn.Module], most_buffers: int
) -> None:
    run = compare(make_model=make_model, most_buffers=most_buffers)
    assert run.training.counts.in_line == 0
    assert (run.training.status().slots_bytes == 0) == (most_buffers == 0)


def test_a_plain_loop_waits_block_by_block_only() -> None:
    run = begin()
    for _ in range(3):
        run.step()
    counts = run.training.counts
    assert (counts.streamed, counts.in_line, counts.waited, counts.early) == (3, 0, 0, 0)
    assert run.lazy.open_tasks > 0  # the last step is still under way
    run.training.close()
    assert run.lazy.open_tasks == 0
    assert all(guard_of(it) is None for it in run.model.parameters())
    states = [it for values in run.optimizer.state.values() for it in values.values()]
    assert all(type(it) is torch.Tensor for it in states)


def under_way(program: Program) -> list[str]:
    """Units whose update nothing has waited for yet, in the order of their updates."""
    return [it.name for it in program.training.step.units if it.pending is not None]


def test_an_average_waits_for_each_unit_by_itself_in_the_order_of_the_updates() -> None:
    run = begin(1)
    assert (every := under_way(run))[0] == ""
    seen, read = [], set()
    for name, weight in run.model.named_parameters():
        average = torch.zeros(weight.shape)
        average.lerp_(weight.detach(), 0.1)
        read.add(name.rpartition(".")[0])
        assert under_way(run) == [it for it in every if it not in read]
        seen.append(run.lazy.open_tasks)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == len(every)
    assert run.lazy.waits == len(every)


def test_units_that_are_read_after_each_step_are_updated_first() -> None:
    run = begin()
    for _ in range(2):
        run.step()
        every = under_way(run)
        assert every[-1] == "head"
        run.model.head.weight.norm()
        assert run.lazy.open_tasks == 0
    for _ in range(6):
        run.step()
        assert under_way(run) == ["head", *every[:-1]]
        run.model.head.weight.norm()
        assert under_way(run) == every[:-1]
        assert run.lazy.open_tasks > 0
        assert not run.training.step.is_used_early
    run.step()  # whose weights nothing reads
    for _ in range(2):
        run.step()
        assert under_way(run) == every


def test_reads_of_some_steps_leave_the_order_as_it_is() -> None:
    run = begin(1)
    every = under_way(run)
    for number in range(8):
        if number % 2:
            [it.norm() for it in reversed(list(run.model.parameters()))]
        run.step()
        assert under_way(run) == every
        assert not run.training.step.is_used_early


def test_the_plan_is_for_a_habit_of_reading_all_weights() -> None:
    run = begin(1)
    found = []
    for number in range(12):
        if number < 6:
            [it.norm() for it in run.model.parameters()]
        run.step()
        found.append(run.training.step.is_used_early)
    assert found == [False] * 3 + [True] * 6 + [False] * 3


class Turned(Net):
    """Calls its layers in the other order from some step on."""

    is_turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for layer in reversed(self.layers) if self.is_turned else self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def test_state_leaves_the_device_after_many_steps_without_work() -> None:
    """Blocks have hooks from then on, and units the order of the forward pass one step later."""
    units = frozenset(("stem", *(f"layers.{it}" for it in range(4)), "norm", "head", ""))

    def change(program: Program) -> None:
        program.model.is_turned = program.steps > 3
        training = program.training
        if training is None or program.steps < 6:
            return
        hooked = [hidden_in(layer._forward_pre_hooks) > 0 for layer in program.model.layers]
        if program.is_first("leaves"):
            assert (training.counts.resident, training.counts.streamed) == (5, 0)
            assert hooked == [False] * 4
            training.step.units.set_plan(frozenset(), 2)
            return
        assert hooked == [True] * 4
        if program.steps > 7:
            layers = [name for name in training.step.units.sizes() if name.startswith("layers.")]
            assert layers == ["layers.3", "layers.2", "layers.1", "layers.0"]
            assert training.counts.early == 0

    run = compare(change, steps=9, make_model=Turned, resident=units)
    assert (run.training.counts.resident, run.training.counts.streamed) == (5, 5)


@pytest.mark.parametrize("arguments", [((None,), {}), ((), {"closure": None})])
def test_a_step_that_names_no_closure_is_streamed(arguments: Any) -> None:
    """As Accelerate calls it."""
    run = begin()
    run.backward()
    run.optimizer.step(*arguments[0], **arguments[1])
    assert (run.training.counts.streamed, run.training.counts.in_line) == (1, 0)


def test_questions_that_need_no_value_do_not_wait() -> None:
    run = begin()
    run.step()
    waits = run.lazy.waits
    weight = run.model.head.weight
    gradient = weight.grad
    assert guard_of(weight) is not None
    assert guard_of(gradient) is not None
    assert type(weight) is nn.Parameter
    facts = weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.numel()
    assert facts == (torch.Size([4, 16]), torch.float32, torch.device("cpu"), True, 64)
    assert weight.grad is gradient
    run.optimizer.zero_grad()
    assert weight.grad is None
    assert dict(run.model.named_parameters())["head.weight"] is weight
    assert run.lazy.waits == waits
    torch.save(weight, io.BytesIO())
    assert run.lazy.waits > waits
    assert guard_of(weight) is None


def test_torch_chooses_kernels_for_guarded_tensors_as_for_others() -> None:
    run = begin()
    run.step()
    parameters = [it for it in run.model.parameters() if guard_of(it) is not None]
    gradients: list[torch.Tensor] = [
        it.grad for it in parameters if it.grad is not None and guard_of(it.grad) is not None
    ]
    assert len(parameters) == len(gradients) > 0
    assert _has_foreach_support(gradients, torch.device("cuda"))  # as clip_grad_norm_ asks
    assert {type(it) for it in parameters} <= set(_foreach_supported_types)  # as optimizers ask
    assert {type(it) for it in gradients}.isdisjoint({nn.Parameter})


def test_join_waits_for_all() -> None:
    run = begin()
    run.step()
    umem.join()
    assert all(guard_of(it) is None for it in run.model.parameters())


def test_a_model_may_be_pickled_and_goes_when_it_is_dropped() -> None:
    run = begin()
    run.step()
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    assert bits(list(copied.parameters())) == bits(list(run.model.parameters()))
    copied(run.batch()).sum().backward()
    reference = weakref.ref(run.model)
    parameters = list(run.model.parameters())
    run.step()
    run.model = None
    gc.collect()
    assert reference() is None
    assert all(type(it) is nn.Parameter for it in parameters)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaler_and_skipped_steps(make: Any, fused: bool) -> None:
    def run(program: Program) -> None:
        program.backward_with_scaler()
        program.kept.step(program.optimizer)
        program.kept.update()
        program.seen.append(program.kept.get_scale())

    compare(run, make_optimizer=lambda it: make(it, lr=1e-2, fused=fused), steps=5)


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
def test_schedulers(lr: Any) -> None:
    def change(program: Program) -> None:
        if program.kept is None:
            program.kept = torch.optim.lr_scheduler.ExponentialLR(program.optimizer, 0.7)
        program.kept.step()

    def make(parameters: Any) -> Any:
        value = lr.clone() if isinstance(lr, torch.Tensor) else lr
        return torch.optim.AdamW(parameters, lr=value, foreach=False)

    compare(change, make_optimizer=make)


@pytest.mark.parametrize("eagerness", EAGERNESS)
def test_groups_across_blocks(eagerness: float) -> None:
    def make(parameters: Any) -> Any:
        every: list[torch.Tensor] = list(parameters)
        flat = [it for it in every if it.ndim == 1]
        wide = [it for it in every if it.ndim > 1]
        groups: list[dict[str, Any]] = [{"params": flat, "weight_decay": 0.0}, {"params": wide}]
        return torch.optim.AdamW(groups, lr=1e-2)

    assert compare(make_optimizer=make, eagerness=eagerness).training.counts.waited == 0


@pytest.mark.parametrize("eagerness", EAGERNESS)
def test_two_optimizers_of_one_model(eagerness: float) -> None:
    def second(program: Program) -> None:
        if program.kept is None:
            program.extra = nn.Linear(16, 16)
            program.kept = torch.optim.AdamW([*program.extra.parameters()], lr=1e-2)
            program.model(program.extra(program.batch())).sum().backward()
            program.kept.step()
            if program.lanes is not None:
                wrapped = nn.Sequential(program.extra, program.model)
                program.second = StreamedTraining(
                    wrapped, program.kept, program.lanes(wrapped), HostStateMemory()
                )
                program.wrapped = wrapped
        program.kept.zero_grad()
        program.model(program.extra(program.batch())).sum().backward()
        program.kept.step()
        program.seen.append([it.detach().clone() for it in program.extra.parameters()])

    compare(second, eagerness=eagerness)


@pytest.mark.slow
def test_compiled_models_wait_in_the_step() -> None:
    def make_model() -> Any:
        torch._dynamo.reset()
        model = Net()
        model.compile(backend="eager")
        return model

    run = compare(make_model=make_model)
    assert run.training.counts.streamed == 4
    assert run.training.counts.early == 0


def test_a_profile_counts_streamed_state(tmp_path: Path) -> None:
    lanes = HostLanes()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()

    step()
    training = StreamedTraining(model, optimizer, lanes, HostStateMemory(min_bytes=512))
    step()  # lays out the state
    with Profile(StandInCollector("not here"), required=False, steps=2) as profile:
        for _ in range(2):
            step()
            profile.step()
    training.close()
    profile.save(tmp_path / "run.json")
    # Here all has its home on the host. Biases are too small.
    weight_bytes = 3 * 4 * 16 * 16
    state_bytes = 2 * weight_bytes
    for report in (profile.report(), load_run(tmp_path / "run.json").typical):
        traffic = report.traffic
        assert {(it.direction, it.cause, it.tensor_class): it.bytes for it in traffic} == {
            ("to_device", "copy", TensorClass.OPTIMIZER_STATE): state_bytes,
            ("to_host", "copy", TensorClass.OPTIMIZER_STATE): state_bytes,
            ("to_device", "copy", TensorClass.WEIGHTS): weight_bytes,
            ("to_host", "copy", TensorClass.WEIGHTS): weight_bytes,
            ("to_device", "copy", TensorClass.GRADIENTS): weight_bytes,
        }


def closures(program: Program) -> None:
    """As Lightning steps; called without gradients, one of the closures fails."""

    def closure() -> torch.Tensor:
        program.optimizer.zero_grad()
        loss: torch.Tensor = program.model(program.batch()).square().mean()
        loss.backward()
        if program.steps > 3 and program.is_first("failure"):
            raise ValueError("no batch")
        nn.utils.clip_grad_norm_(program.model.parameters(), 0.5)
        return loss

    for _ in range(3):
        with torch.no_grad(), suppress(ValueError):
            program.seen.append(program.optimizer.step(closure).detach())


@pytest.mark.slow
@pytest.mark.parametrize("eagerness", EAGERNESS)
def test_steps_with_closures_are_streamed(eagerness: float) -> None:
    counts = compare(closures, eagerness=eagerness).training.counts
    # Four plain ones, and nine of which one fails before its step.
    assert (counts.streamed, counts.in_line, counts.waited) == (4 + 9 - 1, 0, 0)


def test_state_is_made_in_the_order_of_the_optimizer() -> None:
    def change(program: Program) -> None:
        norms_of_state(program)
        program.optimizer.state.clear()

    compare(change, steps=2)


# ------------------------------------------------------------------ uses between step and forward


class FullMemory(HostStateMemory):
    """A device without room for more state than it has."""

    def place(self, tensor: torch.Tensor, *, on_device: bool) -> None:
        if not on_device:
            super().place(tensor, on_device=False)

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """State that is on the device from its birth on."""
        for tensor in tensors:
            super().place(tensor, on_device=True)


@pytest.mark.parametrize("is_planned", [False, True])
def test_state_stays_where_it_is_if_there_is_no_plan_or_no_room(is_planned: bool) -> None:
    stock, program = Program(None), Program(None)
    for it in (stock, program):
        it.step()
    first, second = program.model.layers[0], program.model.layers[1]
    state, memory = program.optimizer.state, FullMemory()
    every = [state[it][name] for it in first.parameters() for name in ("exp_avg", "exp_avg_sq")]
    memory.take([*every, state[second.weight]["exp_avg"]])
    lanes = LazyLanes(program.model, 0.5, 1)
    training = StreamedTraining(program.model, program.optimizer, lanes, memory)
    units = training.step.units
    if is_planned:
        units.set_plan(frozenset({"layers.0", "layers.1", "layers.2"}), 1)
    for it in (stock, program):
        it.step()
        it.step()
    assert units.resident_bytes == sum(it.nbytes for it in every)
    assert units.slots_bytes > 0
    # All state of a parameter is in one place.
    assert all(memory.is_home(state[second.weight][name]) for name in ("exp_avg", "exp_avg_sq"))
    assert [unit.name for unit in units if unit.state is None] == ["layers.0"]
    assert bits([*program.model.parameters()]) == bits([*stock.model.parameters()])


def test_a_new_plan_takes_no_more_memory_than_either() -> None:
    program = Program(None)
    program.step()
    memory = CountedMemory()
    lanes = LazyLanes(program.model, 0.5, 1)
    training = StreamedTraining(program.model, program.optimizer, lanes, memory)
    units = training.step.units
    needed_bytes = []
    for resident in ({"layers.2", "layers.3"}, {"layers.0", "layers.1"}):
        units.set_plan(frozenset(resident), 1, stages_operands=False)
        program.step()
        program.step()
        needed_bytes.append(memory.bytes)
        resident_bytes = sum(sum(units.sizes()[name]) for name in resident)
        assert memory.bytes == units.slots_bytes + resident_bytes
    assert memory.peak_bytes == max(needed_bytes)
