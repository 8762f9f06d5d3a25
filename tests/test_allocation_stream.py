"""The recorded stream is a real training step's: it conserves blocks and its bytes add up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from allocation_stream import AllocationStream, record_training

from umem.core.classes import TensorClass

WIDTH = 64
BATCH = 8


def _record(
    *, frozen: int = 0, micro_batches: int = 1, steps: int = 3
) -> tuple[AllocationStream, torch.nn.Module]:
    """Record three square linear layers, the first `frozen` of them without gradients."""
    made = {}

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
        model = made["model"] = torch.nn.Sequential(*layers)
        model.register_buffer("scale", torch.ones(3))
        for layer in layers[:frozen]:
            layer.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, fused=True)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(micro_batches):
            model(torch.ones(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return record_training(build, step, steps=steps), made["model"]


def _born(stream: AllocationStream, tensor_class: TensorClass) -> list[int]:
    sizes: list[int] = stream.block_bytes[stream.block_class == tensor_class.number].tolist()
    return sizes


def test_every_block_is_born_once_and_dies_at_most_once_afterwards() -> None:
    stream, _ = _record()
    alive: set[int] = set()
    for event in stream.events.tolist():
        if event > 0:
            assert event not in alive
            alive.add(event)
        else:
            alive.remove(-event)  # KeyError when it was never born, or died before
    births = Counter(event for event in stream.events.tolist() if event > 0)
    assert births == Counter(range(1, len(stream.block_bytes) + 1))
    assert {int(block) + 1 for block in stream.live_blocks()} == alive


def test_bytes_by_class_are_the_models() -> None:
    stream, model = _record(frozen=1)
    matrix = WIDTH * WIDTH * 4
    assert sum(p.nbytes for p in model.parameters()) == 3 * matrix
    built = stream.class_bytes(stream.step_starts[0])
    assert built == {
        **dict.fromkeys(TensorClass, 0),
        TensorClass.FROZEN_WEIGHTS: matrix,
        TensorClass.WEIGHTS: 2 * matrix,
        TensorClass.OTHER: 3 * 4,
    }
    trained = stream.class_bytes()
    assert trained[TensorClass.WEIGHTS] == 2 * matrix
    # Two moments per trained weight, and a step count of 4 bytes for each parameter.
    assert trained[TensorClass.OPTIMIZER_STATE] == 2 * (2 * matrix + 4)
    assert trained[TensorClass.GRADIENTS] == 0


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_found_once_a_step(micro_batches: int) -> None:
    stream, _ = _record(frozen=1, micro_batches=micro_batches, steps=2)
    assert _born(stream, TensorClass.GRADIENTS) == [WIDTH * WIDTH * 4] * 2 * 2


def test_steps_after_the_first_are_alike() -> None:
    stream, _ = _record(steps=4)
    first, second, third, fourth = stream.step_starts
    assert np.array_equal(
        np.sign(stream.events[second:third]), np.sign(stream.events[third:fourth])
    )
    assert stream.class_bytes(second) == stream.class_bytes(third) == stream.class_bytes()
    assert len(stream.live_blocks(second)) > len(stream.live_blocks(first))


def test_a_view_and_an_empty_tensor_are_no_blocks() -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(4, 4, bias=False)
        return model, torch.optim.SGD(model.parameters())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tensor = torch.empty(10)
        assert tensor.view(2, 5)[1].numel() == 5
        assert torch.empty(0).numel() == 0

    stream = record_training(build, step, steps=1)
    in_step = stream.events[stream.step_starts[0] :]
    assert len(in_step) == 2
    assert stream.block_bytes[in_step[0] - 1] == 40


def test_no_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="steps must be 1 or more"):
        _record(steps=0)
