"""Weights and gradients in host memory come to the device for their update."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from streamed_programs import UNITS, WIDTH, Program, bits, nothing, stock_bits
from torch import nn

from umem.core.classes import TensorClass
from umem.streaming.stage import Lane, Slot
from umem.streaming.step.pieces import PieceUpdate

lanes_of = partial(LazyLanes, eagerness=0.5, seed=3)


def run(**options: Any) -> Program:
    """A streamed run of which no bit differs from the stock one."""
    # Gradients leave, and stay on the host for the update.
    streamed = Program(lanes_of, copied_gradients=UNITS, **options)
    assert bits(streamed.run(nothing)) == stock_bits(nothing, **options)
    return streamed


def large_bytes(program: Program) -> int:
    """Of all weights with a home."""
    every = [it.nbytes for it in program.model.parameters()]
    return sum(size for size in every if size >= 64)


def test_weights_and_gradients_come_with_the_state_and_weights_go_with_it() -> None:
    program = run()
    lanes = program.lazy
    all_bytes, steps = large_bytes(program), 4
    assert lanes.copied[Lane.COPY_IN, TensorClass.WEIGHTS] == steps * all_bytes
    assert lanes.copied[Lane.COPY_OUT, TensorClass.WEIGHTS] == steps * all_bytes
    # In the first step no gradient has left yet.
    assert lanes.copied[Lane.COPY_IN, TensorClass.GRADIENTS] >= (steps - 1) * all_bytes
    # Only the comparison at the end waits for an update.
    assert program.training.counts.waited == 0


def test_without_room_beside_the_state_they_are_used_where_they_are() -> None:
    lanes = run(most_buffers=2).lazy
    assert not lanes.copied[Lane.COPY_IN, TensorClass.WEIGHTS]
    assert not lanes.copied[Lane.COPY_OUT, TensorClass.WEIGHTS]
    assert lanes.copied[Lane.COPY_IN, TensorClass.OPTIMIZER_STATE]


def test_a_plan_may_leave_no_room_for_them() -> None:
    def plan(program: Program) -> None:
        if program.training is not None:
            units = program.training.step.units
            units.set_plan(frozenset(), 2, stages_operands=program.steps < 3)

    program = Program(lanes_of)
    found = program.run(plan, steps=6)
    assert bits(found) == bits(Program(None).run(plan, steps=6))
    buffers_bytes = program.training.step.units.device_bytes
    assert buffers_bytes == program.training.step.units.slots_bytes


@pytest.mark.parametrize("kind", ["default", "fused"])
def test_a_graph_that_saved_a_weight_notices_its_update_as_without_umem(kind: str) -> None:
    """Fused kernels count no change, so that torch itself does not notice those."""

    def notices(program: Program) -> bool:
        program.step()
        program.stream()
        program.optimizer.zero_grad()
        loss = program.model(program.batch()).square().mean()
        loss.backward(retain_graph=True)
        program.optimizer.step()
        program.model[1].weight.sum().item()  # it waits for the update
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return False

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=kind == "fused")

    def two_weights() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))

    stock, streamed = (
        Program(lanes, make_model=two_weights, make_optimizer=optimizer)
        for lanes in (None, lanes_of)
    )
    assert notices(stock) == notices(streamed) == (kind == "default")


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_a_fused_kernel_unscales(make: Any, clips: bool) -> None:
    """The kernel writes them, so that the program finds them unscaled behind the step."""

    def scaled(program: Program) -> None:
        if program.kept is None:
            program.kept = torch.amp.GradScaler("cpu", init_scale=8.0)
        program.optimizer.zero_grad()
        program.kept.scale(program.model(program.batch()).square().mean()).backward()
        if clips:
            nn.utils.clip_grad_norm_(program.model.parameters(), 0.5)
        program.kept.step(program.optimizer)
        program.kept.update()
        program.seen += [it.grad.clone() for it in program.model.parameters()]

    options: dict[str, Any] = {"make_optimizer": lambda it: make(it, lr=1e-2, fused=True)}
    streamed = Program(lanes_of, copied_gradients=UNITS, **options)
    assert bits(streamed.run(scaled)) == bits(Program(None, **options).run(scaled))


def test_a_copy_is_aligned_as_its_gradient() -> None:
    """Kernels take another loop, which rounds differently, for what is not aligned to 16 bytes."""
    buffer, count = bytearray(1024), 5
    parameters = [nn.Parameter(torch.zeros(count)) for _ in range(8)]
    gradients = [
        torch.frombuffer(buffer, dtype=torch.float32, count=count, offset=4 * number)
        for number in range(8)
    ]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    memory: Any = SimpleNamespace(may_stage=lambda _: True, is_home=lambda _: True)
    piece: Any = SimpleNamespace(state=SimpleNamespace(span=None))
    update = PieceUpdate(piece, [(0, parameters)], is_last=True)
    update.find_operands(memory, lambda _: (), are_alone=True, writes_gradients=False)
    beside = Slot(torch.zeros(update.operand_bytes, dtype=torch.uint8), None)
    pairs = zip(parameters, gradients, strict=True)
    copies: list[Any] = [update.stand_in(it, of, beside).grad for it, of in pairs]
    places = [it.data_ptr() % 16 for it in gradients]
    assert set(places) == {0, 4, 8, 12}
    assert [it.data_ptr() % 16 for it in copies] == places
    ends = [it.data_ptr() + it.nbytes for it in copies]
    assert all(end <= it.data_ptr() for end, it in zip(ends, copies[1:], strict=False))
    assert ends[-1] <= beside.memory.data_ptr() + update.operand_bytes
